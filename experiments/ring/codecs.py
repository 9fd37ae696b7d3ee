"""How a ring writes segments: payloads that add (:class:`Dense`), and payloads that are encoded again at every hop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hvdcompress.method import Context, Workspace
from hvdcompress.ops import fast
from hvdcompress.parts import matrices
from hvdcompress.parts.sums import Codec

Array = np.ndarray[Any, Any]


class SegmentCodec(Protocol):
    """Encoding of the segment x[start:stop], which may be empty; one object per rank."""

    @property
    def grain(self) -> int:
        """Return the number of elements, at multiples of which segments begin."""

    def num_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of a payload. They do not depend on the data."""

    def prepare(self, x: Array, start: int) -> Array:
        """Do the part of the encoding that needs only this rank's segment ``x``. It overlaps with a transfer."""

    def add(self, arrived: Array | None, own: Array, hop: int) -> Array:
        """Add a prepared segment to the payload that arrived in ``hop``, if any: the next payload [num_bytes] uint8."""

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        """Decode a payload: [stop − start] float32."""


# -- payloads that add ---------------------------------------------------------------------------


class Dense:
    """All values: the plain ring. The base of linear maps, with which Σ Q(x) = Q(Σ x)."""

    @property
    def grain(self) -> int:
        return 1

    def num_values(self, start: int, stop: int) -> int:
        """Return how many values stand for a segment."""
        return stop - start

    def num_bytes(self, start: int, stop: int) -> int:
        return 4 * self.num_values(start, stop)

    def prepare(self, x: Array, start: int) -> Array:
        """Map a segment [count] to its values [num_values] float32: all the work there is."""
        return x

    def add(self, arrived: Array | None, own: Array, hop: int) -> Array:
        return fast.to_bytes(own if arrived is None else fast.from_bytes(arrived, "float32") + own)

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        return fast.from_bytes(payload, "float32")


@dataclass(frozen=True)
class Projection(Dense):
    """GradiVeQ's compressed steps without a mean: Uᵀx of each slice; U·q of the sum q (Yu et al. 2018).

    Payloads are multiplied by a power of two below 1, so that their sum overflows only where the vectors' sum does.
    Elements after the last whole slice are sent unchanged.

    Attributes:
        basis: Uᵀ [d × slice] float32, with orthonormal rows.
        world_size: the number of ranks p.
    """

    basis: Array
    world_size: int

    @property
    def grain(self) -> int:
        return self.basis.shape[1]

    @property
    def shrinkage(self) -> float:
        return matrices.shrinkage(4 * self.grain, self.world_size)

    def num_values(self, start: int, stop: int) -> int:
        slices, rest = divmod(stop - start, self.grain)
        return slices * len(self.basis) + rest

    def prepare(self, x: Array, start: int) -> Array:
        slices = len(x) // self.grain
        whole = slices * self.grain
        shrunk: Array = x * np.float32(self.shrinkage)
        centred = shrunk[:whole]
        if slices:
            centred = fast.matmul_transposed(centred, self.basis.reshape(-1), slices, len(self.basis))
        return np.concatenate([centred, shrunk[whole:]])

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        q = fast.from_bytes(payload, "float32")
        slices = (stop - start) // self.grain
        edge = slices * len(self.basis)
        filled = q[:edge]
        if slices:
            filled = fast.matmul(filled, self.basis.reshape(-1), slices, self.grain)
        return fast.scaled(np.concatenate([filled, q[edge:]]), 1.0 / self.shrinkage)


# -- payloads that are encoded again -------------------------------------------------------------


@dataclass(frozen=True)
class Recoded:
    """Values in any number format of ``hvdcompress.parts``: decoded, added to and encoded again at every hop.

    Attributes:
        codec: the number format.
        ctx: rank, step, tensor and seed, which select the random numbers.
        values: the map to values that are encoded; by default, the elements themselves. With a :class:`Projection`,
            GradiVeQ's components are quantized.
    """

    codec: Codec
    ctx: Context
    values: Dense = field(default_factory=Dense)

    @property
    def grain(self) -> int:
        return self.values.grain

    def num_bytes(self, start: int, stop: int) -> int:
        return self.codec.num_bytes(self.values.num_values(start, stop))

    def prepare(self, x: Array, start: int) -> Array:
        return self.values.prepare(x, start)

    def add(self, arrived: Array | None, own: Array, hop: int) -> Array:
        total = own if arrived is None else self.codec.decode(arrived, len(own), fast) + own
        return self.codec.encode(total, self.ctx, Workspace(fast), stream=hop)  # each hop draws its own random numbers

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        values = self.codec.decode(payload, self.values.num_values(start, stop), fast)
        return self.values.decode(fast.to_bytes(values), start, stop)
