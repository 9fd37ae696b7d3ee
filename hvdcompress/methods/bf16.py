"""bfloat16: gradients are rounded to 16 bits, with float32's range and 8 significant bits.

Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019 (arXiv 1905.12322), defines the format.

Neither Horovod 0.28.1 (PyTorch) nor MPI can sum bfloat16, so the sum is a scatter-reduce with
s = ⌈n/p⌉ elements per shard:

    all-to-all:          rank r receives shard r of every rank's bf16(x)
    rank r:              S_r = bf16(Σ shard r)         summed in float32, rounded once
    all-gather:          ĝ = S_0, S_1, …, S_{p−1}

What is sent: x [n] as 16-bit patterns, by an all-to-all; then one summed shard, by an all-gather.

Bytes: 2·s·p + 2·s with shards of s = ⌈n/p⌉ elements: 2n + 2n/p.

When it loses: two collectives instead of one, and only half of the dense bytes saved. On fast links that is slower than
a dense all-reduce.

Departures from the paper: none, as the paper defines only the format. Magnitudes above 3.3895e38 saturate instead of
becoming Inf.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("bf16", world_size=2, min_elements=1)
>>> net.allreduce([np.float32([1, 1e30]), np.float32([2, 3e30])], name="w")[0]
array([1.5000000e+00, 2.0005111e+30], dtype=float32)
"""

from __future__ import annotations

from hvdcompress.method import Array, Communication, Context, Method, Reduced, TensorSpec, Workspace, method
from hvdcompress.parts import codecs, sums
from hvdcompress.parts.sums import Codec


@method
class Bf16(Method):
    """Rounds gradients to bfloat16 and sums them by scatter-reduce."""

    paper = "bfloat16 (Kalamkar et al. 2019, arXiv 1905.12322)"
    sends = "2n + 2n/p bytes: scatter-reduce of 16-bit shards"

    @property
    def shard_codec(self) -> Codec:
        return codecs.codec("bf16")

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return codecs.reduced_num_bytes(spec.size, "bf16", world_size)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        total, own = yield from sums.scatter(x, codecs.codec("bf16"), ctx, work)
        return Reduced(total=total, own=own)
