"""bfloat16: float32's range with 8 significant bits, rounded to nearest even.

What travels: x [n] as 16-bit patterns. Neither Horovod 0.28.1 (PyTorch) nor MPI can sum bfloat16, so it
goes by scatter-reduce: an all-to-all gives each rank one shard of every rank's x, it sums them in
float32, rounds the sum once, and all-gathers the result. Every partial sum is exact float32.

Bytes: 2·s·p + 2·s with shards of s = ⌈n/p⌉ elements: 2n + 2n/p.

Departures: none known; there is no one paper. Values above 3.3895e38 saturate instead of becoming Inf.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("bf16", world=2, min_elements=1)
>>> net.allreduce([np.float32([1, 1e30]), np.float32([2, 3e30])], name="w")[0]
array([1.5000000e+00, 2.0005111e+30], dtype=float32)
"""

from __future__ import annotations

from typing import Any

from hvdcompress.method import Array, Communication, Context, Method, Reduced, TensorSpec, method
from hvdcompress.parts import codecs


@method
class Bf16(Method):
    paper = "bfloat16 (Kalamkar et al. 2019, arXiv 1905.12322)"
    sends = "2n + 2n/p bytes: scatter-reduce of 16-bit shards"

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return codecs.reduced_num_bytes(spec.size, "bf16", world)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        total, own = yield from codecs.all_reduce(x, "bf16", ctx, ops)
        return Reduced(total=total, own=own)
