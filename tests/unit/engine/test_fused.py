"""Tensors that travel fused get, send and keep what they would alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.collectives import gathered_lengths
from hvdcompress.engine.commit import Outcome, commit_step
from hvdcompress.engine.exchange import Exchange, ExchangeError
from hvdcompress.engine.fused import FusedCommunication, contiguous_view
from hvdcompress.engine.rehearsal import carry_out
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Reduced, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.parts import wire
from hvdcompress.plan import BY_NAME, IN_ORDER, Bucket, Grouping, plan_of
from hvdcompress.testing import numbers

WORLD = 3
SPECS = [TensorSpec("a", (40, 50)), TensorSpec("b", (30, 60)), TensorSpec("c", (1100,)), TensorSpec("d", (70, 20))]


def buffer(name: str, n: int, dtype: str) -> np.ndarray:
    return np.zeros(n, dtype)


def started(rank: RankState, bucket: Bucket, members: list[np.ndarray], in_place: bool = False) -> Exchange:
    """Return a rank's exchange at its first collective."""
    exchange = Exchange(Setup(rank, Group(rank.rank, WORLD), bucket, members[0], fast))
    outs = None if in_place else [np.empty_like(member) for member in members]
    exchange.add(range(len(members)), members, outs)
    exchange.start()
    return exchange


def asks(*collectives: Any) -> Generator[Any, Any, Any]:
    """A method that asks for these collectives, and returns what they brought."""
    found = []
    for collective in collectives:
        found.append((yield collective))
    return Reduced(total=found)  # type: ignore[arg-type]


def run(programs: list[list[list[Any]]]) -> list[list[Any]]:
    """By rank and tensor, a list of collectives -> by rank and tensor, their results."""
    ranks = []
    for number, tensors in enumerate(programs):
        fused = FusedCommunication(
            [f"t{place}" for place in range(len(tensors))], Group(number, len(programs)), fast, buffer
        )
        for place, collectives in enumerate(tensors):
            fused.begin(place, asks(*collectives))
        ranks.append(fused)
    results: list[Any] = [None] * len(ranks)
    try:
        while True:
            results = carry_out([rank.send(result) for rank, result in zip(ranks, results, strict=True)])
    except StopIteration as stop:
        ended = [stop.value]
    for rank, result in zip(ranks[1:], results[1:], strict=True):
        with pytest.raises(StopIteration) as stopped:
            rank.send(result)
        ended.append(stopped.value.value)
    return [[reduced.total for reduced in each] for each in ended]


def test_each_tensor_gets_its_part_of_every_op() -> None:
    def tensor(rank: int, place: int) -> list[Any]:
        x = np.arange(4 + place, dtype=np.float32) + rank
        payload = np.full(4 * (place + 1), 10 * rank + place, np.uint8)
        ring = tuple(4 * (place + 1) * (other == (rank + 1) % WORLD) for other in range(WORLD))
        back = tuple(4 * (place + 1) * (other == (rank - 1) % WORLD) for other in range(WORLD))
        return [
            AllReduce(x),
            AllReduce(x, "max"),
            AllGather(payload),
            AllToAll(np.repeat(np.arange(WORLD, dtype=np.uint8) + 10 * rank + 50 * place, 4)),
            AllToAll(payload, ring, back),
            Broadcast(lambda: payload, 1, len(payload)),
            Broadcast(lambda: payload, place % WORLD, len(payload)),
        ]

    found = run([[tensor(rank, place) for place in range(4)] for rank in range(WORLD)])
    for rank, tensors in enumerate(found):
        for place, (total, most, gathered, turned, passed, one_root, roots) in enumerate(tensors):
            np.testing.assert_array_equal(total, 3 * np.arange(4 + place) + 3)
            np.testing.assert_array_equal(most, np.arange(4 + place) + 2)
            assert [piece.tolist() for piece in gathered] == [[10 * r + place] * 4 * (place + 1) for r in range(WORLD)]
            assert [piece.tolist() for piece in turned] == [[rank + 10 * r + 50 * place] * 4 for r in range(WORLD)]
            before = (rank - 1) % WORLD
            assert passed[before].tolist() == [10 * before + place] * 4 * (place + 1)
            assert one_root.tolist() == [10 + place] * 4 * (place + 1)
            assert roots.tolist() == [10 * (place % WORLD) + place] * 4 * (place + 1)


