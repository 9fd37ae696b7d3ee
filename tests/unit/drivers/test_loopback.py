"""The loopback driver: what it takes, what it refuses, and what it leaves alone when a step fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Reduced, TensorSpec
from hvdcompress.plan import Plan
from hvdcompress.testing import Trial, backends, numbers


def test_takes_an_id_a_method_a_plan_or_a_dict() -> None:
    method = hvdcompress.get("topk", density=0.5)
    plan = hvdcompress.load({"method": "topk", "density": 0.5, "min_elements": 1})
    nets = [
        Loopback("topk", world_size=1, density=0.5, min_elements=1),
        Loopback(method, world_size=1, min_elements=1),
        Loopback(plan, world_size=1),
        Loopback({"method": "topk", "density": 0.5}, 1, min_elements=1),
    ]
    assert len({net.allreduce([np.float32([1, 2])])[0].tobytes() for net in nets}) == 1
    assert isinstance(nets[0].plan, Plan)


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_is_one_or_more(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size = {world_size}"):
        Loopback("topk", world_size=world_size)


@pytest.mark.parametrize(
    "arrays,words",
    [
        ([np.ones(3, np.float32)], "that is 2, got 1"),
        ([np.ones(3, np.float32)] * 3, "that is 2, got 3"),
        ([np.ones(3, np.float32), np.ones(4, np.float32)], "rank 1"),
        ([np.ones(3, np.float32), np.ones(3, np.float64)], "rank 1.*float64"),
        ([np.ones(3, np.float32), np.ones((3, 1), np.float32)], "rank 1"),
        ([np.ones(3, np.int32)] * 2, "int32 is not a floating-point type"),
        ([np.ones(3, bool)] * 2, "bool is not a floating-point type"),
        ([np.ones(3, np.complex64)] * 2, "complex64 is not a floating-point type"),
    ],
)
def test_refuses_what_does_not_fit(arrays: list[Any], words: str) -> None:
    net = Loopback("topk", world_size=2, min_elements=1)
    with pytest.raises(ValueError, match=words):
        net.allreduce(arrays, "w")
    net.allreduce([np.ones(3, np.float32)] * 2, "w")


def test_ranks_must_bring_the_same_names() -> None:
    net, g = Loopback("topk", world_size=2), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="rank 1 lacks b"):
        net.allreduce_many([{"a": g, "b": g}, {"a": g}])
    with pytest.raises(ValueError, match="'b', rank 1"):
        net.allreduce_many([{"a": g}, {"a": g, "b": g}])


def test_op_must_be_average_or_sum() -> None:
    with pytest.raises(ValueError, match='"max" must be "average" or "sum"|op'):
        Loopback("topk", world_size=1).allreduce([np.ones(3, np.float32)], op="max")  # type: ignore[arg-type]


def test_a_tensor_may_not_change_its_shape() -> None:
    """Its residual would be of another tensor; the message says so, and names it."""
    net = Loopback("topk", world_size=1, min_elements=1)
    net.allreduce([np.ones(4, np.float32)], "w")
    for shape in ((5,), (1,), (2, 2)):
        with pytest.raises(ValueError, match=r"tensor 'w' had shape \(4,\) before"):
            net.allreduce([np.ones(shape, np.float32)], "w")
    net.allreduce([np.ones(4, np.float32)], "w")


def test_residual_of_an_unknown_tensor_names_the_known() -> None:
    net = Loopback("topk", world_size=1, min_elements=1)
    with pytest.raises(KeyError, match="none"):
        net.residual("w", 0)
    net.allreduce([np.ones(4, np.float32)], "w")
    with pytest.raises(KeyError, match="no tensor 'v'.*known: w"):
        net.residual("v", 0)


def test_residual_has_the_tensors_shape() -> None:
    net = Loopback("topk", world_size=2, density=0.1, min_elements=1)
    net.allreduce([numbers((3, 4), rank) for rank in range(2)], "w")
    assert net.residual("w", 1).shape == (3, 4) and np.count_nonzero(net.residual("w", 1)) == 11


def test_small_tensors_have_residuals_of_zeros() -> None:
    net = Loopback("topk", world_size=2)
    net.allreduce([np.ones((4, 5), np.float32)] * 2, "w")
    assert net.residual("w", 0).shape == (4, 5) and not net.residual("w", 0).any()


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda x: x[::-1][::-1], lambda x: np.repeat(x, 2, 1)[:, ::2]])
@pytest.mark.parametrize("method", ["none", "topk", "bf16"])
def test_memory_layout_makes_no_difference(method: str, layout: Any) -> None:
    g = [numbers((6, 8), rank) for rank in range(2)]
    expected = Loopback(method, world_size=2, density=0.2, min_elements=1) if method == "topk" else Loopback(method, 2)
    net = Loopback(method, world_size=2, density=0.2, min_elements=1) if method == "topk" else Loopback(method, 2)
    for plain, other in zip(expected.allreduce(g, "w"), net.allreduce([layout(x) for x in g], "w"), strict=True):
        np.testing.assert_array_equal(plain, other)


def test_results_are_new_arrays() -> None:
    net = Loopback("none", world_size=2)
    g = [np.float32([1, 2]), np.float32([3, 4])]
    a = net.allreduce(g, "w")
    a[0][:] = 99
    assert g[0].tolist() == [1, 2] and a[1].tolist() == [2, 3]
    assert net.allreduce(g, "w")[0].tolist() == [2, 3]


def test_lists_and_scalars_go_through() -> None:
    net = Loopback("none", world_size=2)
    assert net.allreduce([np.float32(1), np.float32(3)], "s")[0] == 2


# -- collectives that ranks do not agree on ---------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, collectives: list[Any]) -> Loopback:
    """A network whose method yields, on each rank, the collective given for it."""
    method = hvdcompress.get("none")

    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        yield collectives[ctx.rank]
        return Reduced(total=x)

    monkeypatch.setattr(type(method), "exchange", exchange)
    return Loopback(method, world_size=2)


BYTES, FLOATS = np.zeros(8, np.uint8), np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "collectives,words",
    [
        ([AllReduce(FLOATS), AllGather(BYTES)], "different collectives"),
        ([AllReduce(FLOATS), AllReduce(FLOATS[:2])], "lengths differ"),
        ([AllReduce(FLOATS), AllReduce(FLOATS, op="max")], "differ"),
        ([AllReduce(FLOATS), AllReduce(FLOATS.astype(np.float16))], "differ"),
        ([Broadcast(lambda: BYTES, 0, 8), Broadcast(lambda: BYTES, 1, 8)], "roots differ"),
        ([Broadcast(lambda: BYTES, 0, 12)] * 2, "8 bytes, num_bytes is 12"),
        ([Broadcast(lambda: BYTES[:6], 0, 6)] * 2, "6"),
        ([AllGather(BYTES), AllGather(BYTES[:4])], "payload"),
    ],
)
def test_ranks_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch, collectives: list[Any], words: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        broken(monkeypatch, collectives).allreduce([np.ones(3, np.float32)] * 2, "w")


def test_all_to_all_hands_each_rank_its_piece() -> None:
    from hvdcompress.engine.rehearsal import carry_out

    rows = [np.arange(6, dtype=np.uint8) + 10 * rank for rank in range(3)]
    results = carry_out([AllToAll(row) for row in rows])
    assert [[piece.tolist() for piece in pieces] for pieces in results] == [
        [[0, 1], [10, 11], [20, 21]],
        [[2, 3], [12, 13], [22, 23]],
        [[4, 5], [14, 15], [24, 25]],
    ]


def test_all_reduce_max() -> None:
    from hvdcompress.engine.rehearsal import carry_out

    arrays = [np.float32([1, 5]), np.float32([3, -2])]
    results = carry_out([AllReduce(a, op="max") for a in arrays])
    assert [r.tolist() for r in results] == [[3, 5], [3, 5]] and arrays[0].tolist() == [1, 5]


# -- a step that fails ------------------------------------------------------------------------------------


def test_a_failing_method_names_tensor_method_round_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    method = hvdcompress.get("topk")
    encode = type(method).encode

    def fails(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        if ctx.rank == 1 and ctx.step == 2:
            raise ZeroDivisionError("oh no")
        return encode(self, x, state, ctx, work)

    monkeypatch.setattr(type(method), "encode", fails)
    net = Loopback(method, world_size=3, min_elements=1)
    for step in range(2):
        net.allreduce([numbers((50,), rank, step) for rank in range(3)], "layer.w")
    before = [net.residual("layer.w", rank).copy() for rank in range(3)]
    with pytest.raises(
        ExchangeError, match=r"tensor 'layer.w' \(method topk, round 0, rank 1\): ZeroDivisionError: oh no"
    ):
        net.allreduce([numbers((50,), rank, 2) for rank in range(3)], "layer.w")
    for rank in range(3):
        np.testing.assert_array_equal(net.residual("layer.w", rank), before[rank])
    monkeypatch.undo()
    net.allreduce([numbers((50,), rank, 2) for rank in range(3)], "layer.w")


def test_non_finite_gradients_leave_every_tensor_as_it_was() -> None:
    net = Loopback("topk", world_size=2, density=0.1, min_elements=1)
    good = [{"a": numbers((40,), rank), "b": numbers((40,), 9, rank)} for rank in range(2)]
    net.allreduce_many(good)
    before = {name: net.residual(name, 1).copy() for name in "ab"}
    bad = [{name: g.copy() for name, g in one.items()} for one in good]
    bad[0]["b"][3] = np.nan
    outs = net.allreduce_many(bad)
    assert all(np.isnan(out[name]).all() for out in outs for name in "ab")
    for name in "ab":
        np.testing.assert_array_equal(net.residual(name, 1), before[name])


def test_float16_gradients_may_be_nan_too() -> None:
    net = Loopback("topk", world_size=2, min_elements=1)
    assert np.isnan(net.allreduce([np.float16([1, np.inf]), np.float16([1, 2])], "w")[0]).all()


@pytest.mark.parametrize("method", ["none", "topk"])
def test_finite_float64_beyond_float32(method: str) -> None:
    """1e300 is finite, and ``none`` sums it; to a float32 method it is an overflow, and spoils no state."""
    net = Loopback(method, world_size=2, min_elements=1)
    out = net.allreduce([np.array([1e300, 1.0])] * 2, "w")[0]
    if method == "none":
        assert out.tolist() == [1e300, 1]
    else:
        assert np.isnan(out).all() and not net.residual("w", 0).any()


# -- state ------------------------------------------------------------------------------------------------


def test_load_state_dict_takes_all_or_nothing() -> None:
    net, other = [Trial(hvdcompress.get("topk", density=0.1), 2) for _ in range(2)]
    g = [{"a": numbers((40,), rank), "b": numbers((30,), rank)} for rank in range(2)]
    net.allreduce_many(g)
    other.allreduce_many(g)
    specs = [TensorSpec("a", (40,)), TensorSpec("b", (30,))]
    good, kept = net.saved(), other.saved()
    worker = other.ranks[0]
    for damage, words in [
        (lambda s: {**s, "world": 3}, "world 3.*re-shards"),
        (lambda s: {**s, "rank": 1}, "rank 1"),
        (lambda s: {**s, "format": 2}, "format 2"),
        (lambda s: {**s, "steps": {**s["steps"], "c": 1}}, "does not have: c"),
        (lambda s: {**s, "state": {"a": s["state"]["a"]}}, "'merge' and 'state' have different arrays"),
        (lambda s: {**s, "merge": {"a": s["merge"]["a"]}, "state": {"a": s["state"]["a"]}}, "lacks 'residual' of b"),
        (lambda s: {**s, "state": {**s["state"], "b": {"residual": np.zeros(5, np.float32)}}}, "5"),
    ]:
        with pytest.raises(ValueError, match=words):
            worker.load_state_dict(damage(good[0]), other.plan.buckets(specs))
        assert worker.state_dict()["steps"] == kept[0]["steps"]
        np.testing.assert_array_equal(worker.residual("b"), kept[0]["state"]["b"]["residual"])


def test_a_saved_residual_survives_another_bucketing() -> None:
    g = [{"a": numbers((40,), 1), "b": numbers((30,), 2)}]
    joined = Trial(hvdcompress.load({"method": "topk", "bucket_elements": 100, "min_elements": 1}), 1)
    joined.allreduce_many(g)
    single = Trial(hvdcompress.load({"method": "topk", "min_elements": 1}), 1)
    single.restore(joined.saved(), [TensorSpec("a", (40,)), TensorSpec("b", (30,))])
    for name in "ab":
        np.testing.assert_array_equal(single.residual(name, 0), joined.residual(name, 0))


@pytest.mark.parametrize("backend", backends())
def test_residuals_move_to_another_bucket_with_every_backend(backend: str) -> None:
    plan = hvdcompress.load({"method": "topk", "density": 0.1, "bucket_elements": 100, "min_elements": 1})
    net = Loopback(plan, 2, ops=backends()[backend])
    alone = Loopback(plan, 2, ops=backends()["numpy"])
    for step in range(3):
        given = [{"a": numbers((40,), rank, step), "b": numbers((30,), 9, rank, step)} for rank in range(2)]
        for one in given if step == 1 else ():
            del one["b"]
        for out, expected in zip(net.allreduce_many(given), alone.allreduce_many(given), strict=True):
            for name in expected:
                np.testing.assert_array_equal(out[name], expected[name])


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_reshard_keeps_the_sum_of_residuals(world_size: int) -> None:
    net = Trial(hvdcompress.get("topk", density=0.1), 3)
    net.allreduce([numbers((50,), rank) for rank in range(3)], "w")
    saved = net.saved()
    new = reshard(saved, world_size)
    assert [one["rank"] for one in new] == list(range(world_size)) and {one["world"] for one in new} == {world_size}
    total = sum(one["state"]["w"]["residual"] for one in saved)
    np.testing.assert_allclose(sum(one["state"]["w"]["residual"] for one in new), total, rtol=1e-5, atol=1e-6)
    assert new[0]["state"]["w"]["residual"].dtype == np.float32
    other = Trial(hvdcompress.get("topk", density=0.1), world_size)
    other.restore(new, [TensorSpec("w", (50,))])
    other.allreduce([numbers((50,), rank) for rank in range(world_size)], "w")


def test_reshard_needs_every_rank() -> None:
    net = Trial(hvdcompress.get("topk"), 3)
    net.allreduce([numbers((50,), rank) for rank in range(3)], "w")
    with pytest.raises(ValueError, match=r"all 3 ranks.*\[0, 2\]"):
        reshard([net.saved()[0], net.saved()[2]], 2)


def test_loss_scale_may_be_a_function() -> None:
    scale = [4.0]
    net = Loopback("topk", world_size=1, density=0.5, min_elements=1, loss_scale=lambda: scale[0])
    assert net.allreduce([np.float32([8, 4])], "w")[0].tolist() == [8, 0]
    assert net.residual("w", 0).tolist() == [0, 1]  # unscaled
    scale[0] = 2.0
    assert net.allreduce([np.float32([0, 2])], "w")[0].tolist() == [0, 4]
    assert net.residual("w", 0).tolist() == [0, 0]


def test_seeds_change_what_is_random() -> None:
    outs = [
        Loopback("randomk", world_size=2, density=0.1, seed=seed).allreduce([np.ones(2000, np.float32)] * 2)[0]
        for seed in (0, 0, 1)
    ]
    assert (outs[0] == outs[1]).all() and (outs[0] != outs[2]).any()


def test_a_thousand_workers() -> None:
    net = Loopback("scalecom", world_size=1024, density=0.1, min_elements=1)
    outs = net.allreduce([np.full(20, rank, np.float32) for rank in range(1024)])
    assert outs[0].max() == outs[-1].max() == 511.5
