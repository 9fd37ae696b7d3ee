"""FFT: gradients are sparsified in the frequency domain, and what is kept is written as range floats.

Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020
(arXiv 1811.08596).

    g → (fp16, optional) → F = rfft(g) → keep the top (1 − θ) share of |F| → indices + packed re/im
      → N-bit range float → all-gather → sum the spectra → one inverse FFT

The transform is linear, so the sum of spectra is the spectrum of the sum, and one inverse serves all ranks.
A large tensor is transformed in blocks of ``block`` elements, the last one as short as it comes; the top share
is that of all blocks together. ``density`` is 1 − θ, the share of the frequencies that are *kept*, typically 0.15.
With ``recovery`` above 1 it grows by that factor each time that the training loss gets worse: the paper proves
convergence for diminishing θ, and reports that lowering θ recovers the accuracy after a failure.

Steep spectra span more octaves than normal data, for which "rangefloat10" has its 6 bits of mantissa: on slow
waves "rangefloat10m5" errs by 0.006 where the default errs by 0.017.

It pays where neighbours in memory are alike. At density 0.15 the error ‖ĝ − g‖/‖g‖ is 0.016 on smooth data (top-k
in the time domain: 0.66 on smoothed noise), but 0.75 on white noise (0.67). The gradients of a small convolutional
net on scikit-learn's digits were more like noise: 0.50 to 0.53, 0.55 to 0.61 with ``order: filters``, and 0.32 to
0.44 by top-k. So measure on your own.

What travels: k = ⌊density·B⌋ of B frequencies of each rank, gathered, each of them two values; B is ⌊L/2⌋ + 1 for
each block of L elements. The bytes received grow with the p workers: against a ring of dense gradients an all-gather
pays on bytes only if the rate is above p/2.

Bytes: 24 (header) + indices + ⌈2·k·N/8⌉ + 8 (the range), sections rounded up to 4: bits = 2(1 − θ)BN + B + header
with the paper's bitmap, 16x for θ = 0.85 and N = 10; Elias-Fano indices, taken where they are shorter, give 17x.
``num_bytes`` is for no trigger yet: those of ``recovery`` raise k.

Departures from the paper: blocks; indices by size; decoding to the middle of a bin; what a bin is worth is
compared by its energy where the last block is shorter. N = 8 or 10, and that the paper keeps no residual, is
believed, not confirmed; the default keeps none. Ranks end bit-identical as far as their machines' inverse FFTs are.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("fft", world=2, density=0.15)
>>> g = np.sin(np.arange(65536, dtype=np.float32) / 50)
>>> out = net.allreduce([g, 3 * g], name="w")[0]
>>> float(np.linalg.norm(out - 2 * g) / np.linalg.norm(2 * g)) < 0.02
True
>>> 4 * 65536 / net.ledger.bytes_sent(rank=0)
17.246315789473684
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hvdcompress.method import (
    AllGather,
    Array,
    Communication,
    Context,
    Density,
    Method,
    Number,
    Reduced,
    Sparse,
    TensorSpec,
    Values,
    add_shares,
    method,
)
from hvdcompress.parts import matrices, pack, select
from hvdcompress.parts.codecs import codec

FLOAT_MAX = 3.4028234663852886e38


def _power_of_two(block: int) -> int:
    if block < 0 or block & (block - 1):
        raise ValueError("must be a power of two, or 0 for the whole tensor")
    return block


@method
class FFT(Method):
    paper = "Wang et al., HPDC 2020 (arXiv 1811.08596)"
    sends = "k of the n/2 + 1 frequencies, two range floats and an index each, gathered: received bytes grow with p"
    exact = False
    examples = ({"block": 16}, {"block": 0}, {"feedback": "plain", "block": 16}, {"recovery": 2.0})

    density: Density = 0.15
    """Share of the frequencies that each rank sends: 1 − θ."""
    values: Values = "rangefloat10"
    """How real and imaginary parts are written: rangefloat4 … rangefloat16, fp32, fp16, bf16, qsgd2 … qsgd8."""
    block: Annotated[int, Number, AfterValidator(_power_of_two)] = 4096
    """Elements that are transformed together, a power of two; 0: the whole tensor."""
    order: Literal["stored", "filters"] = "stored"
    """How a convolution's elements are strung together: as they lie in memory, or so that the same weight of all
    filters is adjacent (((h·W + w)·D + d)·F + f, as in GradiVeQ). Other tensors are taken as they lie."""
    half: bool = False
    """Whether gradients are rounded to fp16 first, as in the paper."""
    recovery: Annotated[float, Number, Field(ge=1.0, le=1000.0)] = 1.0
    """Factor by which the density grows when the loss gets worse; 1: never."""
    tolerance: Annotated[float, Number, Field(ge=0.0)] = 0.1
    """How much worse than its best the loss must be, as a share of it, for ``recovery`` to act."""

    def length(self, n: int) -> int:
        """Elements of a whole block."""
        return self.block if 0 < self.block < n else max(n, 1)

    def places(self, spec: TensorSpec) -> int:
        """B, the number of frequencies."""
        whole, rest = divmod(spec.size, self.length(spec.size))
        return whole * (self.length(spec.size) // 2 + 1) + (rest // 2 + 1 if rest else 0)

    def reorders(self, spec: TensorSpec) -> bool:
        """Whether the elements are transformed in another order than they lie."""
        return self.order == "filters" and len(spec.shape) == 4

    def num_kept(self, spec: TensorSpec, triggers: int = 0) -> int:
        """k, after so many triggers."""
        density = min(1.0, self.density * self.recovery ** min(triggers, 100))
        return select.kept(density, self.places(spec))

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return pack.num_bytes(self.num_kept(spec), self.places(spec), self.values, per=2)

    def notices(self, metric: str, value: float, low: float, high: float) -> bool:
        return self.recovery > 1 and metric == "loss" and value > low + self.tolerance * abs(low)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Array:
        length = self.length(ctx.spec.size)
        if self.half:
            half = codec("fp16")
            x = half.decode(half.encode(x, ctx, ops), len(x), ops)
        if self.reorders(ctx.spec):
            x = matrices.collocated(x, ctx.spec, ops)
        spectrum = ops.rfft(x, length)  # [2·B] float32, re and im in turns
        index = ops.top_k(ops.magnitudes(spectrum), self.num_kept(ctx.spec, ctx.triggers))  # [k] int32, ascending
        chosen = ops.take(spectrum, ops.pair_places(index))  # [2·k] float32
        chosen = ops.scaled(chosen, length**0.5)  # now of the unitary transform: as large as gradients are
        return pack.encode(Sparse(index, chosen), self.places(ctx.spec), self.values, self.id, ctx, ops, per=2)

    def decode(self, payload: Array, ctx: Context, ops: Any) -> Sparse:
        """Frequencies [k] and their re and im in turns [2·k]."""
        k = self.num_kept(ctx.spec, ctx.triggers)
        return pack.decode(payload, k, self.places(ctx.spec), self.values, self.id, ops, per=2)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        pieces = yield AllGather(self.encode(x, state, ctx, ops))
        shares = [self.decode(piece, ctx, ops) for piece in pieces]
        total = self.invert(shares, FLOAT_MAX, ctx, ops)
        # a quarter, so that what it leaves behind is finite too
        own = self.invert([shares[ctx.rank]], FLOAT_MAX / 4, ctx, ops) if ctx.needs_own else None
        return Reduced(total=total, own=own)

    def invert(self, shares: Sequence[Sparse], limit: float, ctx: Context, ops: Any) -> Array:
        """The gradient [n] whose spectrum is the sum of the shares."""
        n, length = ctx.spec.size, self.length(ctx.spec.size)
        summed = add_shares([Sparse(ops.pair_places(s.index), s.values) for s in shares], ops)
        spectrum = ops.zeros(2 * self.places(ctx.spec), "float32", like=summed.values)
        room = 2.0 ** (8 * len(shares) * length).bit_length()  # not even a sum of all frequencies will overflow
        ops.write(spectrum, summed, 1.0 / room)
        x = ops.scaled(ops.irfft(spectrum, n, length), room / length**0.5, limit)
        return matrices.as_it_lay(x, ctx.spec, ops) if self.reorders(ctx.spec) else x