def test_pieces_of_unknown_lengths_are_read_from_every_tensors_header() -> None:
    def piece(rank: int, other: int, place: int) -> np.ndarray:
        extra = 4 * ((rank + 2 * other + place) % 3)
        head = wire.pack(wire.Header("oktopk", 0, 0, 9, 1, wire.NUM_BYTES + extra))
        return np.r_[np.frombuffer(head, np.uint8), np.full(extra, 50 * place + 10 * rank + other, np.uint8)]

    def tensor(rank: int, place: int) -> list[Any]:
        pieces = [piece(rank, other, place) for other in range(WORLD)]
        return [AllToAll(np.concatenate(pieces), tuple(map(len, pieces)))]

    found = run([[tensor(rank, place) for place in range(3)] for rank in range(WORLD)])
    for rank, tensors in enumerate(found):
        for place, (received,) in enumerate(tensors):
            assert [one.tolist() for one in received] == [piece(r, rank, place).tolist() for r in range(WORLD)]


def test_lengths_that_differ_are_read_from_every_tensors_header() -> None:
    """Even where those of a rank have the same sum as another's."""

    def payload(extra: int) -> np.ndarray:
        head = wire.pack(wire.Header("topk", 0, 0, 9, 1, wire.NUM_BYTES + extra))
        return np.frombuffer(head + bytes(extra), np.uint8)

    extras = [(0, 8), (8, 0), (4, 4)]
    ranks = [np.concatenate([payload(extra) for extra in each]) for each in extras]
    for mine, each in zip(ranks, extras, strict=True):
        collective = AllGather(mine, lengths=tuple(wire.NUM_BYTES + extra for extra in each))
        found = gathered_lengths(np.concatenate(ranks), collective, WORLD, fast)
        assert found == [wire.NUM_BYTES + extra for pair in extras for extra in pair]


def test_what_lies_end_to_end_is_sent_as_it_lies() -> None:
    whole = np.arange(9, dtype=np.float32)
    pieces = [whole[:4], whole[4:6], whole[6:]]
    found = contiguous_view(pieces)
    assert found is not None and np.shares_memory(found, whole)
    np.testing.assert_array_equal(found, whole)
    assert contiguous_view(pieces[::2]) is None and contiguous_view(pieces[::-1]) is None
    assert contiguous_view([*pieces, np.zeros(2, np.float32)]) is None


def test_state_is_not_left_where_the_next_step_writes() -> None:
    """A sum that becomes state lies in the memory in which payloads were joined."""
    kept: dict[str, np.ndarray] = {}

    def keep(name: str, n: int, dtype: str) -> np.ndarray:
        return kept.setdefault(name, np.zeros(n, dtype))

    def method(place: int) -> Generator[Any, Any, Any]:
        total = yield AllReduce(np.full(3 + place, place, np.float32))
        return Reduced(total=total, state={"sum": total, "own": np.ones(2, np.float32)})

    fused = FusedCommunication(["a", "b"], Group(0, 1), fast, keep)
    for place in range(2):
        fused.begin(place, method(place))
    collective: Any = fused.send(None)
    with pytest.raises(StopIteration) as stopped:
        fused.send(collective.x)  # as a transport does that reduces in place
    for buffer in kept.values():
        buffer[:] = -1
    for place, reduced in enumerate(stopped.value.value):
        assert reduced.state["sum"].tolist() == [place] * (3 + place) and reduced.total[0] == -1


def test_unlike_collectives_are_an_error_that_names_tensors() -> None:
    fused = FusedCommunication(["left", "right"], Group(0, 2), fast, buffer)
    fused.begin(0, asks(AllReduce(np.zeros(2, np.float32))))
    fused.begin(1, asks(AllReduce(np.zeros(2, np.float16))))
    with pytest.raises(RuntimeError, match="left.*right.*bucket_elements: 0"):
        fused.send(None)
    fused = FusedCommunication(["left", "right"], Group(0, 2), fast, buffer)
    fused.begin(0, asks())
    fused.begin(1, asks(AllGather(np.zeros(4, np.uint8))))
    with pytest.raises(RuntimeError, match="for 'left'"):
        fused.send(None)


def steps(ranks: list[RankState], grouping: Grouping | None, numbers_of: range) -> list[dict[str, np.ndarray]]:
    """Steps of ranks in lockstep; the results of rank 0."""
    outs = []
    for step in numbers_of:
        given = [
            {s.name: numbers((s.size,), len(s.name) + i, r, step) for i, s in enumerate(SPECS)} for r in range(WORLD)
        ]
        for bucket in ranks[0].plan.buckets(SPECS, grouping):
            exchanges = [
                started(rank, bucket, [own[m.name] for m in bucket.members], in_place=True)
                for rank, own in zip(ranks, given, strict=True)
            ]
            while exchanges[0].collective is not None:
                collectives: list[Any] = [exchange.collective for exchange in exchanges]
                for exchange, result in zip(exchanges, carry_out(collectives), strict=True):
                    exchange.resume(result)
            for rank, exchange in zip(ranks, exchanges, strict=True):
                exchange.deliver(1.0)
                commit_step(rank, [exchange], [], Outcome())
        outs.append(given[0])
    return outs


