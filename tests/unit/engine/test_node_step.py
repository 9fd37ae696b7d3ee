"""Steps with two levels: sums inside nodes, an exchange between them, and the state that owners keep and save."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.saving import checkpoint
from hvdcompress.loopback import Loopback, warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import IN_ORDER, plan_of
from tests.unit.engine.helpers import Gradients, gradients, load, state_dicts, train, trained

NODES = Nodes(2, 2)
WORLD = 4
SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
TOPK: dict[str, Any] = {"density": 0.05, "min_elements": 100}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": {"density": 0.05, "warmup": {"steps": 2}},
    "scalecom": {"density": 0.02, "beta": 0.3},
    "qsgd": {},
    "powersgd": {},
    "dgc": {"density": 0.02},
    "gradiveq": {"dense_steps": 2, "compressed_steps": 3},
}


def sums_of_nodes(given: Gradients, factor: float = 1.0) -> Gradients:
    """Return the sum of each node's gradients, in the order of ranks, times a factor."""
    nodes = [NODES.ranks_of_node(node) for node in range(NODES.num_nodes)]
    return [
        {name: fast.add_all([given[rank][name] for rank in ranks]) * np.float32(factor) for name in given[0]}
        for ranks in nodes
    ]


def run(nodes: int = 2, steps: int = 3, world_size: int = WORLD) -> Loopback:
    return trained("topk", world_size, steps, SHAPES, nodes=nodes, **TOPK)


def total_residuals(net: Loopback, names: Iterable[str] = "abc") -> list[Any]:
    """Return the sum of each tensor's residuals over all ranks."""
    return [sum(net.residual(name, rank).astype(np.float64) for rank in range(net.world_size)) for name in names]


@pytest.mark.parametrize("method", METHODS)
def test_two_levels_are_sums_inside_nodes_and_an_exchange_between_them(method: str) -> None:
    settings = {**METHODS[method], "bucket_elements": 0, "min_elements": 100}
    net = Loopback(method, WORLD, nodes=2, **settings)
    between = Loopback(method, NODES.num_nodes, **settings)
    for step in range(5):
        given = gradients(SHAPES, step, WORLD)
        if step == 3:
            given[3]["c"][0, 0] = np.nan
        results = net.allreduce(given, op="sum")
        wanted, _ = between.allreduce(sums_of_nodes(given), op="sum")
        np.testing.assert_equal(results, [wanted] * WORLD)
        assert np.isnan(wanted["a"]).all() == (step == 3)
    for name in SHAPES:
        owner = net.ranks[0].placement.owners[name]
        for rank in range(WORLD):
            residual = net.residual(name, rank)
            if NODES.local_rank(rank) == owner:
                np.testing.assert_array_equal(residual, between.residual(name, NODES.node_of(rank)))
            else:
                assert not residual.any(), "only the owner keeps a residual"


@pytest.mark.parametrize(
    "method,settings",
    [
        ("topk", {"verify_every": 2}),
        ("powersgd", {"verify_every": 2}),
    ],
    ids=str,
)
def test_averages_with_options(method: str, settings: dict[str, Any]) -> None:
    """Also with a trigger, a pause, and a step that is discarded."""
    settings = {**settings, "bucket_elements": 0, "min_elements": 100}
    net = Loopback(method, WORLD, nodes=2, **settings)
    between = Loopback(method, NODES.num_nodes, **settings)
    for step in range(6):
        if step == 2:
            net.trigger()
            between.trigger()
        if step == 4:
            with net.paused(), between.paused():
                net.allreduce(gradients(SHAPES, 9, WORLD))
                between.allreduce(sums_of_nodes(gradients(SHAPES, 9, WORLD)))
            net.allreduce(gradients(SHAPES, 10, WORLD))
            net.discard()
        given = gradients(SHAPES, step, WORLD)
        wanted = between.allreduce(sums_of_nodes(given, 0.5))[0]
        for result in net.allreduce(given):
            for name in SHAPES:
                np.testing.assert_allclose(result[name], wanted[name], 1e-5, 1e-6, err_msg=f"{name}, step {step}")
    for rank in net.ranks:
        assert rank.steps() == dict.fromkeys(SHAPES, 6) and rank.ages()["a"][1] == 1


def test_a_rank_that_owns_nothing_can_trigger_a_restart() -> None:
    net = trained("topk", WORLD, 1, {"a": SHAPES["a"]}, nodes=2, **TOPK)
    net.ranks[3].trigger_requested = True
    train(net, [1], {"a": SHAPES["a"]})
    assert net.ranks[3].states["a"].slots == {} and all(rank.states["a"].triggers == 1 for rank in net.ranks)


