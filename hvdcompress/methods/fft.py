"""FFT: gradients are sparsified in the frequency domain, and the kept frequencies are written as range floats.

Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020
(arXiv 1811.08596).

    g → (fp16, optional) → F = rfft(g) → keep the top (1 − θ) share of |F| → indices + packed re/im
      → N-bit range float → all-gather → sum the spectra → one inverse FFT

The FFT is linear: the sum of the spectra is the spectrum of the sum, so one inverse FFT serves all ranks. Large
tensors are transformed in blocks of ``block`` elements (the last may be shorter), and the top share is taken over all
blocks together. ``density`` is 1 − θ, the share of the frequencies that is *kept*, typically 0.15.

What is sent: k = ⌊density·B⌋ frequencies of B per rank, each two values and an index, by an all-gather. B is
⌊L/2⌋ + 1 for each block of L elements. The bytes received grow with p: the all-gather moves fewer bytes than a ring
of dense gradients only if the compression ratio is above p/2.

Bytes: 24 (header) + indices + ⌈2·k·N/8⌉ + 9 (the range), sections rounded up to 4: bits = 2(1 − θ)BN + B + header
with the paper's bitmap, 16x for θ = 0.85 and N = 10; Elias-Fano indices, taken where they are shorter, give 17x.
``num_bytes`` assumes no trigger so far: each trigger of ``recovery`` raises k.

When it helps: when few frequencies have more of the energy than as large a share of the elements. That neighbours in
memory are similar makes it so, and heavy tails of the elements make it not so. At density 0.15 the error ‖ĝ − g‖/‖g‖
is 0.016 on smooth data (0.66 for top-k in the time domain, on smoothed noise), but 0.75 on white noise (0.67). The
gradients of a small convolutional network on scikit-learn's digits are correlated in memory, by 0.28 to 0.47 from one
element to the next, yet with a kurtosis of 9 to 38 the largest elements serve them better: 0.07 to 0.47 by layer, and
0.49 to 0.58 for frequencies. Of eleven tensors of a small transformer, frequencies serve the one that is correlated
(0.46) and has light tails (4.6) better. docs/formats.md has the tables; measure it on your own gradients.

``values``: how many of the 10 bits of "rangefloat10" are mantissa is chosen from the spectrum's range: mostly 6, and 5
for spectra that fall steeply, such as of slow waves (error 0.006; with "rangefloat10m6" 0.017).

``recovery``: a factor above 1 by which the density grows whenever the training loss gets worse. The paper proves
convergence for diminishing θ, and reports that lowering θ restores the accuracy after a failure.

Elements whose gradient is always zero, such as the rows of an embedding's padding, move all the same: what is left out
of the frequencies of a block comes back in all of its elements. Leave such a tensor out by a rule
(``{match: {name: …}, method: none}``).

Departures from the paper: blocks; indices coded by size; range floats decode to the middle of a bin; frequencies are
compared by energy if the last block is shorter. Ranks end with identical bits if their inverse FFTs round alike. Two
points are believed, not confirmed: that N is 8 or 10, and that the paper keeps no residual (the default keeps none).

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
from typing import Annotated, Literal

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
    Workspace,
    method,
)
from hvdcompress.ops.shared import bins
from hvdcompress.ops.vectors import Waves
from hvdcompress.parts import matrices, pack, select
from hvdcompress.parts.codecs import codec

FLOAT_MAX = 3.4028234663852886e38


def _power_of_two(block: int) -> int:
    """A power of two, or 0."""
    if block < 0 or block & (block - 1):
        raise ValueError("must be a power of two, or 0 for the whole tensor")
    return block


@method
class FFT(Method):
    """Each rank sends the k largest frequencies of its gradient, as range floats."""

    paper = "Wang et al., HPDC 2020 (arXiv 1811.08596)"
    sends = "k of the n/2 + 1 frequencies, two range floats and an index each, gathered: received bytes grow with p"
    exact = False
    examples = ({"block": 16}, {"block": 0}, {"feedback": "plain", "block": 16}, {"recovery": 2.0})

    density: Density = 0.15
    """Fraction of the frequencies that each rank sends, 1 − θ."""
    values: Values = "rangefloat10"
    """Number format of real and imaginary parts: rangefloat4 … rangefloat16, fp32, fp16, bf16, qsgd2 … qsgd8."""
    block: Annotated[int, Number, AfterValidator(_power_of_two)] = 4096
    """Number of elements per FFT, a power of two; 0: the whole tensor."""
    order: Literal["stored", "filters"] = "stored"
    """Order of a convolution's elements. "stored": as in memory. "filters": the same weight of all filters adjacent,
    ((h·W + w)·D + d)·F + f, as in GradiVeQ. Other tensors keep their order in memory."""
    half: bool = False
    """Whether gradients are first rounded to fp16, as in the paper."""
    recovery: Annotated[float, Number, Field(ge=1.0, le=1000.0)] = 1.0
    """Factor by which the density grows each time the loss gets worse; 1: never."""
    tolerance: Annotated[float, Number, Field(ge=0.0)] = 0.1
    """Relative increase of the loss over its best value at which ``recovery`` acts."""

    def length(self, n: int) -> int:
        """Return the number of elements of a full block, for n elements."""
        return self.block if 0 < self.block < n else max(n, 1)

    def num_positions(self, spec: TensorSpec) -> int:
        """Return B, the number of frequencies."""
        return bins(spec.size, self.length(spec.size))

    def reorders(self, spec: TensorSpec) -> bool:
        """Return whether the elements are reordered before the FFT."""
        return self.order == "filters" and len(spec.shape) == 4

    def num_kept(self, spec: TensorSpec, triggers: int = 0) -> int:
        """Return k after a number of triggers."""
        density = min(1.0, self.density * self.recovery ** min(triggers, 100))
        return select.num_kept(density, self.num_positions(spec))

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return how payloads are written."""
        return pack.Packing(self.id, self.values, self.num_positions(spec), per=2)

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return pack.num_bytes(self.num_kept(spec), self.packing(spec))

    def wants_trigger(self, metric: str, value: float, low: float, high: float) -> bool:
        return self.recovery > 1 and metric == "loss" and value > low + self.tolerance * abs(low)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        ops, length = work.ops, self.length(ctx.spec.size)
        if self.half:
            half = codec("fp16")
            x = half.decode(half.encode(x, ctx, work), len(x), ops)
        if self.reorders(ctx.spec):
            x = matrices.arranged(x, ctx.spec, ops)
        index, pairs = ops.largest_waves(x, length, self.num_kept(ctx.spec, ctx.triggers))  # [k] int32, [2·k] float32
        chosen = ops.scaled(pairs, length**0.5)  # as of the unitary FFT: values are as large as gradients
        return pack.encode(Sparse(index, chosen), self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        """Return frequencies [k] and their re and im, alternating [2·k]."""
        k = self.num_kept(ctx.spec, ctx.triggers)
        return pack.decode(payload, k, self.packing(ctx.spec), work.ops)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        pieces = yield AllGather(self.encode(x, state, ctx, work), fixed_length=True)
        shares = [self.decode(piece, ctx, work) for piece in pieces]
        total = self.invert(shares, FLOAT_MAX, ctx, work)
        # a quarter of the range, so that the residual is finite too
        own = self.invert([shares[ctx.rank]], FLOAT_MAX / 4, ctx, work)
        return Reduced(total=total, own=own)

    def invert(self, shares: Sequence[Sparse], limit: float, ctx: Context, work: Workspace) -> Waves | Array:
        """Return the gradient [n] whose spectrum is the sum of the shares, clipped to ±``limit``."""
        ops = work.ops
        n, length = ctx.spec.size, self.length(ctx.spec.size)
        # with this margin, even the sum of all frequencies is finite
        room = 2.0 ** (8 * len(shares) * length).bit_length()
        waves = Waves(shares, n, length, 1.0 / room, room / length**0.5, limit)
        if not self.reorders(ctx.spec):
            return waves
        x = ops.zeros(n, "float32", like=shares[0].values)
        ops.write(x, waves, 1.0)
        return matrices.stored_order(x, ctx.spec, ops)
