"""No compression: the dense all-reduce of the stock optimizer.

This is the baseline of every table. Tensors smaller than ``min_elements`` are sent this way under any method.

    ĝ = Σ x

What is sent: x [n] in float32 (float64 for float64 gradients), by one all-reduce.

Bytes: 4n (8n for float64).

When it loses: on links where sending 4n bytes takes longer than compressing the gradient.

Departures from the stock optimizer: float16 and bfloat16 gradients are summed in float32, so that sums neither
overflow nor lose digits. Use the methods fp16 or bf16 to send 16 bits per value.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("none", world_size=2)
>>> net.allreduce([np.float32([1, 2]), np.float32([3, 4])], name="w")[0]
array([2., 3.], dtype=float32)
"""

from __future__ import annotations

from hvdcompress.method import AllReduce, Array, Communication, Context, Method, Reduced, TensorSpec, Workspace, method


@method
class Dense(Method):
    """Sums gradients by a dense all-reduce, without compression."""

    paper = "no compression (the dense baseline)"
    sends = "4n bytes, summed"
    identity = True
    granularity = "element"

    @property
    def keeps_float64(self) -> bool:  # type: ignore[override]
        return self.feedback == "none"  # with feedback, x is float32 like the residual

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return (8 if self.keeps_float64 and spec.dtype == "float64" else 4) * spec.size

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        # The driver copied the gradients of a bucket into x, so the sum may overwrite x unless feedback still reads it.
        total = yield AllReduce(x, may_overwrite=len(ctx.spec.parts) > 1 and not ctx.needs_own)
        return Reduced(total=total, own=x)
