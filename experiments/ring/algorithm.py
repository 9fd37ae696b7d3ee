"""The ring all-reduce, step by step: reduce-scatter, then all-gather, with a codec for the segments that are sent.

p ranks add up one vector of n elements each. A rank sends only to its successor and receives only from its predecessor.
Every rank cuts its vector x into p segments. With p = 3 and ranks a, b, c (``a0`` is segment 0 of rank a)::

                       rank a            rank b            rank c
    reduce-scatter
      sends            a0                b1                c2
      hop 1, adds own  c2 + a2           a0 + b0           b1 + c1
      hop 2, adds own  b1 + c1 + a1      c2 + a2 + b2      a0 + b0 + c0     each rank has one whole segment of the sum
    all-gather
      hop 3            sum 0             sum 1             sum 2            from the predecessor
      hop 4            sum 2             sum 0             sum 1            now each rank has all three

There are 2(p − 1) hops, and a rank sends one segment in each: 2(p − 1)/p times its payload. No algorithm sends less
(Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009). With
latency α per message and 1/β bytes per second the ring takes 2(p − 1)·(α + nβ/p).

*Compression.* Segments are sent as payloads of a codec (``codecs.py``). If payloads can be added, a value is encoded
once and decoded once: Yu et al., "GradiVeQ", NeurIPS 2018 (arXiv 1811.03617), Algorithm 1, pipelines this. While a
compressed partial sum is on its way, the receiver compresses its own segment, and then adds the two payloads; in the
all-gather it decompresses one segment while the next one is on its way. If payloads cannot be added, the receiver
decodes, adds, and encodes again at every hop: p roundings instead of one.

:func:`ring` is the algorithm of one rank; :func:`ring_allreduce` runs it over MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from experiments.ring.codecs import Array, SegmentCodec

#: Starts to send a payload [uint8] to the next rank, and to receive so many bytes from the previous one; returns a
#: function that waits for both transfers and returns what was received.
Exchange = Callable[[Array, int], Callable[[], Array]]


class RingSum(NamedTuple):
    """Result of a ring all-reduce."""

    total: Array  #: the sum over ranks [n] float32, equal on all ranks to the bit
    payload: int  #: bytes of all encoded segments
    sent: int  #: bytes that this rank sent


def segments(n: int, world_size: int, grain: int = 1) -> list[tuple[int, int]]:
    """Return (start, stop) of each rank's segment of n elements: whole grains, as equal as possible, maybe empty."""
    grains = -(-n // grain)
    stops = [min(n, grains * (number + 1) // world_size * grain) for number in range(world_size)]
    return list(zip([0, *stops], stops, strict=False))


def ring(x: Array, codec: SegmentCodec, rank: int, p: int, exchange: Exchange) -> RingSum:
    """Add up vectors over all ranks; every rank calls it with its own.

    Args:
        x: this rank's vector [n] float32; n is equal on all ranks.
        codec: how segments are written. Its payloads have equal lengths on all ranks.
        rank: this rank.
        p: the number of ranks.
        exchange: sends to the next rank, and receives from the previous one.
    """
    spans = segments(len(x), p, codec.grain)
    num_bytes = [codec.num_bytes(start, stop) for start, stop in spans]
    total = np.empty(len(x), np.float32)
    sent = 0

    def prepare(number: int) -> Array:
        start, stop = spans[number % p]
        return codec.prepare(x[start:stop], start)

    def unpack(number: int, payload: Array) -> None:
        start, stop = spans[number % p]
        total[start:stop] = codec.decode(payload, start, stop)

    # Reduce-scatter: a partial sum travels around the ring, and each rank adds its own segment.
    payload = codec.add(None, prepare(rank), 0)
    for hop in range(1, p):
        sent += len(payload)
        receive = exchange(payload, num_bytes[(rank - hop) % p])
        own = prepare(rank - hop)  # overlaps with the transfer
        payload = codec.add(receive(), own, hop)

    # All-gather: this rank has the whole sum of segment rank + 1. Pass it on, then what the predecessor passes on.
    for hop in range(1, p):
        sent += len(payload)
        receive = exchange(payload, num_bytes[(rank + 1 - hop) % p])
        unpack(rank + 2 - hop, payload)  # overlaps with the transfer
        payload = receive()
    unpack(rank + 2 - p, payload)
    return RingSum(total, sum(num_bytes), sent)


def ring_allreduce(x: Array, codec: SegmentCodec, comm: Any) -> RingSum:
    """Add up vectors [n] float32 over the ranks of an mpi4py communicator; collective.

    Raises:
        ValueError: on every rank, if a vector is not a flat float32 array, or if lengths of vectors or payloads differ:
            a rank whose predecessor sends too little would wait forever.
    """
    from mpi4py import MPI

    valid = isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype == np.float32
    mine = (len(x), sum(codec.num_bytes(*span) for span in segments(len(x), comm.size, codec.grain))) if valid else None
    ranks = comm.allgather(mine)
    if None in ranks:
        raise ValueError(f"a ring adds flat float32 arrays; rank {ranks.index(None)} has another")
    if len(set(ranks)) > 1:
        raise ValueError(f"vectors or codecs differ between ranks; (elements, bytes of payload) by rank: {ranks}")
    with ThreadPoolExecutor(1) as pool:

        def exchange(payload: Array, num_bytes: int) -> Callable[[], Array]:
            arrived = np.empty(num_bytes, np.uint8)
            transfers = [
                comm.Irecv([arrived, MPI.BYTE], (comm.rank - 1) % comm.size),
                comm.Isend([payload, MPI.BYTE], (comm.rank + 1) % comm.size),
            ]
            # MPI moves messages only inside its own functions: a thread waits there while this one encodes and decodes.
            waiting = pool.submit(MPI.Request.Waitall, transfers)

            def receive() -> Array:
                waiting.result()
                return arrived

            return receive

        return ring(x, codec, comm.rank, comm.size, exchange)
