"""Collectives: what is sent for them over any transport, their results, and what observers are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hvdcompress.engine.collectives import LARGE, Collectives, cut, lower, received_lengths
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Collective
from hvdcompress.ops import fast
from hvdcompress.parts import wire
from tests.unit.engine.threads import Medium, ThreadTransport, run

WORLD = 3
both_transports = pytest.mark.parametrize("ordered", [True, False])


def carry_out(ordered: bool, collectives_of: Callable[[int], list[Collective]]) -> tuple[list[Any], Medium]:
    """Return the results of each rank's collectives and its ledger, and the medium."""

    def program(transport: ThreadTransport) -> list[Any]:
        ledger = Ledger(transport.world_size, transport.rank)
        collectives = Collectives(transport, [ledger])
        made = collectives_of(transport.rank)
        return [*(collectives.run("w", collective, number) for number, collective in enumerate(made)), ledger]

    return run(WORLD, ordered, program)


def payload(num_extra: int, value: int = 0, method: str = "topk") -> np.ndarray:
    """Return a payload: a header, and some further bytes of one value."""
    head = wire.pack(wire.Header(method, 0, 0, 9, 1, wire.NUM_BYTES + num_extra))
    return np.r_[np.frombuffer(head, np.uint8), np.full(num_extra, value, np.uint8)]


@both_transports
def test_every_collective_has_the_result_that_methods_expect(ordered: bool) -> None:
    def collectives_of(rank: int) -> list[Collective]:
        x = np.float32([1, 2, 3]) * (rank + 1)
        pieces = np.arange(6, dtype=np.uint8) + 10 * rank
        to_next = tuple(2 if other == (rank + 1) % 3 else 0 for other in range(3))
        from_previous = tuple(2 if other == (rank - 1) % 3 else 0 for other in range(3))
        return [
            AllReduce(x),
            AllReduce(x, op="max"),
            AllGather(np.uint8([rank, rank])),
            Broadcast(lambda: np.arange(8, dtype=np.uint8), 1, 8),
            AllToAll(pieces),
            AllToAll(pieces[:2], to_next, from_previous),
        ]

    found, _ = carry_out(ordered, collectives_of)
    for rank, (total, largest, gathered, broadcast, pieces, shifted, ledger) in enumerate(found):
        assert total.tolist() == [6, 12, 18] and largest.tolist() == [3, 6, 9]
        assert [piece.tolist() for piece in gathered] == [[0, 0], [1, 1], [2, 2]]
        assert broadcast.tolist() == list(range(8)) and broadcast.dtype == np.uint8
        assert [piece.tolist() for piece in pieces] == [[2 * rank + 10 * r, 2 * rank + 1 + 10 * r] for r in range(3)]
        assert [len(piece) for piece in shifted] == [2 if r == (rank - 1) % 3 else 0 for r in range(3)]
        lengths = 8 if ordered else 0  # an ordered transport needs them before an all-gather
        assert ledger.bytes_sent() == 12 + 12 + 2 + 8 + 6 + 2 + lengths
        assert ledger.tensors()["w"].collectives == 6


@both_transports
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_a_large_sum_is_added_up_by_shards_in_the_order_of_the_ranks(
    ordered: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadTransport, "shards_sums", (dtype,))
    size = LARGE // 2 + 1  # in shards of different lengths
    each = [(np.random.default_rng(rank).standard_normal(size) * 100).astype(dtype) for rank in range(WORLD)]
    expected = (each[0] + each[1]) + each[2]
    found, medium = carry_out(ordered, lambda rank: [AllReduce(each[rank]), AllReduce(each[rank][:5])])
    for total, small, ledger in found:
        assert total.dtype == dtype and np.array_equal(total, expected)
        assert np.array_equal(small, expected[:5])
        assert ledger.bytes_sent() == (size + 5) * each[0].itemsize
    assert len(medium.results) == 3  # two for the large sum, and one for the small one


