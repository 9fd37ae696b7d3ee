"""The ring all-reduce, written out, with a codec for its segments that works while they are on their way.

Each of p ranks cuts its vector into p segments. In p − 1 hops of a *reduce-scatter* every rank sends one segment to
its successor, gets another from its predecessor, and adds its own to it; then one rank has the whole sum of each
segment, and p − 1 hops of an *all-gather* bring it to all. Every rank sends 2(p − 1) segments: 2(p − 1)/p of a payload.

With a codec there are two ways to add:

* :class:`Linear` ones, whose payloads add: Yu et al., "GradiVeQ", NeurIPS 2018 (arXiv 1811.03617), Algorithm 1. A rank
  compresses its own segment *while* the compressed sum of the others arrives, adds the two and sends them on;
  in the all-gather it decompresses one segment while the next arrives. The result is that of compressing
  once and summing: Σ Q(x) = Q(Σ x).
* all others (:class:`Recoded`): what arrives is decoded, added to, and encoded again. A value is rounded p times on its
  way, so errors grow with the ring; ``ring_errors.py`` measures it.

The algorithm, :func:`ring`, is a generator that yields what is to be sent and received. :func:`simulate` runs p of them
in one process, :func:`ring_allreduce` one of them over MPI.

>>> xs = [np.float32([1, 2, 3]), np.float32([10, 20, 30])]
>>> simulate(xs, [Dense(), Dense()])[0]
RingSum(total=array([11., 22., 33.], dtype=float32), payload=12, sent=12)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdcompress.method import Context, Workspace
from hvdcompress.ops import fast
from hvdcompress.parts import matrices
from hvdcompress.parts.sums import Codec

Array = np.ndarray[Any, Any]


class Begin(NamedTuple):
    """Send ``payload`` (uint8) to the next rank, and receive ``num_bytes`` from the one before; resumed at once."""

    payload: Array
    num_bytes: int


class End(NamedTuple):
    """Wait for what was begun. Sent back: what has arrived, uint8."""


class RingSum(NamedTuple):
    """What a ring gives.

    ``total``: the sum over ranks [n] float32, equal on all ranks. ``payload``: bytes of all segments. ``sent``: bytes
    that this rank has sent.
    """

    total: Array
    payload: int
    sent: int


class SegmentCodec(Protocol):
    """How a ring writes the segment x[start:stop], which is never empty; one object per rank."""

    @property
    def grain(self) -> int:
        """Segments begin at multiples of it."""

    def num_bytes(self, start: int, stop: int) -> int:
        """Bytes of a payload, whatever was added to it."""

    def prepare(self, x: Array, start: int) -> Array:
        """Prepare a rank's own segment before the others' arrives."""

    def add(self, arrived: Array | None, own: Array, hop: int) -> Array:
        """The payload [num_bytes] uint8 of what arrived in ``hop``, if anything, and a prepared segment together."""

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        """A payload -> [stop − start] float32."""


# -- codecs whose payloads add -----------------------------------------------------------------------


class Linear:
    """A linear map: the sum of payloads is the payload of the sum. Subclasses write ``encode`` to float32."""

    @property
    def grain(self) -> int:
        """One value stands for one."""
        return 1

    def num_bytes(self, start: int, stop: int) -> int:
        """Bytes of a payload."""
        return 4 * self.num_values(start, stop)

    def num_values(self, start: int, stop: int) -> int:
        """Values that stand for a segment."""
        return stop - start

    def encode(self, x: Array, start: int) -> Array:
        """The segment that begins at ``start`` -> [num_values] float32."""
        return x

    def prepare(self, x: Array, start: int) -> Array:
        """The compressed segment: all the work there is, done while the others' arrives."""
        return self.encode(x, start)

    def add(self, arrived: Array | None, own: Array, hop: int) -> Array:
        """Payloads add."""
        return fast.to_bytes(own if arrived is None else fast.from_bytes(arrived, "float32") + own)

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        """[num_bytes] uint8 -> [stop − start] float32."""
        return fast.from_bytes(payload, "float32")


class Dense(Linear):
    """Values as they are: the plain ring."""


@dataclass(frozen=True)
class Chosen(Linear):
    """The values at ``index`` [k], ascending and the same on all ranks, as random-k has them; zeros elsewhere."""

    index: Array

    def _within(self, start: int, stop: int) -> Array:
        first, last = np.searchsorted(self.index, [start, stop])
        return self.index[first:last] - start

    def num_values(self, start: int, stop: int) -> int:
        """Indices that lie in the segment."""
        return len(self._within(start, stop))

    def encode(self, x: Array, start: int) -> Array:
        """The chosen values."""
        return x[self._within(start, start + len(x))]

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        """The chosen values in their places."""
        out = np.zeros(stop - start, np.float32)
        out[self._within(start, stop)] = fast.from_bytes(payload, "float32")
        return out


