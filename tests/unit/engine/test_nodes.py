"""Exchanges with two levels: the nodes, the owners of tensors, and what is saved of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experiments import nets
from hvdcompress.engine.nodes import Location, Nodes, Placement, find_nodes
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.loopback import Loopback, warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.optimizers import SGD
from hvdcompress.plan import BY_NAME, IN_ORDER, plan_of
from tests.harness import heavy_tailed
from tests.promises.variants import METHODS

NODES = Nodes(2, 2)
WORLD = 4
SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
TOPK = {"density": 0.05, "min_elements": 100}


def gradients(step: int) -> list[dict[str, np.ndarray]]:
    return [heavy_tailed(SHAPES, step, rank) for rank in range(WORLD)]


def sums_of_nodes(given: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """The sum of each node's gradients, in the order of ranks."""
    nodes = [NODES.ranks_of_node(node) for node in range(NODES.num_nodes)]
    return [{name: fast.add_all([given[rank][name] for rank in ranks]) for name in SHAPES} for ranks in nodes]


def saved_by(net: Loopback) -> list[dict[str, Any]]:
    return [rank.state_dict() for rank in net.ranks]


def load(net: Loopback, saved: list[dict[str, Any]]) -> Loopback:
    for rank, one in zip(net.ranks, saved, strict=True):
        rank.load_state_dict(one)
    return net


def total_of(net: Loopback, name: str) -> Any:
    """The sum of a tensor's residuals over all ranks."""
    return sum(net.residual(name, rank).ravel().astype(np.float64) for rank in range(net.world_size))


# -- nodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting,rank,world_size,location,nodes",
    [
        (0, 0, 4, None, None),
        (4, 0, 4, None, None),  # one rank per node
        (2, 3, 4, None, Nodes(2, 2)),
        (2, 3, 4, Location(0, 1, 3, 4), Nodes(2, 2)),  # a number overrides the launcher
        (1, 3, 4, None, Nodes(1, 4)),
        ("auto", 0, 4, None, None),
        ("auto", 2, 4, Location(1, 2, 0, 2), Nodes(2, 2)),
        ("auto", 5, 6, Location(1, 2, 2, 3), Nodes(2, 3)),
        ("auto", 2, 4, Location(0, 1, 2, 4), None),  # one node
        ("auto", 2, 4, Location(2, 4, 0, 1), None),  # one rank per node
        ("auto", 1, 4, Location(1, 2, 0, 2), None),  # ranks go round the nodes
        ("auto", 2, 5, Location(1, 2, 0, 2), None),  # 2 and 3 ranks
    ],
)
def test_nodes_are_found(setting: Any, rank: int, world_size: int, location: Any, nodes: Nodes | None) -> None:
    assert find_nodes(setting, rank, world_size, location) == nodes


def test_nodes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes = 2: 5 ranks cannot be distributed equally"):
        find_nodes(2, 0, 5, None)
    with pytest.raises(ValueError, match="nodes = 3: 4 ranks"):
        Loopback("topk", world_size=4, nodes=3)


