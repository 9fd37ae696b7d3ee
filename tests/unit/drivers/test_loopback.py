"""The loopback driver: arguments, errors, collectives that ranks disagree on, and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine.lockstep import perform
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Reduced, TensorSpec
from hvdcompress.testing import Trial, backends, numbers

SPECS = [TensorSpec("a", (40,)), TensorSpec("b", (30,))]


def gradients(world_size: int, step: int = 0) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [{spec.name: numbers(spec.shape, rank, step) for spec in SPECS} for rank in range(world_size)]


@pytest.mark.parametrize(
    "method",
    [
        "topk",
        hvdcompress.get_method("topk", density=0.5),
        hvdcompress.load_plan({"method": "topk"}),
        {"method": "topk"},
    ],
    ids=["id", "method", "plan", "dict"],
)
def test_takes_an_id_a_method_a_plan_or_a_dict(method: Any) -> None:
    net = Loopback(method, world_size=1, density=0.5, min_elements=1)
    assert net.allreduce([np.float32([1, 2])])[0].tolist() == [0, 2]


ONES = np.ones(3, np.float32)


class WithUnit(np.ndarray):
    """An array of a library for physical units."""

    unit = "m"


@pytest.mark.parametrize(
    "arrays,words",
    [
        ([ONES], "that is 2, got 1"),
        ([ONES] * 3, "that is 2, got 3"),
        ([ONES, np.ones(4, np.float32)], "rank 1"),
        ([ONES, np.ones(3, np.float64)], "rank 1.*float64"),
        ([ONES, np.ones((3, 1), np.float32)], "rank 1"),
        *(
            ([ONES, ONES.astype(dtype)], f"'w', rank 1: .*{words}.* cannot be reduced")
            for dtype, words in (
                (np.int32, "int32"), (bool, "bool"), (np.complex64, "complex64"), (np.longdouble, "float128"),
                (">f4", ">f4"), (object, "object"), ([("a", "f4")], "f4"), ("M8[s]", "datetime64"),
            )
        ),
        ([ONES, np.ma.masked_array(ONES, [0, 1, 0])], "'w', rank 1 is a numpy.ma.*MaskedArray"),
        ([ONES, ONES.view(np.recarray)], "'w', rank 1 is a numpy.*recarray"),
        ([ONES, ONES.view(WithUnit)], "'w', rank 1 is a tests.*WithUnit"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_refused(arrays: list[Any], words: str) -> None:
    net = Loopback("topk", world_size=2, min_elements=1)
    with pytest.raises((ValueError, TypeError), match=words):
        net.allreduce(arrays, "w")
    net.allreduce([ONES] * 2, "w")


def test_arrays_that_are_only_views_are_reduced(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(2, 6))
    mapped[...] = np.arange(12).reshape(2, 6)
    read_only = mapped.view()
    read_only.flags.writeable = False
    for given in (mapped, read_only, mapped[::-1, ::2], mapped.T, mapped[0, 0], mapped.tolist()):
        (out, _) = Loopback("topk", world_size=2, density=1.0, min_elements=1).allreduce([given] * 2, "w")
        assert type(out) is np.ndarray
        np.testing.assert_array_equal(out, np.asarray(given))


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size = 0"):
        Loopback("topk", world_size=0)
    net = Loopback("topk", world_size=2, min_elements=1)
    with pytest.raises(ValueError, match="rank 1 lacks b"):
        net.allreduce([{"a": ONES, "b": ONES}, {"a": ONES}])
    with pytest.raises(ValueError, match="'b', rank 1"):
        net.allreduce([{"a": ONES}, {"a": ONES, "b": ONES}])
    with pytest.raises(ValueError, match=r'"max" must be "average" or "sum"|op'):
        net.allreduce([ONES] * 2, op="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5,), (1,), (2, 2)])
def test_a_tensor_may_not_change_its_shape(shape: tuple[int, ...]) -> None:
    net = Loopback("topk", world_size=1, min_elements=1)
    net.allreduce([np.ones(4, np.float32)], "w")
    with pytest.raises(ValueError, match=r"tensor 'w' had shape \(4,\) before"):
        net.allreduce([np.ones(shape, np.float32)], "w")
    net.allreduce([np.ones(4, np.float32)], "w")


def test_the_residual_of_an_unknown_tensor() -> None:
    net = Loopback("topk", world_size=1, min_elements=1)
    with pytest.raises(KeyError, match="none"):
        net.residual("w", 0)
    net.allreduce([ONES], "w")
    with pytest.raises(KeyError, match=r"no tensor 'v'.*known: w"):
        net.residual("v", 0)


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda x: x[::-1][::-1], lambda x: np.repeat(x, 2, 1)[:, ::2]])
@pytest.mark.parametrize("method", ["none", "topk", "bf16"])
def test_memory_layout_makes_no_difference(method: str, layout: Any) -> None:
    given = [numbers((6, 8), rank) for rank in range(2)]
    expected, got = (Loopback(method, 2, min_elements=1).allreduce(g) for g in (given, [layout(x) for x in given]))
    np.testing.assert_array_equal(got, expected)


def test_results_are_new_arrays() -> None:
    net, given = Loopback("none", world_size=2), [np.float32([1, 2]), np.float32([3, 4])]
    first = net.allreduce(given, "w")
    first[0][:] = 99
    assert given[0].tolist() == [1, 2] and first[1].tolist() == [2, 3]
    assert net.allreduce(given, "w")[0].tolist() == [2, 3]
    assert net.allreduce([np.float32(1), np.float32(3)], "scalar")[0] == 2


# -- collectives -----------------------------------------------------------------------------------

BYTES = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    "collectives,words",
    [
        ([AllReduce(ONES), AllGather(BYTES)], "different collectives"),
        ([AllReduce(ONES), AllReduce(ONES[:2])], "lengths differ"),
        ([AllReduce(ONES), AllReduce(ONES, op="max")], "differ"),
        ([AllReduce(ONES), AllReduce(ONES.astype(np.float16))], "differ"),
        ([Broadcast(lambda: BYTES, 0, 8), Broadcast(lambda: BYTES, 1, 8)], "roots differ"),
        ([Broadcast(lambda: BYTES, 0, 12)] * 2, "8 bytes, num_bytes is 12"),
        ([Broadcast(lambda: BYTES[:6], 0, 6)] * 2, "6"),
        ([AllGather(BYTES), AllGather(BYTES[:4])], "payload"),
    ],
)
def test_ranks_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch, collectives: list[Any], words: str) -> None:
    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        yield collectives[ctx.rank]
        return Reduced(total=x)

    monkeypatch.setattr(type(hvdcompress.get_method("none")), "exchange", exchange)
    with pytest.raises((RuntimeError, ValueError), match=words):
        Loopback("none", world_size=2).allreduce([ONES] * 2, "w")


def test_all_to_all_and_the_largest_of_all_ranks() -> None:
    pieces = perform([AllToAll(np.arange(6, dtype=np.uint8) + 10 * rank) for rank in range(3)])
    assert np.array(pieces)[1].tolist() == [[2, 3], [12, 13], [22, 23]], "piece 1 of each rank"
    arrays = [np.float32([1, 5]), np.float32([3, -2])]
    results = perform([AllReduce(a, op="max") for a in arrays])
    assert [r.tolist() for r in results] == [[3, 5], [3, 5]] and arrays[0].tolist() == [1, 5]


def test_an_infinite_float16_gradient_gives_nan() -> None:
    net = Loopback("topk", world_size=2, min_elements=1)
    assert np.isnan(net.allreduce([np.float16([1, np.inf]), np.float16([1, 2])], "w")[0]).all()


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda s: {"state": {"a": s["state"]["a"]}}, "'merge' and 'state' have different arrays"),
        (lambda s: {"merge": {"a": s["merge"]["a"]}, "state": {"a": s["state"]["a"]}}, "lacks 'residual' of b"),
    ],
)
def test_an_incomplete_state_is_refused_as_a_whole(damage: Any, words: str) -> None:
    net = Trial(hvdcompress.get_method("topk", density=0.1), 1)
    net.allreduce(gradients(1))
    (saved,), rank = net.saved(), net.ranks[0]
    net.allreduce(gradients(1, step=1))
    kept = rank.residual("b").copy()
    with pytest.raises(ValueError, match=words):
        rank.load_state_dict({**saved, **damage(saved)}, lambda: net.plan.buckets(SPECS))
    np.testing.assert_array_equal(rank.residual("b"), kept)


def test_a_saved_residual_survives_another_bucketing() -> None:
    joined, single = (Trial(hvdcompress.load_plan({"method": "topk", "min_elements": 1, **more}), 1)
                      for more in ({"bucket_elements": 100}, {}))  # fmt: skip
    joined.allreduce(gradients(1))
    single.restore(joined.saved(), SPECS)
    for name in "ab":
        np.testing.assert_array_equal(single.residual(name, 0), joined.residual(name, 0))


@pytest.mark.parametrize("backend", backends())
def test_residuals_move_to_another_bucket_with_every_backend(backend: str) -> None:
    plan = hvdcompress.load_plan({"method": "topk", "density": 0.1, "bucket_elements": 100, "min_elements": 1})
    nets = [Loopback(plan, 2, ops=backends()[name]) for name in (backend, "numpy")]
    for step in range(3):
        given = [{"a": one["a"]} if step == 1 else one for one in gradients(2, step)]
        got, expected = (net.allreduce(given)[0] for net in nets)
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])


def test_reshard_needs_the_states_of_all_ranks() -> None:
    net = Trial(hvdcompress.get_method("topk"), 3)
    net.allreduce(gradients(3))
    first, _, last = net.saved()
    with pytest.raises(ValueError, match=r"all 3 ranks.*\[0, 2\]"):
        reshard([first, last], 2)


def test_the_seed_changes_random_choices() -> None:
    nets = [Loopback("randomk", world_size=2, density=0.1, seed=seed) for seed in (0, 0, 1)]
    first, same, other = (net.allreduce([np.ones(2000, np.float32)] * 2)[0] for net in nets)
    assert (first == same).all() and (first != other).any()


def test_a_thousand_ranks() -> None:
    net = Loopback("scalecom", world_size=1024, density=0.1, min_elements=1)
    outs = net.allreduce([np.full(20, rank, np.float32) for rank in range(1024)])
    assert outs[0].max() == outs[-1].max() == 511.5