@dataclass(frozen=True)
class Projection(Linear):
    """d values of each slice: Uᵀ(x − μ/p), and U·q + μ of the sum q, as GradiVeQ has them in its compressed steps.

    ``basis``: Uᵀ [d × slice] float32, with orthonormal rows; ``mean``: μ [whole slices of x], none for zeros. The
    vector lies as ``parts.matrices.arranged`` lays it; what fills no slice at its end is sent as it is. Payloads
    are multiples of 2^-k, so that no sum overflows where the vectors do not.
    """

    basis: Array
    world_size: int
    mean: Array | None = None

    @property
    def grain(self) -> int:
        """A slice."""
        return self.basis.shape[1]

    @property
    def shrinkage(self) -> float:
        """The power of two by which payloads are smaller."""
        return matrices.shrinkage(4 * self.grain, self.world_size)

    def num_values(self, start: int, stop: int) -> int:
        """D of each slice, and what fills none."""
        slices, rest = divmod(stop - start, self.grain)
        return slices * len(self.basis) + rest

    def encode(self, x: Array, start: int) -> Array:
        """Uᵀ(x − μ/p)."""
        slices = len(x) // self.grain
        whole = slices * self.grain
        shrunk: Array = x * np.float32(self.shrinkage)
        centred = shrunk[:whole]
        if self.mean is not None:
            centred = centred - self.mean[start : start + whole] * np.float32(self.shrinkage / self.world_size)
        if slices:
            centred = fast.matmul_transposed(centred, self.basis.reshape(-1), slices, len(self.basis))
        return np.concatenate([centred, shrunk[whole:]])

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        """U·q + μ."""
        q, slices = fast.from_bytes(payload, "float32"), (stop - start) // self.grain
        edge = slices * len(self.basis)
        filled = q[:edge]
        if slices:
            filled = fast.matmul(filled, self.basis.reshape(-1), slices, self.grain)
        if self.mean is not None:
            filled = filled + self.mean[start : start + len(filled)] * np.float32(self.shrinkage)
        return fast.scaled(np.concatenate([filled, q[edge:]]), 1.0 / self.shrinkage)


# -- and the others ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recoded:
    """Any codec of ``parts/``: what arrives is decoded, added to, and encoded again. ``ctx``: whose random numbers."""

    codec: Codec
    ctx: Context
    grain: int = 1

    def num_bytes(self, start: int, stop: int) -> int:
        """Bytes of a payload."""
        return self.codec.num_bytes(stop - start)

    def prepare(self, x: Array, start: int) -> Array:
        """There is nothing to do before the others' has come."""
        return x

    def add(self, arrived: Array | None, own: Array, hop: int) -> Array:
        """Decode, add, encode: each hop draws random numbers of its own."""
        total = own if arrived is None else self.codec.decode(arrived, len(own), fast) + own
        return self.codec.encode(total, self.ctx, Workspace(fast), stream=hop)

    def decode(self, payload: Array, start: int, stop: int) -> Array:
        """[num_bytes] uint8 -> [stop − start] float32."""
        return self.codec.decode(payload, stop - start, fast)


# -- the algorithm -----------------------------------------------------------------------------------


