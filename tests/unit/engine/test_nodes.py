"""Nodes of an exchange with two levels: how they are found, and which rank of a node owns which tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments import nets
from hvdcompress.engine.nodes import Location, Nodes, Placement, find_nodes
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME, IN_ORDER, plan_of


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
        ("auto", 1, 4, Location(1, 2, 0, 2), None),  # ranks are assigned to nodes in turn
        ("auto", 2, 5, Location(1, 2, 0, 2), None),  # 2 and 3 ranks
    ],
)
def test_nodes_are_found(setting: Any, rank: int, world_size: int, location: Any, nodes: Nodes | None) -> None:
    assert find_nodes(setting, rank, world_size, location) == nodes


def test_nodes_must_divide_the_number_of_ranks() -> None:
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


@pytest.mark.parametrize(
    "net,grouping,local_size", [("resnet32", BY_NAME, 2), ("resnet50", IN_ORDER, 4), ("gpt2", None, 4)]
)
def test_ranks_own_equal_shares(net: str, grouping: Any, local_size: int) -> None:
    specs = [TensorSpec(name, shape) for name, shape in nets.get(net).items()]
    nodes = Nodes(2, local_size)
    placement, buckets = Placement(nodes, 0).group(plan_of("topk"), specs, grouping, {})
    loads = [0] * local_size
    for bucket in buckets:
        assert not placement.is_split(bucket)
        loads[placement.owner(bucket)] += bucket.spec.size
    largest = max(spec.size for spec in specs) / sum(loads)
    assert max(loads) / sum(loads) <= max(1.2 / local_size, largest + 0.01)
    for rank in range(1, 2 * local_size):
        other, same = Placement(nodes, rank).group(plan_of("topk"), reversed(specs), grouping, {})
        assert other.owners == placement.owners and same == buckets
        owns = [placement.owner(bucket) == rank % local_size for bucket in buckets]
        assert [other.owns(bucket) for bucket in buckets] == owns


def test_owners_stay_when_other_tensors_appear() -> None:
    plan = plan_of("topk", min_elements=1)
    first, _ = Placement(Nodes(2, 2), 0).group(plan, [TensorSpec("a", (90,)), TensorSpec("b", (50,))], None, {})
    assert first.owners == {"a": 0, "b": 1}
    second, _ = first.group(plan, [TensorSpec("b", (50,)), TensorSpec("c", (70,)), TensorSpec("d", (5,))], None, {})
    assert second.owners == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert first.owners == {"a": 0, "b": 1}, "a placement does not change"
    loaded, _ = replace(second, owners={**second.owners, "a": 1}).group(plan, [TensorSpec("e", (60,))], None, {})
    assert loaded.owners["e"] == 0, "the tensors of a loaded state count"
