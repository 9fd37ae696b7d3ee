"""Exchanges with two levels: uncompressed inside a node, compressed between nodes.

Each bucket takes this way, and different buckets overlap::

    to the owner      the other ranks of the node send their gradients to the bucket's owner, which adds them up
    between nodes     the owners of the bucket on all nodes exchange the sums, as with one level
    from the owner    the owner sends the result to the other ranks of its node

The sum is made in the order of ranks, so every driver and the loopback get the same bits. A :class:`NodeExchange` has
the interface of an :class:`~hvdcompress.engine.exchange.Exchange`. Its :attr:`~NodeExchange.level` tells the step which
network its collective belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.commit import Slots
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.intake import Intake, Stage
from hvdcompress.engine.late import nonzero
from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.method import AllGather, AllToAll, Array, Collective, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag
from hvdcompress.plan import Bucket

Level = Literal["world", "to_owner", "between", "from_owner"]

Network = Mapping[Level, Collectives]
"""The collectives of one rank, by the ranks that take part.

"world": all ranks: statuses and errors. "between": the ranks that exchange a bucket between nodes; with one level, all
ranks. "to_owner": the ranks of this node: gradients. "from_owner": the ranks of this node: results. They have
collectives of their own, because on ordered networks results and gradients must not wait for each other.
"""


def network_over(transport: Any, observers: Sequence[Observer], nodes: Nodes | None = None) -> Network:
    """Return the collectives of one rank over a transport.

    Args:
        transport: the :class:`Transport` of all ranks. With two levels, its ``split(nodes)`` returns transports to the
            owner, between nodes, and from the owner.
        observers: receive the events.
        nodes: the nodes; None for one level.
    """
    world = Collectives(transport, observers)
    if nodes is None:
        return {"world": world, "between": world}
    to_owner, between, from_owner = transport.split(nodes)
    return {
        "world": world,
        "to_owner": Collectives(to_owner, observers, world.rank, inside_node=True),
        "between": Collectives(between, observers, world.rank),
        "from_owner": Collectives(from_owner, observers, world.rank, inside_node=True),
    }


class NodeExchange(Intake):
    """One bucket in one step, with two levels.

    Args:
        rank_state: this rank's state; its placement says which rank owns the bucket.
        network: the collectives of this rank.
        bucket: the bucket.
        like: an array on the gradients' device, in the working dtype.
        ops: the array ops of the gradients' library.
        loss_scale: the factor by which the loss was multiplied.

    Attributes:
        level: the level of the current collective.
        x: an array on the device of the payloads.
        vector: the gradients of this rank, and later the result, in the order of the bucket's tensors [n].
        inner: the exchange between nodes; None on the other ranks of the node, and until the sum is there.
    """

    def __init__(
        self, rank_state: RankState, network: Network, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0
    ):
        super().__init__(rank_state, bucket, like, ops)
        assert rank_state.placement is not None
        self.network = network
        self.loss_scale = loss_scale
        self.x = like
        self.level: Level = "to_owner"
        self.inner: Exchange | None = None
        self.owner = rank_state.placement.owner(bucket)
        self.is_owned = rank_state.owns(bucket)
        self._collective: Collective | None = None  # inside the node
        self.vector: Any = None

    def _note_begun(self) -> None:
        """The owner notes the beginning with its exchange between nodes."""

    def _first_state(self) -> BucketState:
        return BucketState(self.bucket, {})  # on other ranks than the owner it has only the progress of the bucket

    def _parts(self, vector: Array) -> list[Array]:
        return [vector[start:stop] for start, stop in self.bucket.spans]

    # -- the gradients --------------------------------------------------------------------------------------

    def _take(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        if len(self.outs) == 1 and self.outs[0].dtype == self.like.dtype:
            # The result may overwrite the gradient, or is written to ``outs`` anyway, so no other buffer is needed
            self.vector = self.outs[0]
        elif self.vector is None:
            work = Workspace(self.ops, self.memory.scratch)
            self.vector = work.buffer("node", self.bucket.spec.size, self.dtype, self.like)
        for index, gradient in zip(indices, gradients, strict=True):
            if self.vector is not gradient:
                start, stop = self.bucket.spans[index]
                self.ops.write(self.vector[start:stop], gradient, 1.0)

    @property
    def finite(self) -> Flag:
        """Whether the sum is free of Inf and NaN. Only its owner knows."""
        return self.inner.finite if self.inner else True

    # -- the collectives ------------------------------------------------------------------------------------

    @property
    def collective(self) -> Collective | None:
        """The collective whose result is needed next; None if the exchange waits for :meth:`deliver`, or is done."""
        return self.inner.collective if self.inner and self.level == "between" else self._collective

    def start(self) -> None:
        """Start sending the gradients to the owner; see :meth:`Intake.start`."""
        super().start()
        self.round = 0
        num_bytes = int(self.vector.nbytes)
        nothing = (0,) * self.network["to_owner"].world_size
        owners = tuple(num_bytes * (rank == self.owner) for rank in range(len(nothing)))
        if self.is_owned:
            others = tuple(num_bytes - each for each in owners)
            self._collective = AllToAll(self.ops.to_bytes(self.vector[:0]), nothing, others)
        else:
            self._collective = AllToAll(self.ops.to_bytes(self.vector), owners, nothing)

    def known_lengths(self) -> tuple[int, ...] | None:
        """Return the bytes of all payloads of the current all-gather; see :meth:`Exchange.known_lengths`."""
        if self.level != "from_owner":
            return self.inner.known_lengths() if self.inner else None
        num_bytes = int(self.vector.nbytes)
        return tuple(num_bytes * (rank == self.owner) for rank in range(self.network["from_owner"].world_size))

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Remember payload lengths; see :meth:`Exchange.note_lengths`."""
        if self.level == "between" and self.inner:
            self.inner.note_lengths(lengths)

    def resume(self, result: Any) -> Collective | None:
        """Take the result of the collective; return the next one, or None.

        Raises:
            ExchangeError: the method failed.
        """
        if self.level == "from_owner":
            self._take_result(result)
        elif self.level == "to_owner" and self.is_owned:
            self._begin_between(result)
        elif self.level == "to_owner":
            self._return_result()
        else:
            assert self.inner is not None
            self.inner.resume(result)
        if self.inner and self.level == "between":
            self.stage = self.inner.stage
            self.round = self.inner.round
        return self.collective

    def _begin_between(self, pieces: Sequence[Array]) -> None:
        """Add the gradients of the node, and start to exchange the sum with the other nodes."""
        vector = self.vector
        gradients = [
            vector if rank == self.owner else self.ops.from_bytes(piece, self.dtype)
            for rank, piece in enumerate(pieces)
        ]
        total = self.ops.add_all(gradients, into_first=True)
        group = self.network["between"].group
        self.inner = Exchange(self.rank_state, group, self.bucket, self.like, self.ops, self.loss_scale)
        self.state = self.inner.state
        self.level = "between"
        self.inner.add(range(len(self.outs)), self._parts(total), self._parts(vector))
        self.inner.start()

    def deliver(self, factor: float) -> None:
        """On the owner, write the result, and prepare to send it to the other ranks of the node."""
        assert self.inner is not None
        self.inner.deliver(factor)
        self._return_result()

    def _return_result(self) -> None:
        self.stage = Stage.RUNNING
        self.level = "from_owner"
        self.round = 0
        self._collective = AllGather(self.ops.to_bytes(self.vector if self.is_owned else self.vector[:0]))

    def _take_result(self, pieces: Sequence[Array]) -> None:
        """Write the result to :attr:`outs`."""
        if not self.is_owned:
            self.vector = self.ops.from_bytes(pieces[self.owner], self.dtype)
        for out, part in zip(self.outs, self._parts(self.vector), strict=True):
            if out is not part and out is not self.vector:
                self.ops.write(out, part, 1.0)
        self._collective = None
        self.stage = Stage.DELIVERED

    # -- the commit -----------------------------------------------------------------------------------------

    def new_slots(self, unused: Collection[str]) -> tuple[Slots, tuple[Slots, ...]]:
        """Return ``slots`` and ``members`` of the state after the step."""
        return self.inner.new_slots(unused) if self.inner else super().new_slots(unused)

    def _sent(self) -> tuple[list[Array] | None, int]:
        # All ranks of a node must find the same elements, and only the owner knows the indices of the method
        return [nonzero(self.vector)] if self.method.sparse else None, 1

    def close(self) -> None:
        """End the exchange after the commit."""
        if self.inner:
            self.inner.close()
        else:
            super().close()
        self.stage = Stage.CLOSED

    def abandon(self, fill: bool = False) -> None:
        """End the exchange without effect; see :meth:`Part.abandon`."""
        if self.inner:
            self.inner.abandon()
        super().abandon(fill)
        self.stage = Stage.CLOSED

    # -- descriptions for messages --------------------------------------------------------------------------

    def describe_wait(self, count: int = 1) -> str:
        """Describe the collective that this rank waits for; see :meth:`Exchange.describe_wait`."""
        placement = self.rank_state.placement
        assert placement is not None
        node = placement.nodes.node_of(placement.rank)
        if self.level == "to_owner":
            return f"the gradients of tensor {self.name!r} of the ranks of node {node}"
        if self.level == "between" and self.inner:
            return self.inner.describe_wait(count)
        owner = placement.nodes.ranks_of_node(node)[self.owner]
        return f"the result of tensor {self.name!r} from rank {owner} of this node"
