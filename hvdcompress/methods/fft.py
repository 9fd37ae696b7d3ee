"""FFT: gradients are sparsified in the frequency domain, and the kept frequencies are sent as range floats.

Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020
(arXiv 1811.08596).

    g → (fp16, optional) → F = rfft(g) → keep the top (1 − θ) share of |F| → indices + packed re/im
      → N-bit range float → all-gather → sum the spectra → one inverse FFT

The FFT is linear: the sum of the spectra is the spectrum of the sum, so one inverse FFT serves all ranks. Large
tensors are transformed in blocks of ``block`` elements (the last block may be shorter), and the top share is taken over
all blocks together. ``density`` is 1 − θ, the share of the frequencies that is *kept*, typically 0.15.

What is sent: k = ⌊density·B⌋ of the B frequencies per rank, each as two values and an index, by an all-gather. B is
the sum of ⌊L/2⌋ + 1 over all blocks of L elements.

Bytes: 24 (header) + indices + ⌈2·k·N/8⌉ + 9 (the range), sections rounded up to 4: bits = 2(1 − θ)BN + B + header
with the paper's bitmap, 16x for θ = 0.85 and N = 10; Elias-Fano indices, taken where they are shorter, give 17x.
``num_bytes`` assumes that no trigger has occurred: each trigger of ``recovery`` raises k.

When it loses: the received bytes grow with p, and the all-gather moves fewer bytes than a dense ring all-reduce only if
the compression ratio is above p/2. The FFT also costs more time than a selection. In accuracy, frequencies beat
elements only if few frequencies hold most of the energy: similar neighbours in memory help, heavy tails of the elements
hurt. At density 0.15 the error ‖ĝ − g‖/‖g‖ is 0.016 on smooth data (time-domain top-k on smoothed noise: 0.66), but
0.75 on white noise (top-k: 0.67). The gradients of a small convolutional network on scikit-learn's digits have a
correlation of 0.28 to 0.47 between neighbours in memory and a kurtosis of 9 to 38. There time-domain top-k is better:
its error is 0.07 to 0.47 by layer, that of FFT is 0.49 to 0.58. Among eleven tensors of a small transformer, FFT is
better for the one with correlation 0.46 and light tails (kurtosis 4.6). The figures are in
experiments/results/gradient-energy.json. Measure your own gradients.

Elements whose gradient is always zero, such as the rows of an embedding's padding, are updated all the same: the error
of the dropped frequencies spreads over all elements of a block. Exclude such a tensor by a rule
(``{match: {name: …}, method: none}``).

``values``: "rangefloat10" chooses how many of its 10 bits are mantissa from the range of the spectrum: mostly 6, and 5
for spectra that fall steeply, such as those of slow waves (error 0.006; with "rangefloat10m6" 0.017).

``recovery``: a factor above 1 by which the density grows whenever the training loss gets worse. The paper proves
convergence for diminishing θ, and reports that lowering θ restores the accuracy after a failure.

Departures from the paper: blocks; the shorter of two index codings; range floats decode to the middle of a bin; if the
last block is shorter, frequencies are compared by energy. Ranks end with identical bits if their inverse FFTs round
alike. Two points about the paper are believed, not confirmed: that N is 8 or 10, and that it keeps no residual (the
default keeps none).

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("fft", world_size=2, density=0.15)
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

from pydantic import Field

from hvdcompress.method import (
    AllGather,
    Array,
    Communication,
    Context,
    Density,
    Method,
    Number,
    PowerOfTwo,
    Reduced,
    Sparse,
    TensorSpec,
    Values,
    Workspace,
    method,
)
from hvdcompress.ops.shared import bins
from hvdcompress.ops.vectors import FP32_MAX, Spectra
from hvdcompress.parts import matrices, pack, select
from hvdcompress.parts.codecs import codec


@method
class FFT(Method):
    """Each rank sends the k frequencies of largest magnitude of its gradient, as range floats."""

    paper = "Wang et al., HPDC 2020 (arXiv 1811.08596)"
    sends = "k of the n/2 + 1 frequencies, two range floats and an index each, gathered: received bytes grow with p"
    exact = False
    examples = ({"block": 16}, {"block": 0}, {"feedback": "plain", "block": 16}, {"recovery": 2.0})

    density: Density = 0.15
    """Fraction of the frequencies that each rank sends, 1 − θ."""
    values: Values = "rangefloat10"
    """Number format of real and imaginary parts."""
    block: Annotated[int, Number, Field(ge=0), PowerOfTwo] = 4096
    """Number of elements per FFT, a power of two; 0: one FFT of the whole tensor."""
    order: Literal["stored", "filters"] = "stored"
    """Order of a convolution's elements before the FFT. "stored": as in memory. "filters": the same weight of all
    filters adjacent, ((h·W + w)·D + d)·F + f, as in GradiVeQ. Other tensors keep their order in memory."""
    half: bool = False
    """Whether gradients are rounded to fp16 before the FFT, as in the paper."""
    recovery: Annotated[float, Number, Field(ge=1.0, le=1000.0)] = 1.0
    """Factor by which the density grows each time the loss gets worse; 1: the density is constant."""
    tolerance: Annotated[float, Number, Field(ge=0.0)] = 0.1
    """Relative increase of the loss over its best value at which ``recovery`` acts."""

    def block_length(self, n: int) -> int:
        """Return L, the number of elements of a full block of a tensor with n elements."""
        return self.block if 0 < self.block < n else max(n, 1)

    def num_positions(self, spec: TensorSpec) -> int:
        """Return B, the number of frequencies."""
        return bins(spec.size, self.block_length(spec.size))

    def is_reordered(self, spec: TensorSpec) -> bool:
        """Return whether the tensor's elements are reordered before the FFT."""
        return self.order == "filters" and len(spec.shape) == 4

    def num_kept(self, spec: TensorSpec, triggers: int = 0) -> int:
        """Return k after ``triggers`` triggers of ``recovery``."""
        density = min(1.0, self.density * self.recovery ** min(triggers, 100))
        return select.num_kept(density, self.num_positions(spec))

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return the payload format of the tensor."""
        return pack.Packing(self.id, self.values, self.num_positions(spec), per=2)

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return pack.num_bytes(self.num_kept(spec), self.packing(spec))

    def wants_trigger(self, metric: str, value: float, low: float, high: float) -> bool:
        return self.recovery > 1 and metric == "loss" and value > low + self.tolerance * abs(low)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        ops = work.ops
        if self.half:
            half = codec("fp16")
            x = half.decode(half.encode(x, ctx, work), len(x), ops)
        if self.is_reordered(ctx.spec):
            x = matrices.arranged(x, ctx.spec, ops)
        length = self.block_length(ctx.spec.size)
        k = self.num_kept(ctx.spec, ctx.triggers)
        index, pairs = ops.largest_frequencies(x, length, k)  # [k] int32, [2·k] float32
        unitary = ops.scaled(pairs, length**0.5)  # the unitary FFT's values are about as large as the gradient's
        return pack.encode(Sparse(index, unitary), self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        """Return the indices of the frequencies [k] and their values [2·k], re and im alternating."""
        k = self.num_kept(ctx.spec, ctx.triggers)
        return pack.decode(payload, k, self.packing(ctx.spec), work.ops)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        pieces = yield AllGather(self.encode(x, state, ctx, work), fixed_length=True)
        shares = [self.decode(piece, ctx, work) for piece in pieces]
        total = self.invert(shares, FP32_MAX, ctx, work)
        # residual = x − own must be finite too, so own may use only a part of float32's range
        own = self.invert([shares[ctx.rank]], FP32_MAX / 4, ctx, work)
        return Reduced(total=total, own=own)

    def invert(self, shares: Sequence[Sparse], limit: float, ctx: Context, work: Workspace) -> Spectra | Array:
        """Return the inverse FFT [n] of the sum of the shares' spectra, clipped to ±``limit``."""
        ops = work.ops
        n = ctx.spec.size
        length = self.block_length(n)
        # The spectrum is divided by this power of two before the inverse FFT: sums of all frequencies are then finite.
        margin = 2.0 ** (8 * len(shares) * length).bit_length()
        spectra = Spectra(shares, n, length, 1.0 / margin, margin / length**0.5, limit)
        if not self.is_reordered(ctx.spec):
            return spectra
        x = ops.zeros(n, "float32", like=shares[0].values)
        ops.write(x, spectra, 1.0)
        return matrices.stored_order(x, ctx.spec, ops)
