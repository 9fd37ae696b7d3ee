"""Collectives are lowered to what is sent, and results lifted: the same over any transport, and told to observers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.collectives import Collectives, cut, gathered_lengths, lower
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Collective
from hvdcompress.ops import fast
from hvdcompress.parts import wire
from tests.unit.engine.threads import ThreadTransport, run


def results(transport: ThreadTransport, make: Any) -> list[Any]:
    """What the collectives of one rank bring, one after another."""
    ledger = Ledger(transport.world_size, transport.rank)
    collectives = Collectives(transport, [ledger])
    found = [collectives.run("w", collective, number) for number, collective in enumerate(make(transport.rank))]
    return [*found, ledger]


def collectives(rank: int) -> list[Collective]:
    x = np.float32([1, 2, 3]) * (rank + 1)
    made = np.arange(8, dtype=np.uint8)
    pieces = np.arange(6, dtype=np.uint8) + 10 * rank
    to_next = tuple(2 if other == (rank + 1) % 3 else 0 for other in range(3))
    from_previous = tuple(2 if other == (rank - 1) % 3 else 0 for other in range(3))
    return [
        AllReduce(x),
        AllReduce(x, op="max"),
        AllGather(np.uint8([rank, rank])),
        Broadcast(lambda: made, 1, 8),
        AllToAll(pieces),
        AllToAll(pieces[:2], to_next, from_previous),
    ]


@pytest.mark.parametrize("ordered", [True, False])
def test_every_op_brings_what_the_method_expects(ordered: bool) -> None:
    found, _ = run(3, ordered, lambda transport: results(transport, collectives))
    for rank, (total, largest, gathered, made, pieces, one, ledger) in enumerate(found):
        assert total.tolist() == [6, 12, 18] and largest.tolist() == [3, 6, 9]
        assert [piece.tolist() for piece in gathered] == [[0, 0], [1, 1], [2, 2]]
        assert made.tolist() == list(range(8)) and made.dtype == np.uint8
        assert [piece.tolist() for piece in pieces] == [[2 * rank + 10 * r, 2 * rank + 1 + 10 * r] for r in range(3)]
        assert [len(piece) for piece in one] == [2 if r == (rank - 1) % 3 else 0 for r in range(3)]
        lengths = 8 if ordered else 0  # where a gather must know them beforehand
        assert ledger.bytes_sent() == 12 + 12 + 2 + 8 + 6 + 2 + lengths
        assert ledger.tensors()["w"].collectives == 6


def test_unequal_payloads_are_cut_by_their_headers() -> None:
    """Even where a rank's own length times the ranks is the buffer's, as here on rank 1."""

    def make(rank: int) -> list[Collective]:
        payload = wire.pack(wire.Header("topk", 0, 0, 9, 1, wire.NUM_BYTES + 4 * rank)) + bytes(4 * rank)
        return [AllGather(np.frombuffer(payload, np.uint8))]

    for ordered in (True, False):
        found, _ = run(3, ordered, lambda transport: results(transport, make))
        assert all([len(piece) for piece in pieces] == [24, 28, 32] for pieces, _ in found)
    with pytest.raises(wire.WireError):
        gathered_lengths(np.zeros(50, np.uint8), AllGather(np.zeros(24, np.uint8)), 2, fast)


def headed(extra: int, fill: int) -> np.ndarray:
    """Return a payload: a header, and ``extra`` bytes of ``fill``."""
    head = wire.pack(wire.Header("oktopk", 0, 0, 9, 1, wire.NUM_BYTES + extra))
    return np.r_[np.frombuffer(head, np.uint8), np.full(extra, fill, np.uint8)]


@pytest.mark.parametrize("ordered", [True, False])
def test_pieces_of_lengths_that_receivers_do_not_know(ordered: bool) -> None:
    def make(rank: int) -> list[Collective]:
        pieces = [headed(4 * (rank + 2 * other), 10 * rank + other) for other in range(3)]
        return [AllToAll(np.concatenate(pieces), tuple(map(len, pieces)))]

    found, medium = run(3, ordered, lambda transport: results(transport, make))
    for rank, (pieces, ledger) in enumerate(found):
        assert [piece.tolist() for piece in pieces] == [
            headed(4 * (r + 2 * rank), 10 * r + rank).tolist() for r in range(3)
        ]
        sent = [wire.NUM_BYTES + 4 * (rank + 2 * other) for other in range(3)]
        entry = ledger.tensors()["w"]
        assert (entry.sent, entry.on_wire) == (sum(sent), sum(sent) - sent[rank])
        assert ledger.bytes_sent() == sum(sent) + (24 if ordered else 0), "8 bytes of lengths for each rank"
    assert len(medium.requests) == (2 if ordered else 1)


def test_the_zeros_of_a_broadcast_are_made_where_the_gradient_is() -> None:
    """On a GPU build a sum of one rank's CUDA tensor and another's CPU tensor is an error."""

    class OnADevice:
        def zeros(self, size: int, dtype: str, like: Any) -> Any:
            return ("zeros", size, dtype, like)

        def from_bytes(self, buffer: Any, dtype: str) -> Any:
            return ("made", buffer, dtype)

    collective = Broadcast(lambda: "payload", 0, 12)  # type: ignore[arg-type, return-value]
    gradient: Any = "a gradient on a device"
    assert lower(collective, 1, 2, OnADevice(), gradient).payload == ("zeros", 3, "int32", gradient)
    assert lower(collective, 0, 2, OnADevice(), gradient).payload == ("made", "payload", "int32")


def test_pieces_must_fill_what_is_cut() -> None:
    assert [piece.tolist() for piece in cut(np.arange(5), [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    with pytest.raises(RuntimeError, match="do not fill 5"):
        cut(np.arange(5), [2, 2])


@pytest.mark.parametrize("ordered", [True, False])
def test_texts_of_different_lengths_are_gathered(ordered: bool) -> None:
    words = ["", "zwölf", "x" * 1000]
    found, _ = run(3, ordered, lambda t: Collectives(t, []).gather_text("error", words[t.rank]))
    assert found == [words] * 3


def test_texts_are_charged_with_their_sizes() -> None:
    """Each rank hands over its text and 8 bytes for its length; as a ring it transmits all but its neighbour's."""
    words = ["", "a much longer text", "ab"]

    def program(transport: ThreadTransport) -> Any:
        ledger = Ledger(transport.world_size, transport.rank)
        Collectives(transport, [ledger]).gather_text("error", words[transport.rank])
        return ledger.tensors()["error"]

    found, _ = run(3, True, program)
    assert [entry.sent for entry in found] == [8 + len(text) for text in words]
    total = sum(8 + len(text) for text in words)
    assert [entry.on_wire for entry in found] == [total - 8 - len(words[(rank + 1) % 3]) for rank in range(3)]
