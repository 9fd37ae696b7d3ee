"""Blockwise quantization: 4 or 8 bits per value, and a scale for each block of values.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (arXiv 2110.02861), §2.1. Sums in two shots,
with 4 bits: ZeRO++ (Wang et al. 2023, arXiv 2306.10209), SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526) and LoCo
(Xie et al. 2024, arXiv 2407.04480).

    v ≈ s · levels[q],    s = max |v| of the block                              (``parts/levels.py`` has the levels)

    shot 1: every rank sends q and s of each shard to the shard's owner, who decodes and adds them in float32
    shot 2: the owner encodes the sum, and sends it to all ranks

``rounding: nearest`` (default) has 0.7 of the error of ``stochastic``, and is biased; the residual corrects that.
With ``rounding: stochastic``, int4 and int8 are the levels of ``qsgd`` with 4 and 8 bits.

``rotation``: a randomized Hadamard transform of each block, before its values are rounded (``parts/rotation.py``). It
spreads a block's largest values over all of its values, so that the scale is smaller.

What is sent: ``bits`` per value, and a float32 scale per block. With ``route: scatter`` (default) in two shots, where
the owner of a shard adds the error of the second encoding to its residual. With ``route: gather``, all ranks receive
the codes of all ranks.

Bytes: m(c) = 4·⌈c/block⌉ + ⌈c·bits/8⌉ for c values; scatter: (p + 1)·m(⌈n/p⌉), where ``rotation`` rounds n up to a
multiple of ``block``; gather: 24 (header) + m(n).

When it loses: 8 bits are a compression ratio of 3.9, and two shots take two rounds. The errors ‖x̂ − x‖/‖x‖ of one
encoding, in blocks of 256, on Gaussian and on heavy-tailed data (Student's t with 3 degrees of freedom):

    int8      0.0070, 0.016          int4            0.13, 0.27        qsgd, 8 bits     0.0099, 0.022
    fp8_e4m3  0.026,  0.024          int4, rotated   0.13, 0.12        qsgd, 4 bits     0.18,   0.39
    fp8_e5m2  0.052,  0.048          natural4        0.20, 0.18
    dynamic8  0.011,  0.015

So ``rotation`` helps only where tails are heavy, and costs log2(block) passes over the data. On gradients of two small
nets it left 0.68 of the squared error (docs/papers/peers.md, P2). FP8 is never the best of 8
bits by this measure. With blocks of 128, the error of Gaussian data falls as if by 0.11 bits per value, and the scales
cost 0.125; with 256 instead of 512, by 0.08 bits for 0.06. Therefore 256 is the default. In accuracy, int4 lost nothing
in trainings of 300 steps (an MLP on Fashion-MNIST, 2 ranks).

Settings of others: ``values: int4, feedback: lowpass, beta: 0.2`` is LoCo's averaged error; ``values: fp8_e4m3`` or
``int8`` with ``feedback: none`` is torchft's quantized all-reduce; ``values: int4, rotation: true`` is SDP4Bit's
gradient. ``values: dynamic8`` has Dettmers' levels, as bitsandbytes and Hivemind. ``values: natural4, rounding:
stochastic`` is natural dithering, as in BytePS.

Departures from the papers: the residual is float32 (LoCo stores it in 8 bits, and resets it every 1024 steps). LoCo's
integers go from −8 to 7, these from −7 to 7, so that a block's largest value is a level. Both shots have the same
number of bits, within a node and between nodes.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("blockwise", world_size=1, values="int4", min_elements=1)
>>> net.allreduce([np.float32([7, -3, 0.25, 2])], name="w")[0]          # the scale is 7
array([ 7., -3.,  0.,  2.], dtype=float32)
>>> net.residual("w", rank=0).tolist(), net.ledger.bytes_sent(rank=0)   # two shots of 4 + 2 bytes
([0.0, 0.0, 0.25, 0.0], 12)
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hvdcompress.method import (
    Array,
    Communication,
    Context,
    FeedbackName,
    Number,
    PowerOfTwo,
    Reduced,
    Route,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.parts import rotation, sums
from hvdcompress.parts.levels import BLOCK, LevelCodec, Rounding


@method
class Blockwise(sums.Quantizer):
    """Rounds values to levels of 4 or 8 bits, in blocks with one scale each."""

    paper = "Dettmers et al., ICLR 2022 (arXiv 2110.02861); in two shots: Xie et al. 2024 (arXiv 2407.04480)"
    sends = "4 or 8 bits per value + a scale per block; scattered: constant in p, or gathered"
    examples = (
        {"block": 16, "values": "int4", "rotation": True},
        {"values": "int4", "feedback": "lowpass", "beta": 0.2},
        {"rounding": "stochastic", "route": "gather", "feedback": "none"},
    )

    needs: ClassVar = {"rotation": ("route", ("scatter",))}

    values: Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "dynamic8", "natural4"] = "int8"
    """Levels of a value: 8-bit or 4-bit integers, 8-bit floats with 4 or 5 bits of exponent, a dynamic
    tree of 8 bits, or powers of two in 4 bits."""
    block: Annotated[int, Number, Field(ge=4), PowerOfTwo] = BLOCK
    """Number of values that share a scale, a power of two."""
    rounding: Rounding = "nearest"
    """How values are rounded. "nearest": to the nearest level. "stochastic": to one of the two nearest, unbiased."""
    rotation: bool = False
    """Whether each block is transformed before it is rounded. It needs route "scatter"."""
    route: Route = "scatter"
    """How codes are summed. "scatter": shards are summed and encoded again, so the bytes received do not grow with the
    number of ranks, but there is a second rounding. "gather": all ranks receive the codes of all ranks."""
    feedback: FeedbackName = "plain"

    @property
    def unbiased(self) -> bool:
        """Whether the result of each step is unbiased. With feedback, only the average over steps is."""
        return self.rounding == "stochastic" and self.feedback == "none" and self.values != "dynamic8"  # has no −1

    @property
    def codec(self) -> LevelCodec:
        return LevelCodec(self.values, self.block, self.rounding)

    @property
    def shard_codec(self) -> LevelCodec | None:
        return None if self.rotation else self.codec

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        n = rotation.padded_size(spec.size, self.block) if self.rotation else spec.size
        return sums.reduced_num_bytes(n, self.codec, self.route, world_size)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        if not self.rotation:
            return (yield from super().exchange(x, state, ctx, work))
        ops = work.ops
        total, own = yield from sums.scatter(rotation.rotate(x, self.block, ctx, ops), self.codec, ctx, work)

        def back(y: Array) -> Array:
            decoded = ops.zeros(y.size, "float32", like=x)
            ops.write(decoded, y, 1.0)
            return rotation.rotate_back(decoded, len(x), self.block, ctx, ops)

        return Reduced(total=back(total), own=None if own is None else back(own))
