"""Fused communication: the tensors of a bucket share collectives. Results and state are those of each tensor alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.fused import FusedCommunication, contiguous_view
from hvdcompress.engine.lockstep import perform
from hvdcompress.engine.transport import Group
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Reduced, TensorSpec
from hvdcompress.methods.qsgd import QSGD
from hvdcompress.ops import fast
from hvdcompress.plan import BY_NAME, IN_ORDER, Grouping
from tests.unit.engine.helpers import load, state_dicts, train

WORLD = 3
SHAPES = {"a": (40, 50), "b": (30, 60), "c": (1100,), "d": (70, 20)}


def yield_all(collectives: list[Any]) -> Generator[Any, Any, Any]:
    """Act as a method that yields these collectives. Its total is the list of their results."""
    results = [None] * len(collectives)
    for number, collective in enumerate(collectives):
        results[number] = yield collective
    return Reduced(total=results)  # type: ignore[arg-type]


def fuse(*tensors: list[Any], rank: int = 0, world_size: int = 2) -> FusedCommunication:
    """Return the fused communication of tensors whose methods yield these collectives."""
    names = [f"t{number}" for number in range(len(tensors))]
    fused = FusedCommunication(names, Group(rank, world_size), fast, lambda name, n, dtype: np.zeros(n, dtype))
    for number, collectives in enumerate(tensors):
        fused.begin(number, yield_all(collectives))
    return fused


def run(programs: list[list[list[Any]]]) -> list[list[Any]]:
    """Carry out the collectives of each tensor of each rank, and return their results by rank and tensor."""
    ranks = [fuse(*tensors, rank=rank, world_size=WORLD) for rank, tensors in enumerate(programs)]
    results: list[Any] = [None] * WORLD
    for _ in programs[0][0]:
        results = perform([rank.send(result) for rank, result in zip(ranks, results, strict=True)])
    found = []
    for rank, result in zip(ranks, results, strict=True):
        with pytest.raises(StopIteration) as stopped:
            rank.send(result)
        found.append([reduced.total for reduced in stopped.value.value])
    return found


def test_each_tensor_gets_its_part_of_every_collective() -> None:
    def tensor(rank: int, number: int) -> list[Any]:
        x = np.arange(4 + number, dtype=np.float32) + rank
        payload = np.full(4 * (number + 1), 10 * rank + number, np.uint8)
        to_next = tuple(4 * (number + 1) * (other == (rank + 1) % WORLD) for other in range(WORLD))
        from_previous = tuple(4 * (number + 1) * (other == (rank - 1) % WORLD) for other in range(WORLD))
        return [
            AllReduce(x),
            AllReduce(x, "max"),
            AllGather(payload),
            AllToAll(np.repeat(np.arange(WORLD, dtype=np.uint8) + 10 * rank + 50 * number, 4)),
            AllToAll(payload, to_next, from_previous),
            Broadcast(lambda: payload, 1, len(payload)),
            Broadcast(lambda: payload, number % WORLD, len(payload)),
        ]

    found = run([[tensor(rank, number) for number in range(4)] for rank in range(WORLD)])
    for rank, tensors in enumerate(found):
        for number, (total, largest, gathered, scattered, shifted, one_root, roots) in enumerate(tensors):
            n = 4 * (number + 1)
            previous = (rank - 1) % WORLD
            np.testing.assert_array_equal(total, 3 * np.arange(4 + number) + 3)
            np.testing.assert_array_equal(largest, np.arange(4 + number) + 2)
            assert [piece.tolist() for piece in gathered] == [[10 * r + number] * n for r in range(WORLD)]
            assert [piece.tolist() for piece in scattered] == [[rank + 10 * r + 50 * number] * 4 for r in range(WORLD)]
            assert shifted[previous].tolist() == [10 * previous + number] * n
            assert one_root.tolist() == [10 + number] * n
            assert roots.tolist() == [10 * (number % WORLD) + number] * n


def test_adjacent_arrays_are_sent_without_a_copy() -> None:
    whole = np.arange(9, dtype=np.float32)
    pieces = [whole[:4], whole[4:6], whole[6:]]
    found = contiguous_view(pieces)
    assert found is not None and np.shares_memory(found, whole)
    np.testing.assert_array_equal(found, whole)
    assert contiguous_view(pieces[::2]) is None and contiguous_view(pieces[::-1]) is None
    assert contiguous_view([*pieces, np.zeros(2, np.float32)]) is None


def test_state_is_copied_out_of_buffers_that_the_next_step_overwrites() -> None:
    buffers: dict[str, np.ndarray] = {}

    def method(number: int) -> Generator[Any, Any, Any]:
        total = yield AllReduce(np.full(3 + number, number, np.float32))
        return Reduced(total=total, state={"sum": total, "own": np.ones(2, np.float32)})

    fused = FusedCommunication(
        ["a", "b"], Group(0, 1), fast, lambda name, n, dtype: buffers.setdefault(name, np.zeros(n, dtype))
    )
    for number in range(2):
        fused.begin(number, method(number))
    collective: Any = fused.send(None)
    with pytest.raises(StopIteration) as stopped:
        fused.send(collective.x)  # like a transport that reduces in place
    for array in buffers.values():
        array[:] = -1
    for number, reduced in enumerate(stopped.value.value):
        assert reduced.state["sum"].tolist() == [number] * (3 + number) and reduced.total[0] == -1


def test_different_collectives_are_an_error_that_names_the_tensors() -> None:
    fused = fuse([AllReduce(np.zeros(2, np.float32))], [AllReduce(np.zeros(2, np.float16))])
    with pytest.raises(RuntimeError, match=r"t0.*t1.*bucket_elements: 0"):
        fused.send(None)
    fused = fuse([], [AllGather(np.zeros(4, np.uint8))])
    with pytest.raises(RuntimeError, match="for 't0'"):
        fused.send(None)


@pytest.mark.parametrize(
    "method,first,then",
    [
        ("powersgd", BY_NAME, None),
        ("powersgd", None, BY_NAME),
        ("dgc", IN_ORDER, None),
        ("dgc", None, IN_ORDER),
        ("gradiveq", BY_NAME, IN_ORDER),
        ("qsgd", BY_NAME, None),
        ("oktopk", BY_NAME, None),  # an all-to-all whose lengths receivers do not know
    ],
)
def test_saved_state_fits_another_grouping(method: str, first: Grouping | None, then: Grouping | None) -> None:
    """State is saved by tensor, whether or not the tensors are in one bucket."""
    settings = {"dense_steps": 3, "slice_elements": 20, "tensors": "all"} if method == "gradiveq" else {}
    net, other = (
        Loopback(method, WORLD, grouping=grouping, min_elements=1, **settings)  # type: ignore[arg-type]
        for grouping in (first, then)
    )
    train(net, range(4), SHAPES)
    load(other, state_dicts(net))
    np.testing.assert_equal(train(other, range(4, 8), SHAPES), train(net, range(4, 8), SHAPES))
    assert len(net.ranks[0].states) != len(other.ranks[0].states) or None not in (first, then)
    np.testing.assert_equal(state_dicts(other)[0]["state"], state_dicts(net)[0]["state"])


@pytest.mark.parametrize("grouping", [BY_NAME, None])
def test_fp16_converts_gradients_without_a_float32_copy(grouping: Grouping | None) -> None:
    net = Loopback("fp16", WORLD, min_elements=1, grouping=grouping)
    net.allreduce([{name: np.full(shape, 1e30, np.float32) for name, shape in SHAPES.items()}] * WORLD)
    for local in net.ranks:
        assert all("gradients.float32" not in memory.scratch for memory in local.memory.values())
        num_elements = sum(TensorSpec(name, shape).size for name, shape in SHAPES.items())
        assert net.ledger.counters(local.rank) == {"saturated": num_elements}


def test_errors_of_a_method_name_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Any, x: Any, state: Any, ctx: Any, work: Any, original: Any = QSGD.encode) -> Any:
        if ctx.spec.name == "b":
            raise RuntimeError("spoiled")
        return original(self, x, state, ctx, work)

    monkeypatch.setattr(QSGD, "encode", encode)
    net = Loopback("qsgd", WORLD, min_elements=1, grouping=BY_NAME)
    with pytest.raises(ExchangeError, match=r"tensor 'b' \(method qsgd, round 0, rank 0\): RuntimeError: spoiled"):
        train(net, [0], SHAPES)