@both_transports
def test_payloads_of_different_lengths_are_cut_by_their_headers(ordered: bool) -> None:
    """Also on rank 1, whose own length times the number of ranks is the length of the buffer."""
    found, _ = carry_out(ordered, lambda rank: [AllGather(payload(4 * rank))])
    for pieces, _ledger in found:
        assert [len(piece) for piece in pieces] == [wire.NUM_BYTES + extra for extra in (0, 4, 8)]


def test_lengths_are_read_from_the_header_of_each_fused_tensor() -> None:
    """Also if the payloads of each rank have the same sum of lengths."""
    extras = [(0, 8), (8, 0), (4, 4)]
    ranks = [np.concatenate([payload(extra) for extra in each]) for each in extras]
    for own, each in zip(ranks, extras, strict=True):
        collective = AllGather(own, lengths=tuple(wire.NUM_BYTES + extra for extra in each))
        found = received_lengths(np.concatenate(ranks), collective, WORLD, fast)
        assert found == [wire.NUM_BYTES + extra for pair in extras for extra in pair]
    with pytest.raises(wire.WireError):
        received_lengths(np.zeros(50, np.uint8), AllGather(np.zeros(24, np.uint8)), 2, fast)


@both_transports
def test_an_all_to_all_finds_lengths_that_receivers_do_not_know(ordered: bool) -> None:
    def piece(rank: int, other: int) -> np.ndarray:
        return payload(4 * (rank + 2 * other), 10 * rank + other, "oktopk")

    def collectives_of(rank: int) -> list[Collective]:
        pieces = [piece(rank, other) for other in range(WORLD)]
        return [AllToAll(np.concatenate(pieces), tuple(map(len, pieces)))]

    found, medium = carry_out(ordered, collectives_of)
    for rank, (pieces, ledger) in enumerate(found):
        np.testing.assert_equal(pieces, [piece(r, rank) for r in range(WORLD)])
        sent = [len(piece(rank, other)) for other in range(WORLD)]
        entry = ledger.tensors()["w"]
        assert (entry.sent, entry.on_wire) == (sum(sent), sum(sent) - sent[rank])
        assert ledger.bytes_sent() == sum(sent) + (24 if ordered else 0), "8 bytes for the length of each piece"
    assert len(medium.results) == (2 if ordered else 1)


def test_a_broadcast_creates_its_zeros_on_the_device_of_the_gradient() -> None:
    """A sum of one rank's CUDA tensor and another rank's CPU tensor would be an error."""
    ops, gradient, data = Mock(), Mock(), Mock()
    collective = Broadcast(lambda: data, 0, 12)
    assert lower(collective, 1, 2, ops, gradient).payload is ops.zeros.return_value
    ops.zeros.assert_called_once_with(3, "int32", gradient)
    assert lower(collective, 0, 2, ops, gradient).payload is ops.from_bytes.return_value
    ops.from_bytes.assert_called_once_with(data, "int32")


def test_pieces_must_fill_the_array_that_is_cut() -> None:
    assert [piece.tolist() for piece in cut(np.arange(5), [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    with pytest.raises(RuntimeError, match="do not fill 5"):
        cut(np.arange(5), [2, 2])


def test_texts_of_different_lengths_are_gathered_and_counted() -> None:
    texts = ["", "zwölf", "x" * 1000]
    sizes = [8 + len(text.encode()) for text in texts]  # with the length of the text

    def program(transport: ThreadTransport) -> Any:
        ledger = Ledger(WORLD, transport.rank)
        gathered = Collectives(transport, [ledger]).gather_text("error", texts[transport.rank])
        return gathered, ledger.tensors()["error"]

    found, _ = run(WORLD, True, program)
    for rank, (gathered, entry) in enumerate(found):
        assert gathered == texts
        # A ring transmits everything but the data of the next rank
        assert (entry.sent, entry.on_wire) == (sizes[rank], sum(sizes) - sizes[(rank + 1) % WORLD])
