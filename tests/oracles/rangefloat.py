"""The range float of FFT with integers, bin by bin."""

from __future__ import annotations

import struct

import numpy as np

from hvdcompress.method import Workspace
from hvdcompress.ops.numpy import ops
from hvdcompress.parts.rangefloat import HEAD, RangeFloatCodec


class Oracle:
    """The range float of one tensor, with integers and ``struct``; eps is found by trial."""

    def __init__(self, x: np.ndarray, bits: int, mantissa: int):
        self.shift = 23 - mantissa
        self.max = max([float(f) for f in x if f > 0], default=0.0)
        self.min = max([-float(f) for f in x if f < 0], default=0.0)
        self.first = self.b(max(self.max, self.min)) + 1  # only zero has a code
        while self.first > 1 and 1 + self.count(self.max, -1) + self.count(self.min, -1) <= 2**bits:
            self.first -= 1
        self.P, self.Q = self.count(self.max), self.count(self.min)

    def b(self, f: float) -> int:
        return struct.unpack("<I", struct.pack("<f", abs(f)))[0] >> self.shift

    def count(self, largest: float, more: int = 0) -> int:
        return max(self.b(largest) - (self.first + more) + 1, 0)

    def encode(self, f: float) -> int:
        number = self.b(min(f, self.max) if f > 0 else min(-f, self.min)) - self.first + 1
        return 0 if number < 1 else number if f > 0 else self.P + number

    def decode(self, code: int) -> float:
        if code == 0:
            return 0.0
        number, sign, largest = (code, 1, self.max) if code <= self.P else (code - self.P, -1, self.min)
        low = number + self.first - 1 << self.shift
        middle = struct.unpack("<f", struct.pack("<I", low + (1 << self.shift >> 1)))[0]
        return sign * (middle if middle <= largest else largest)  # the middle of the last bin may even be Inf


def mantissa_of(x: np.ndarray, made: RangeFloatCodec) -> int:
    """Return the mantissa bits that a codec has, or that it chooses for x."""
    return int(made.encode(x, None, Workspace(ops))[HEAD]) if made.mantissa is None else made.mantissa
