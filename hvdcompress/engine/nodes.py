"""Placement of ranks on nodes, and of buckets on the ranks of a node, for exchanges with two levels.

With two levels, the ranks of a node add up their gradients, and each bucket has one *owner* among them. The owner
exchanges the sum with the owners of the same bucket on the other nodes, as one of ``num_nodes`` ranks, and returns the
result to its node. See :mod:`hvdcompress.engine.levels`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hvdcompress.method import TensorSpec
from hvdcompress.plan import Bucket, Grouping, Plan

BUCKETS_PER_RANK = 4  #: buckets are at most 1/4 of what a rank should own, so that the ranks' shares can be balanced


class Nodes(NamedTuple):
    """``num_nodes`` nodes with ``local_size`` consecutive ranks each."""

    num_nodes: int
    local_size: int

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.local_size

    def local_rank(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its node."""
        return rank % self.local_size

    def ranks_of_node(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return list(range(node * self.local_size, (node + 1) * self.local_size))

    def counterparts(self, local_rank: int) -> list[int]:
        """Return the rank with this index on each node."""
        return list(range(local_rank, self.num_nodes * self.local_size, self.local_size))

    def __str__(self) -> str:
        return f"{self.num_nodes} nodes of {self.local_size} ranks"


class Location(NamedTuple):
    """Where the launcher has put this rank.

    Attributes:
        node: the node of this rank.
        num_nodes: number of nodes.
        local_rank: the index of this rank among the ranks of its node.
        local_size: number of ranks on this node.
    """

    node: int
    num_nodes: int
    local_rank: int
    local_size: int


def find_nodes(setting: int | str, rank: int, world_size: int, location: Location | None) -> Nodes | None:
    """Return the nodes for a plan's ``nodes``; None for one level.

    Args:
        setting: the number of nodes; 0 for one level; "auto" to use what the launcher tells. It means one level if the
            launcher tells nothing, if there is one node or one rank per node, or if ranks of a node are not consecutive
            or nodes have different numbers of ranks.
        rank: this rank.
        world_size: number of ranks.
        location: where the launcher has put this rank; None if it does not tell, or if not all of its ranks take part.

    Raises:
        ValueError: ranks cannot be distributed as ``setting`` says, or nodes have different numbers of ranks.
    """
    if setting == "auto":
        if location is None or min(location.num_nodes, location.local_size) == 1:
            return None
        nodes = Nodes(location.num_nodes, location.local_size)
        is_even = nodes.num_nodes * nodes.local_size == world_size
        is_consecutive = (nodes.node_of(rank), nodes.local_rank(rank)) == (location.node, location.local_rank)
        return nodes if is_even and is_consecutive else None
    num_nodes = int(setting)
    if num_nodes in (0, world_size):
        return None
    if world_size % num_nodes:
        raise ValueError(
            f"nodes = {num_nodes}: {world_size} ranks cannot be distributed equally; start equally many ranks on each "
            "node, or set nodes: 0 for an exchange with one level"
        )
    return Nodes(num_nodes, world_size // num_nodes)


@dataclass(frozen=True)
class Placement:
    """Which rank of a node owns each tensor.

    The result depends only on the tensors and on the order in which they appear, so all ranks have the same. A tensor
    keeps its owner, because the owner has its residual.

    Attributes:
        nodes: the nodes.
        rank: this rank.
        owners: {name of a tensor or bucket: local rank of its owner}, so far.
        sizes: {tensor name: number of elements} of tensors that have an owner.
    """

    nodes: Nodes
    rank: int
    owners: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def owner(self, bucket: Bucket) -> int:
        """Return the local rank of the bucket's owner."""
        return self.owners[bucket.members[0].name]

    def owns(self, bucket: Bucket) -> bool:
        """Return whether this rank owns a bucket."""
        return self.owner(bucket) == self.nodes.local_rank(self.rank)

    def is_split(self, bucket: Bucket) -> bool:
        """Return whether tensors of a bucket have different owners, because a state with other owners was loaded."""
        return len({self.owners[member.name] for member in bucket.members}) > 1

    def group(
        self, plan: Plan, specs: Iterable[TensorSpec], grouping: Grouping | None, ages: Mapping[str, Any]
    ) -> tuple[Placement, list[Bucket]]:
        """Group tensors into buckets as :meth:`Plan.buckets` does, and choose the owners of new tensors.

        The owner with the fewest elements so far gets the largest bucket, and so on. A bucket contains only tensors of
        one owner.

        Returns:
            The placement with these tensors, and the buckets.
        """
        specs = list(specs)
        limit = sum(spec.size for spec in specs) // (BUCKETS_PER_RANK * self.nodes.local_size)
        if grouping:
            grouping = replace(
                grouping,
                bucket_elements=min(grouping.bucket_elements, limit),
                per_tensor_elements=min(grouping.per_tensor_elements, limit),
            )
        owners = dict(self.owners)
        sizes = {**self.sizes, **{spec.name: spec.size for spec in specs}}

        def grouped() -> list[Bucket]:
            keys = {spec.name: (ages.get(spec.name), owners.get(spec.name)) for spec in specs}
            return plan.buckets(specs, grouping, keys)

        loads: Counter[int] = Counter()  # elements that each local rank owns
        for name, owner in owners.items():
            loads[owner] += sizes.get(name, 0)  # the sizes are those of tensors, not of buckets
        new = [bucket for bucket in grouped() if bucket.members[0].name not in owners]
        for bucket in sorted(new, key=lambda each: (-each.spec.size, each.spec.name)):
            owner = min(range(self.nodes.local_size), key=lambda each: loads[each])
            loads[owner] += bucket.spec.size
            owners |= {member.name: owner for member in bucket.members}
        buckets = grouped()
        owners |= {bucket.spec.name: owners[bucket.members[0].name] for bucket in buckets}
        return Placement(self.nodes, self.rank, owners, sizes), buckets