def test_ranks_of_nodes() -> None:
    nodes = Nodes(3, 2)
    assert [nodes.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [nodes.ranks_of_node(node) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [nodes.counterparts(each) for each in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert all(nodes.counterparts(nodes.local_rank(rank))[nodes.node_of(rank)] == rank for rank in range(6))


# -- owners ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_size", [2, 4])
@pytest.mark.parametrize("grouping", [BY_NAME, IN_ORDER, None])
@pytest.mark.parametrize("net", ["resnet32", "resnet50", "vgg16", "gpt2"])
def test_ranks_own_equal_shares(net: str, grouping: Any, local_size: int) -> None:
    specs = [TensorSpec(name, shape) for name, shape in nets.get(net).items()]
    plan = plan_of("topk")
    nodes = Nodes(2, local_size)
    placement, buckets = Placement(nodes, 0).group(plan, specs, grouping, {})
    loads = [0] * local_size
    for bucket in buckets:
        assert not placement.is_split(bucket)
        loads[placement.owner(bucket)] += bucket.spec.size
    largest = max(spec.size for spec in specs) / sum(loads)
    assert max(loads) / sum(loads) <= max(1.2 / local_size, largest + 0.01)
    for rank in range(1, 2 * local_size):
        other, same = Placement(nodes, rank).group(plan, reversed(specs), grouping, {})
        assert other.owners == placement.owners and same == buckets
        assert [other.owns(bucket) for bucket in buckets] == [
            placement.owner(bucket) == rank % local_size for bucket in buckets
        ]


def test_owners_stay_when_tensors_come() -> None:
    plan = plan_of("topk", min_elements=1)
    first, _ = Placement(NODES, 0).group(plan, [TensorSpec("a", (90,)), TensorSpec("b", (50,))], None, {})
    assert first.owners == {"a": 0, "b": 1}
    second, _ = first.group(plan, [TensorSpec("b", (50,)), TensorSpec("c", (70,)), TensorSpec("d", (5,))], None, {})
    assert second.owners == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert first.owners == {"a": 0, "b": 1}, "a placement does not change"
    loaded, _ = second.with_owners({"a": 1}).group(plan, [TensorSpec("e", (60,))], None, {})
    assert loaded.owners["e"] == 0, "a loaded owner counts"


# -- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_two_levels_are_a_sum_inside_nodes_and_an_exchange_between_them(method: str) -> None:
    settings = {**METHODS[method], "bucket_elements": 0, "min_elements": 100}
    net = Loopback(method, WORLD, nodes=2, **settings)
    between = Loopback(method, NODES.num_nodes, **settings)
    for step in range(5):
        given = gradients(step)
        if step == 3:
            given[3]["c"][0, 0] = np.nan
        results = net.allreduce_many(given, op="sum")
        (wanted, _) = between.allreduce_many(sums_of_nodes(given), op="sum")
        for result in results:
            for name in SHAPES:
                np.testing.assert_array_equal(result[name], wanted[name], err_msg=f"{name}, step {step}")
        assert np.isnan(wanted["a"]).all() == (step == 3)
    for name in SHAPES:
        owner = net.ranks[0].placement.owners[name]
        for rank in range(WORLD):
            residual = net.residual(name, rank)
            if NODES.local_rank(rank) == owner:
                np.testing.assert_array_equal(residual, between.residual(name, NODES.node_of(rank)))
            else:
                assert not residual.any(), "only the owner keeps one"


@pytest.mark.parametrize(
    "settings",
    [{"clip_norm": 0.5}, {"cosine_every": 2}, {"verify_every": 2}, {"optimizer": SGD(momentum=0.9)}],
    ids=str,
)
@pytest.mark.parametrize("method,own", [("topk", {"density": 0.05}), ("powersgd", {})])
def test_averages_with_options(method: str, own: dict[str, Any], settings: dict[str, Any]) -> None:
    """With a trigger, a pause, and a step that is undone, too."""
    settings = {**own, **settings, "bucket_elements": 0, "min_elements": 100}
    net = Loopback(method, WORLD, nodes=2, **settings)
    between = Loopback(method, NODES.num_nodes, **settings)
    for step in range(6):
        given = gradients(step)
        halves = [{name: array * np.float32(0.5) for name, array in one.items()} for one in sums_of_nodes(given)]
        if step == 2:
            net.trigger()
            between.trigger()
        if step == 4:
            with net.paused(), between.paused():
                net.allreduce_many(gradients(9))
                between.allreduce_many(sums_of_nodes(gradients(9)))
            net.allreduce_many(gradients(10))
            net.discard()
        results = net.allreduce_many(given)
        wanted = between.allreduce_many(halves)[0]
        for result in results:
            for name in SHAPES:
                np.testing.assert_allclose(result[name], wanted[name], 1e-5, 1e-6, err_msg=f"{name}, step {step}")
    if "clip_norm" in settings:
        assert {rank.gradient_norm for rank in net.ranks} == {net.gradient_norm()}
        assert net.gradient_norm() == pytest.approx(between.gradient_norm())
    if "cosine_every" in settings:
        found = [net.ledger.last_compared(rank) for rank in range(WORLD)]
        assert len(set(found)) == 1 and found[0].cosine == pytest.approx(between.ledger.last_compared(0).cosine)
    steps = {name: 6 for name in SHAPES}
    assert all(rank.steps() == steps and rank.ages()["a"][1] == 1 for rank in net.ranks)


def test_a_request_of_a_rank_that_owns_nothing_restarts_all() -> None:
    net = Loopback("topk", WORLD, nodes=2, **TOPK)
    one = [{"a": each["a"]} for each in gradients(0)]
    net.allreduce_many(one)
    net.ranks[3].trigger_requested = True
    net.allreduce_many(one)
    assert net.ranks[3].states["a"].slots == {} and all(rank.states["a"].triggers == 1 for rank in net.ranks)


def test_residuals_take_half_the_memory() -> None:
    shapes = {name: (300, 100) for name in "abcd"}
    given = [heavy_tailed(shapes, 0, rank) for rank in range(WORLD)]
    one_level, two_levels = Loopback("topk", WORLD, density=0.1), Loopback("topk", WORLD, density=0.1, nodes=2)
    for net in (one_level, two_levels):
        for _ in range(3):
            net.allreduce_many(given)

    def num_bytes(net: Loopback, rank: int) -> int:
        return sum(array.nbytes for state in net.ranks[rank].states.values() for array in state.slots.values())

    assert num_bytes(one_level, 0) == sum(num_bytes(two_levels, rank) for rank in (0, 1)) == 4 * 4 * 30_000
    assert num_bytes(two_levels, 0) == num_bytes(two_levels, 1)
    whole = sum(two_levels.ranks[rank].num_state_bytes() for rank in (0, 1))
    assert whole <= 1.1 * one_level.ranks[0].num_state_bytes()


# -- saved states ----------------------------------------------------------------------------------------


def run(nodes: int = 2, steps: int = 3, world_size: int = WORLD) -> Loopback:
    net = Loopback("topk", world_size, nodes=nodes, **TOPK)
    for step in range(steps):
        net.allreduce_many([heavy_tailed(SHAPES, step, rank) for rank in range(world_size)])
    return net


@pytest.mark.parametrize("method", ["topk", "powersgd", "gradiveq", "dgc"])
def test_a_state_is_restored_to_the_bit(method: str) -> None:
    settings = {**METHODS[method], "min_elements": 100, "nodes": 2, "optimizer": SGD(momentum=0.9)}
    net = Loopback(method, WORLD, grouping=IN_ORDER, **settings)
    for step in range(3):
        net.allreduce_many(gradients(step))
    other = load(Loopback(method, WORLD, grouping=IN_ORDER, **settings), saved_by(net))
    other = load(Loopback(method, WORLD, grouping=IN_ORDER, **settings), saved_by(other))  # before tensors appear
    for step in range(3, 6):
        results, wanted = (each.allreduce_many(gradients(step)) for each in (other, net))
        for result, want in zip(results, wanted, strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(result[name], want[name])


@pytest.mark.parametrize("path", [[(4, 0), (4, 1), (4, 2)], [(6, 3), (3, 0), (6, 2), (4, 2)], [(1, 0), (8, 2), (4, 2)]])
@pytest.mark.parametrize("steps", [0, 1], ids=["at once", "with steps"])
def test_other_nodes_take_over(path: list[tuple[int, int]], steps: int, tmp_path: Any) -> None:
    """The sum of residuals stays, also where a state is loaded and saved before its tensors appear."""
    net = run()
    before = {name: total_of(net, name) for name in "abc"}
    for number, (world_size, nodes) in enumerate(path):
        for saved in saved_by(net):
            checkpoint.save(saved, tmp_path / str(number))
        net = Loopback("topk", world_size, nodes=nodes, **TOPK)
        load(net, [checkpoint.load(tmp_path / str(number), rank, world_size, net.nodes) for rank in range(world_size)])
        if steps or number == len(path) - 1:
            with net.paused():  # the tensors appear, and residuals stay
                net.allreduce_many([heavy_tailed(SHAPES, 9, rank) for rank in range(world_size)])
            for name in "abc":
                np.testing.assert_allclose(total_of(net, name), before[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_state_is_saved_while_only_some_tensors_have_appeared() -> None:
    net = run()
    before = {name: total_of(net, name) for name in "abc"}
    other = load(Loopback("topk", WORLD, nodes=2, **TOPK), saved_by(net))
    with other.paused():
        other.allreduce_many([{"c": each["c"]} for each in gradients(5)])
    for one in reshard(saved_by(other), 3):
        for name in "abc":
            np.testing.assert_allclose(3 * one["state"][name]["residual"], before[name], rtol=1e-5, atol=1e-6)


def test_owners_that_change_leave_their_bucket() -> None:
    """In the saved state, tensors of one bucket have different owners."""
    settings = {"density": 0.1, "min_elements": 1, "bucket_elements": 1000, "nodes": 2}
    together, apart = (Loopback("topk", WORLD, **settings) for _ in range(2))
    small = {"p": (40,), "q": (30,)}
    given = [heavy_tailed(small, 0, rank) for rank in range(WORLD)]
    together.allreduce_many(given)
    for name in small:
        apart.allreduce_many([{name: each[name]} for each in given])
    assert len(together.ranks[0].states) == 1 and len({apart.ranks[0].placement.owners[name] for name in small}) == 2
    saved = saved_by(apart)
    before = {name: total_of(apart, name) for name in small}
    load(together, saved)
    together._last = None
    with together.paused():
        together.allreduce_many(given)
    for name in small:
        np.testing.assert_array_equal(total_of(together, name), before[name])


def test_states_of_other_nodes_are_refused() -> None:
    saved = saved_by(run())
    for nodes, here in ((0, "one level"), (1, "1 nodes of 4 ranks")):
        net = Loopback("topk", WORLD, nodes=nodes, **TOPK)
        with pytest.raises(ValueError, match=f"of 2 nodes of 2 ranks, but here is {here}.*re-shards"):
            net.ranks[1].load_state_dict(saved[1])
    with pytest.raises(ValueError, match="of one level, but here is 2 nodes of 2 ranks"):
        run().ranks[0].load_state_dict(saved_by(run(nodes=0))[0])


@pytest.mark.parametrize(
    "wrong",
    [
        "two",
        [2, 2],
        {"num_nodes": 2, "local_size": 2},
        {"num_nodes": 2, "owners": {}},
        {"num_nodes": 0, "local_size": 2, "owners": {}},
        {"num_nodes": 2, "local_size": 0, "owners": {}},
        {"num_nodes": 2.0, "local_size": 2, "owners": {}},
        {"num_nodes": 3, "local_size": 2, "owners": {}},  # not 4 ranks
        {"num_nodes": 2, "local_size": 2, "owners": {"a": 2}},
        {"num_nodes": 2, "local_size": 2, "owners": {"a": -1}},
        {"num_nodes": 2, "local_size": 2, "owners": ["a"]},
    ],
    ids=str,
)
def test_nodes_that_are_none_are_refused(wrong: Any, tmp_path: Any) -> None:
    net = run()
    saved = {**saved_by(net)[0], "nodes": wrong}
    before = saved_by(net)[0]
    with pytest.raises(ValueError, match="'nodes'"):
        net.ranks[0].load_state_dict(saved)
    assert net.ranks[0].state_dict()["nodes"] == before["nodes"]
    path = checkpoint.save(saved, tmp_path)
    with pytest.raises(ValueError, match="'nodes'"):
        checkpoint.read(path)


def test_all_files_are_needed(tmp_path: Any) -> None:
    for saved in saved_by(run())[:3]:
        checkpoint.save(saved, tmp_path)
    with pytest.raises(FileNotFoundError, match="rank-3-of-4"):
        checkpoint.load(tmp_path, 0, 4, None)
    for file in tmp_path.iterdir():
        if "rank-0" not in file.name:
            file.unlink()
    with pytest.raises(ValueError, match="all ranks are needed"):  # a local disk has the files of its own rank alone
        checkpoint.load(tmp_path, 0, 4, None)
    assert checkpoint.load(tmp_path, 0, 4, NODES)["nodes"]["owners"]


def test_kernels_are_compiled_whatever_the_number_of_nodes() -> None:
    """The trial steps of two simulated ranks have one level."""
    warm_up(plan_of("topk", nodes=4), [TensorSpec("w", (64, 64))])