@pytest.mark.parametrize("method", ["powersgd", "qsgd", "dgc", "gradiveq", "fp16"])
@pytest.mark.parametrize(
    ("first", "then"), [(BY_NAME, None), (None, BY_NAME), (IN_ORDER, None), (None, IN_ORDER), (BY_NAME, IN_ORDER)]
)
def test_state_saved_together_goes_on_alone_and_back(
    method: str, first: Grouping | None, then: Grouping | None
) -> None:
    """State is kept by tensor, so it survives another grouping."""
    more = {"gradiveq": {"dense_steps": 3, "slice_elements": 20, "matrix_rank": 2, "tensors": "all"}}.get(method, {})
    plan = plan_of(method, min_elements=1, **more)
    assert (
        len(plan.buckets(SPECS, BY_NAME)) < len(SPECS)
        and max(spec.size for spec in SPECS) < BY_NAME.per_tensor_elements
    )
    through = [RankState(plan, rank, WORLD) for rank in range(WORLD)]
    expected = steps(through, first, range(8))[4:]
    before = [RankState(plan, rank, WORLD) for rank in range(WORLD)]
    steps(before, first, range(4))
    after = [RankState(plan, rank, WORLD) for rank in range(WORLD)]
    for new, old in zip(after, before, strict=True):
        new.load_state_dict(old.state_dict())
    for got, want in zip(steps(after, then, range(4, 8)), expected, strict=True):
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert after[0].state_dict()["state"].keys() == through[0].state_dict()["state"].keys()


@pytest.mark.parametrize("grouping", [BY_NAME, None])
def test_fp16_is_made_of_each_gradient_as_it_comes(grouping: Grouping | None) -> None:
    """Joined or not: no copy in float32 is made, and what is clipped is counted."""
    plan = plan_of("fp16", min_elements=1)
    ranks = [RankState(plan, rank, WORLD) for rank in range(WORLD)]
    given = {spec.name: np.full(spec.size, 1e30, np.float32) for spec in SPECS}
    for bucket in plan.buckets(SPECS, grouping):
        members = [given[m.name] for m in bucket.members]
        exchanges = [started(rank, bucket, members) for rank in ranks]
        collectives: list[Any] = [exchange.collective for exchange in exchanges]
        for rank, exchange, result in zip(ranks, exchanges, carry_out(collectives), strict=True):
            assert exchange.resume(result) is None
            exchange.deliver(1.0)
            commit_step(rank, [exchange], [], Outcome())
    for rank in ranks:
        assert all(memory.flat is None for memory in rank.memory.values())
        assert rank.ledger.counters() == {"saturated": sum(spec.size for spec in SPECS)}


@pytest.mark.parametrize("bad", [False, True])
def test_small_dense_gradients_are_looked_at_once(monkeypatch: pytest.MonkeyPatch, bad: bool) -> None:
    """The bucket's results are its gradients' sums, and one that is not finite marks it, whichever it is."""
    looked, inspect = [], fast.inspect
    monkeypatch.setattr(fast, "inspect", lambda x, scan: looked.append(len(x)) or inspect(x, scan))
    plan = plan_of("topk", min_elements=10**6)
    [bucket] = plan.buckets(SPECS, IN_ORDER)
    rank = RankState(plan, 0, WORLD)
    members = [np.arange(member.size, dtype=np.float32) for member in bucket.members]
    members[-1][-1] = np.inf if bad else 0.0
    before = [member.copy() for member in members]
    exchange = started(rank, bucket, members)
    assert looked == [bucket.spec.size] * (2 if bad else 1)
    assert exchange.finite is not bad
    assert isinstance(exchange.collective, AllReduce)
    np.testing.assert_array_equal(exchange.collective.x, 0.0 if bad else np.concatenate(before))
    for member, was in zip(members, before, strict=True):
        np.testing.assert_array_equal(member, was)


def test_a_yielded_array_is_an_error_that_names_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("qsgd", min_elements=1)

    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        yield x

    monkeypatch.setattr(type(plan.program.main), "exchange", exchange)
    [bucket] = plan.buckets(SPECS, IN_ORDER)
    with pytest.raises(ExchangeError, match=f"{bucket.members[0].name}.*yielded ndarray; it must yield AllReduce"):
        started(RankState(plan, 0, WORLD), bucket, [np.ones(member.size, np.float32) for member in bucket.members])


def test_an_error_names_the_tensor_whose_method_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("qsgd", min_elements=1)
    method, spoiled = type(plan.program.main), plan.program.main.encode

    def encode(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        if ctx.spec.name == "b":
            raise RuntimeError("spoiled")
        return spoiled(x, state, ctx, work)

    monkeypatch.setattr(method, "encode", encode)
    with pytest.raises(ExchangeError, match=r"tensor 'b' \(method qsgd, round 0, rank 0\): RuntimeError: spoiled"):
        steps([RankState(plan, rank, WORLD) for rank in range(WORLD)], BY_NAME, range(1))