def segments(n: int, world_size: int, grain: int = 1) -> list[tuple[int, int]]:
    """(start, stop) of each rank's segment of n elements: whole grains, as equal as can be; some may be empty."""
    grains = -(-n // grain)
    stops = [min(n, grains * (number + 1) // world_size * grain) for number in range(world_size)]
    return list(zip([0, *stops], stops, strict=False))


def ring(x: Array, codec: SegmentCodec, rank: int, world_size: int) -> Generator[Begin | End, Any, RingSum]:
    """One rank's part in the sum of ``x`` [n] float32 over ``world_size`` ranks."""
    bounds = segments(len(x), world_size, codec.grain)
    num_bytes = [codec.num_bytes(start, stop) if stop > start else 0 for start, stop in bounds]
    total = np.empty(len(x), np.float32)
    sent = 0

    def own(number: int) -> Array | None:
        start, stop = bounds[number]
        return codec.prepare(x[start:stop], start) if stop > start else None

    def together(arrived: Array | None, mine: Array | None, hop: int) -> Array:
        return np.empty(0, np.uint8) if mine is None else codec.add(arrived, mine, hop)

    def unpack(number: int, payload: Array) -> None:
        start, stop = bounds[number]
        if stop > start:
            total[start:stop] = codec.decode(payload, start, stop)

    payload = together(None, own(rank), 0)
    for hop in range(1, world_size):  # reduce-scatter
        coming = (rank - hop) % world_size
        sent += len(payload)
        yield Begin(payload, num_bytes[coming])
        mine = own(coming)  # while the others' is on its way
        arrived = yield End()
        payload = together(arrived, mine, hop)
    for hop in range(1, world_size):  # all-gather: payload is the whole sum of a segment
        here, coming = (rank + 2 - hop) % world_size, (rank + 1 - hop) % world_size
        sent += len(payload)
        yield Begin(payload, num_bytes[coming])
        unpack(here, payload)  # while the next is on its way
        payload = yield End()
    unpack((rank + 2) % world_size if world_size > 1 else 0, payload)
    return RingSum(total, sum(num_bytes), sent)


def simulate(xs: Sequence[Array], codecs: Sequence[SegmentCodec]) -> list[RingSum]:
    """All ranks in lockstep in one process: each one's vector and codec -> each one's result."""
    world_size = len(xs)
    ranks = [ring(x, codec, rank, world_size) for rank, (x, codec) in enumerate(zip(xs, codecs, strict=True))]
    under_way: list[Any] = [None] * world_size
    answers: list[Any] = [None] * world_size
    sums: list[RingSum | None] = [None] * world_size
    while None in sums:
        asked: list[Begin | End | None] = [None] * world_size
        for rank, one in enumerate(ranks):
            try:
                asked[rank] = one.send(answers[rank])
            except StopIteration as stop:
                sums[rank] = stop.value
        if all(isinstance(collective, Begin) for collective in asked):
            under_way = [asked[rank - 1].payload for rank in range(world_size)]  # type: ignore[union-attr]
            for collective, arriving in zip(asked, under_way, strict=True):
                if len(arriving) != collective.num_bytes:  # type: ignore[union-attr]
                    raise RuntimeError(f"{len(arriving)} bytes arrive, {collective.num_bytes} were expected")  # type: ignore[union-attr]
            answers = [None] * world_size
        else:
            answers = under_way
    return [one for one in sums if one is not None]


def _agree(x: Any, codec: SegmentCodec, comm: Any) -> None:
    """Before anything is sent: a rank that waits for bytes that do not come would wait for ever."""
    from mpi4py import MPI

    right = isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype == np.float32
    n = len(x) if right else 0
    spans = segments(n, comm.size, codec.grain)
    num_bytes = sum(codec.num_bytes(start, stop) for start, stop in spans if stop > start)
    most = np.array([not right, n, -n, num_bytes, -num_bytes], np.int64)  # a maximum of (f, −f) shows any difference
    comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    if not right:
        raise ValueError("a ring sums flat float32 arrays")
    if most[0]:
        raise RuntimeError("another rank's vector is not a flat float32 array")
    for what, high, low in (("elements", most[1], -most[2]), ("bytes of payload", most[3], -most[4])):
        if high != low:
            raise RuntimeError(f"the ranks' vectors or codecs differ: they have from {low} to {high} {what}")


def ring_allreduce(x: Array, codec: SegmentCodec, comm: Any) -> RingSum:
    """The sum of ``x`` [n] float32 over the ranks of ``comm`` (mpi4py), by point-to-point messages; collective.

    A thread lets MPI work on messages while this one works on segments, if MPI was initialised for threads.

    Raises:
        ValueError: ``x`` is not a flat float32 array.
        RuntimeError: that is so on another rank, or vectors or payloads differ in length; on every rank.
    """
    from mpi4py import MPI

    _agree(x, codec, comm)
    steps, answer = ring(x, codec, comm.rank, comm.size), None
    threaded = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
    with ThreadPoolExecutor(1) as pool:
        while True:
            try:
                collective = steps.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(collective, Begin):
                answer, arriving, status = None, np.empty(collective.num_bytes, np.uint8), MPI.Status()
                moves = [
                    comm.Irecv([arriving, MPI.BYTE], (comm.rank - 1) % comm.size),
                    comm.Isend([collective.payload, MPI.BYTE], (comm.rank + 1) % comm.size),
                ]
                waiting = pool.submit(MPI.Request.Waitall, moves, [status, MPI.Status()]) if threaded else None
            else:
                waiting.result() if waiting else MPI.Request.Waitall(moves, [status, MPI.Status()])
                if status.Get_count(MPI.BYTE) != len(arriving):
                    came = status.Get_count(MPI.BYTE)
                    raise RuntimeError(f"{came} bytes have arrived, {len(arriving)} were expected")
                answer = arriving
