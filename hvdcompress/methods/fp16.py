"""Half precision: every gradient is rounded to IEEE float16 and summed in float16.

What travels: x/p [n] float16, summed (p = number of workers), multiplied by p again on arrival. The
division keeps a sum of any number of workers in range, as PyTorch's own ``fp16_compress_hook`` does.

Bytes: 2n.

Departures from a plain cast (Horovod's ``Compression.fp16``): the division by p; a value beyond 65376
saturates instead of becoming Inf, and is counted in the ledger as "saturated". Every partial
sum is rounded to 11 bits, so sums of many workers drift (by up to about p·2^-13: 6 % at 1024). Values below about
6e-8·p round to zero: use ``loss_scale``, feedback "plain", or bf16 where gradients are that small.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("fp16", world=2, min_elements=1)
>>> net.allreduce([np.float32([1, 1e9]), np.float32([2, 1e9])], name="w")[0]
array([1.5000e+00, 6.5376e+04], dtype=float32)
>>> net.ledger.counters(rank=0)
{'saturated': 1}
"""

from __future__ import annotations

from typing import Any

from hvdcompress.method import Array, Communication, Context, Method, Reduced, TensorSpec, method
from hvdcompress.parts import codecs


@method
class Fp16(Method):
    paper = "IEEE 754 half precision; pre-scaled as in torch's fp16_compress_hook"
    sends = "2n bytes, summed"

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return codecs.reduced_num_bytes(spec.size, "fp16", world)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        total, own = yield from codecs.all_reduce(x, "fp16", ctx, ops)
        return Reduced(total=total, own=own)
