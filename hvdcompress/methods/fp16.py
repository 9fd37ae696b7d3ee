"""Half precision: gradients are rounded to IEEE float16 and summed in float16.

The division by p follows PyTorch's ``fp16_compress_hook``: it keeps the sum in range for any number of ranks.

    ĝ = p · Σ fp16(x / p)

What is sent: x/p [n] in float16, by one all-reduce.

Bytes: 2n.

When it loses: every partial sum is rounded to 11 significant bits, so the error grows with the number of ranks, up to
about p·2^-13 (6 % at 1024 ranks). Values below about 6e-8·p become zero. If your gradients are that small, use
``loss_scale``, feedback "plain", or the method bf16.

Departures from a plain cast (Horovod's ``Compression.fp16``): the division by p; values beyond ±65376 saturate
instead of becoming Inf, and the ledger counts them as "saturated".

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("fp16", world_size=2, min_elements=1)
>>> net.allreduce([np.float32([1, 1e9]), np.float32([2, 1e9])], name="w")[0]
array([1.5000e+00, 6.5376e+04], dtype=float32)
>>> net.ledger.counters(rank=0)
{'saturated': 1}
"""

from __future__ import annotations

from hvdcompress.method import Array, Communication, Context, Method, Reduced, TensorSpec, Workspace, method
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import codecs
from hvdcompress.parts.sums import Codec


@method
class Fp16(Method):
    """Rounds gradients to float16 and sums them in float16."""

    paper = "IEEE 754 half precision; pre-scaled as in torch's fp16_compress_hook"
    sends = "2n bytes, summed"
    granularity = "element"

    @property
    def shard_codec(self) -> Codec:
        return codecs.codec("fp16")

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return codecs.reduced_num_bytes(spec.size, "fp16", world_size)

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        # all tensors of a bucket are converted into one buffer, which is then summed as it is
        conversion = codecs.halves(ctx.spec.size, ctx, work, like)
        start = sum(ctx.spec.parts[:index])
        stop = start + ctx.spec.parts[index]
        return Scan(halves=conversion._replace(out=conversion.out[start:stop]))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        counts = [found.saturated for found in work.scanned or ()]
        converted = bool(counts) and all(count is not None for count in counts)
        saturated = sum(counts) if converted else None  # None: sum_of_halves converts x itself
        total, own = yield from codecs.sum_of_halves(x, ctx, work, saturated=saturated)
        return Reduced(total=total, own=own)
