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

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Literal

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.commit import Part, Slots, Stage
from hvdcompress.engine.exchange import Exchange
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


class NodeExchange(Part):
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
        collective: the collective whose result is needed next; None if the exchange waits for :meth:`deliver`, or is
            done.
        finite: whether the sum is free of Inf and NaN. Only its owner knows.
        vector: the gradients of this rank, and later the result, in the order of the bucket's tensors [n].
        inner: the exchange between nodes; None on the other ranks of the node, and until the sum is there.
    """

    def __init__(
        self, rank_state: RankState, network: Network, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0
    ):
        super().__init__(rank_state, bucket, like, ops)
        assert rank_state.placement is not None
        self.placement = rank_state.placement
        self.network = network
        self.loss_scale = loss_scale
        self.level: Level = "to_owner"
        self.collective: Collective | None = None
        self.finite: Flag = True
        self.inner: Exchange | None = None
        self.owner = self.placement.owner(bucket)
        self.is_owned = self.placement.owns(bucket)
        self.vector: Any = None
        self._communication = self._communicate()

    def _note_begun(self) -> None:
        """The owner notes the beginning with its exchange between nodes."""

    def _first_state(self) -> BucketState:
        return BucketState(self.bucket, {})  # on other ranks than the owner it has only the progress of the bucket

    def _parts(self, vector: Array) -> list[Array]:
        return [vector[start:stop] for start, stop in self.bucket.spans]

    def _take(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        if len(self.outs) == 1 and self.outs[0].dtype == self.like.dtype:
            # The result may overwrite the gradient, or is written to ``outs`` anyway, so no other buffer is needed
            self.vector = self.outs[0]
        elif self.vector is None:
            work = Workspace(self.ops, self.memory.scratch[None])
            self.vector = work.buffer("node", self.bucket.spec.size, self.dtype, self.like)
        for index, gradient in zip(indices, gradients, strict=True):
            if self.vector is not gradient:
                start, stop = self.bucket.spans[index]
                self.ops.write(self.vector[start:stop], gradient, 1.0)

    # -- the collectives ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start sending the gradients to the owner; see :meth:`Part.start`."""
        super().start()
        self.resume(None)

    def resume(self, result: Any) -> Collective | None:
        """Take the result of the collective; return the next one, or None.

        Raises:
            ExchangeError: the method failed.
        """
        try:
            self.level, self.collective = self._communication.send(result)
        except StopIteration:
            self.collective = None
            self.stage = Stage.DELIVERED
            return None
        between = self.inner if self.level == "between" else None
        self.stage = between.stage if between else Stage.RUNNING
        self.round = between.round if between else 0
        return self.collective

    def deliver(self, factor: float) -> None:
        """On the owner, write the result, and prepare to send it to the other ranks of the node."""
        self.resume(factor)

    def _communicate(self) -> Generator[tuple[Level, Collective | None], Any, None]:
        """Yield the collectives of this rank with their levels. None on the owner: the result waits for ``deliver``."""
        sizes = self._sizes_by_rank()
        nothing = (0,) * len(sizes)
        own = self.ops.to_bytes(self.vector)
        if self.is_owned:
            others = tuple(own.nbytes - size for size in sizes)
            pieces = yield "to_owner", AllToAll(own[:0], nothing, others)
            inner = self._begin_between(pieces)
            while inner.stage is not Stage.REDUCED:
                inner.resume((yield "between", inner.collective))
            inner.deliver((yield "between", None))
            pieces = yield "from_owner", AllGather(own)
        else:
            yield "to_owner", AllToAll(own, sizes, nothing)
            pieces = yield "from_owner", AllGather(own[:0])
            self.vector = self.ops.from_bytes(pieces[self.owner], self.dtype)
        for out, part in zip(self.outs, self._parts(self.vector), strict=True):
            if out is not part and out is not self.vector:
                self.ops.write(out, part, 1.0)

    def _sizes_by_rank(self) -> tuple[int, ...]:
        """Return the bytes of the bucket at the index of the owner, and zeros for the other ranks of the node."""
        return tuple(
            int(self.vector.nbytes) * (rank == self.owner) for rank in range(self.network["to_owner"].world_size)
        )

    def _begin_between(self, pieces: Sequence[Array]) -> Exchange:
        """Add the gradients of the node, and start to exchange the sum with the other nodes."""
        vector = self.vector
        gradients = [
            vector if rank == self.owner else self.ops.from_bytes(piece, self.dtype)
            for rank, piece in enumerate(pieces)
        ]
        total = self.ops.add_all(gradients, into_first=True)
        group = self.network["between"].group
        inner = self.inner = Exchange(self.rank_state, group, self.bucket, self.like, self.ops, self.loss_scale)
        self.state = inner.state
        self.level = "between"  # in error messages, too
        inner.add(range(len(self.outs)), self._parts(total), self._parts(vector))
        inner.start()
        self.finite = inner.finite
        return inner

    def known_lengths(self) -> tuple[int, ...] | None:
        """Return the bytes of all payloads of the current all-gather; see :meth:`Exchange.known_lengths`."""
        if self.level == "from_owner":
            return self._sizes_by_rank()
        return self.inner.known_lengths() if self.inner else None

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Remember payload lengths; see :meth:`Exchange.note_lengths`."""
        if self.level == "between" and self.inner:
            self.inner.note_lengths(lengths)

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
        self._communication.close()

    # -- descriptions for messages --------------------------------------------------------------------------

    def describe_wait(self, count: int = 1) -> str:
        """Describe the collective that this rank waits for; see :meth:`Exchange.describe_wait`."""
        nodes = self.placement.nodes
        node = nodes.node_of(self.placement.rank)
        if self.level == "to_owner":
            return f"the gradients of tensor {self.name!r} of the ranks of node {node}"
        if self.level == "between" and self.inner:
            return self.inner.describe_wait(count)
        owner = nodes.ranks_of_node(node)[self.owner]
        return f"the result of tensor {self.name!r} from rank {owner} of this node"