def test_kernels_are_compiled_whatever_the_number_of_nodes() -> None:
    """The trial steps of two simulated ranks have one level."""
    warm_up(plan_of("topk", nodes=4), [TensorSpec("w", (64, 64))])


# -- saved states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["topk", "powersgd", "dgc"])
def test_training_goes_on_exactly_from_a_saved_state(method: str) -> None:
    settings = {**METHODS[method], "min_elements": 100, "nodes": 2, "grouping": IN_ORDER}
    net = trained(method, WORLD, 3, SHAPES, **settings)
    other = load(Loopback(method, WORLD, **settings), state_dicts(net))
    other = load(Loopback(method, WORLD, **settings), state_dicts(other))  # saved before any tensor appears
    np.testing.assert_equal(train(other, range(3, 6), SHAPES), train(net, range(3, 6), SHAPES))


@pytest.mark.parametrize("steps", [0, 1], ids=["at once", "with steps"])
@pytest.mark.parametrize("path", [[(6, 3), (3, 0), (6, 2), (4, 2)], [(4, 1), (8, 2), (4, 0)]])
def test_other_nodes_take_over_the_residuals(path: list[tuple[int, int]], steps: int, tmp_path: Path) -> None:
    """Their sum stays, also if a state is loaded and saved again before its tensors appear."""
    net = run()
    before = total_residuals(net)
    for number, (world_size, nodes) in enumerate(path):
        folder = tmp_path / str(number)
        for saved in state_dicts(net):
            checkpoint.save(saved, folder)
        net = Loopback("topk", world_size, nodes=nodes, **TOPK)
        load(net, [checkpoint.load(folder, rank, world_size, net.nodes) for rank in range(world_size)])
        if steps or number == len(path) - 1:
            with net.paused():  # the tensors appear, and residuals stay
                train(net, [9], SHAPES)
            for now, was in zip(total_residuals(net), before, strict=True):
                np.testing.assert_allclose(now, was, rtol=1e-5, atol=1e-6)


def test_a_bucket_takes_over_tensors_of_different_owners() -> None:
    shapes = {"p": (40,), "q": (30,)}
    together, apart = (
        Loopback("topk", WORLD, density=0.1, min_elements=1, bucket_elements=1000, nodes=2) for _ in range(2)
    )
    train(together, [0], shapes)
    for name, shape in shapes.items():
        train(apart, [0], {name: shape})
    assert len(together.ranks[0].states) == 1 and set(apart.ranks[0].placement.owners.values()) == {0, 1}

    before = total_residuals(apart, shapes)
    load(together, state_dicts(apart))
    together._last = None
    with together.paused():
        train(together, [0], shapes)
    np.testing.assert_equal(total_residuals(together, shapes), before)


def test_states_of_other_nodes_are_refused() -> None:
    saved = state_dicts(run())
    for nodes, here in ((0, "one level"), (1, "1 nodes of 4 ranks")):
        net = Loopback("topk", WORLD, nodes=nodes, **TOPK)
        with pytest.raises(ValueError, match=f"has nodes 2 nodes of 2 ranks, but nodes is {here} here.*re-shards"):
            net.ranks[1].load_state_dict(saved[1])
    with pytest.raises(ValueError, match="has nodes one level, but nodes is 2 nodes of 2 ranks here"):
        run().ranks[0].load_state_dict(run(nodes=0).ranks[0].state_dict())


@pytest.mark.parametrize(
    "nodes",
    [
        "two",
        [2, 2],
        {"num_nodes": 2, "local_size": 2},
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
def test_malformed_nodes_are_refused(nodes: Any, tmp_path: Path) -> None:
    local = run(steps=1).ranks[0]
    before = local.state_dict()
    with pytest.raises(ValueError, match="'nodes'"):
        local.load_state_dict({**before, "nodes": nodes})
    assert local.state_dict()["nodes"] == before["nodes"]
    path = checkpoint.save({**before, "nodes": nodes}, tmp_path)
    with pytest.raises(ValueError, match="'nodes'"):
        checkpoint.read(path)


def test_other_nodes_need_the_files_of_all_ranks(tmp_path: Path) -> None:
    checkpoint.save(run().ranks[0].state_dict(), tmp_path)
    with pytest.raises(ValueError, match="all ranks are needed"):  # a local disk has only the files of its own rank
        checkpoint.load(tmp_path, 0, 4, None)
    assert checkpoint.load(tmp_path, 0, 4, NODES)["nodes"]["owners"]
