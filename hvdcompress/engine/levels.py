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

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.collectives import Collectives, Pending
from hvdcompress.engine.exchange import Exchange, Stage, check_gradient, describe_missing
from hvdcompress.engine.late import Late, nonzero
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.transport import Transport
from hvdcompress.method import AllGather, AllToAll, Array, Collective, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag, dtype_name
from hvdcompress.parts import momentum
from hvdcompress.plan import Bucket

Level = Literal["to_owner", "between", "from_owner"]


@dataclass(frozen=True)
class Levels:
    """The collectives of one rank, by the ranks that take part.

    Attributes:
        world: all ranks: statuses and errors.
        to_owner: the ranks of this node: gradients.
        between: the ranks with the same local rank on all nodes.
        from_owner: the ranks of this node: results. They have collectives of their own, because on ordered networks
            results and gradients must not wait for each other.
    """

    world: Collectives
    to_owner: Collectives
    between: Collectives
    from_owner: Collectives

    @classmethod
    def over(cls, world: Transport, parts: Sequence[Transport], observers: Sequence[Observer]) -> Levels:
        """Return the collectives over transports of all ranks, to the owner, between nodes, and from the owner."""
        to_owner, between, from_owner = parts
        return cls(
            Collectives(world, observers),
            Collectives(to_owner, observers, world.rank, inside_node=True),
            Collectives(between, observers, world.rank),
            Collectives(from_owner, observers, world.rank, inside_node=True),
        )


class NodeExchange:
    """One bucket in one step, with two levels.

    Args:
        rank_state: this rank's state; its placement says which rank owns the bucket.
        levels: the collectives of this rank.
        bucket: the bucket.
        like: an array on the gradients' device, in the working dtype.
        ops: the array ops of the gradients' library.
        loss_scale: the factor by which the loss was multiplied.

    Attributes:
        name, outs, stage, pending, late: as for :class:`Exchange`.
        level: the level of the current collective.
        inner: the exchange between nodes; None on the other ranks of the node, and until the sum is there.
        begun_in: ``RankState.round`` at the beginning of the exchange.
    """

    def __init__(
        self, rank_state: RankState, levels: Levels, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0
    ):
        assert rank_state.placement is not None
        self.rank_state = rank_state
        self.levels = levels
        self.bucket = bucket
        self.like = like
        self.ops = ops
        self.loss_scale = loss_scale
        self.name = bucket.spec.name
        self.stage = Stage.FILLING
        self.level: Level = "to_owner"
        self.outs: list[Any] = [None] * len(bucket.members)
        self.pending: Pending | None = None
        self.late: Late | None = None
        self.inner: Exchange | None = None
        self.owner = rank_state.placement.owner(bucket)
        self.is_owned = rank_state.placement.owns(bucket)
        self.next_step = rank_state.next_step(bucket)
        self.begun_in = rank_state.round
        self._collective: Collective | None = None  # inside the node
        self._missing = set(range(len(bucket.members)))
        self._vector: Array | None = None

    @property
    def dtype(self) -> str:
        """Dtype of the computation."""
        return self.next_step.dtype

    @property
    def vector(self) -> Array:
        """The gradients of this rank, and later the result, in the order of the bucket's tensors [n]."""
        if self._vector is None:
            work = Workspace(self.ops, self.rank_state.memory_of(self.name).scratch)
            self._vector = work.buffer("node", self.bucket.spec.size, dtype_name(self.like), self.like)
        return self._vector

    def _parts(self, vector: Array) -> list[Array]:
        return [vector[start:stop] for start, stop in self.bucket.spans]

    # -- the gradients --------------------------------------------------------------------------------------

    def add(self, indices: Sequence[int], gradients: Sequence[Array], outs: Sequence[Any] | None = None) -> None:
        """Add gradients; see :meth:`Exchange.add`.

        Raises:
            ValueError: a gradient does not have the size of its tensor, or the tensor already has a gradient.
        """
        for index, gradient in zip(indices, gradients, strict=True):
            check_gradient(self.bucket.members[index], gradient, index not in self._missing)
        if len(self.bucket.members) == 1:
            # The result may overwrite the gradient, or is written to ``outs`` anyway, so no other buffer is needed
            (vector,) = gradients if outs is None else outs
            if vector.dtype == self.like.dtype:
                self._vector = vector
        for index, gradient, out in zip(indices, gradients, gradients if outs is None else outs, strict=True):
            self.outs[index] = out
            self._missing.discard(index)
            if self._vector is not gradient:
                start, stop = self.bucket.spans[index]
                self.ops.write(self.vector[start:stop], gradient, 1.0)

    @property
    def is_full(self) -> bool:
        """Whether all gradients have been added."""
        return not self._missing

    @property
    def finite(self) -> Flag:
        """Whether the sum is free of Inf and NaN. Only its owner knows."""
        return self.inner.finite if self.inner else True

    def fill_missing(self) -> None:
        """Add zeros for the tensors that have no gradient on this rank."""
        missing = sorted(self._missing)
        zeros = [self.ops.zeros(self.bucket.members[index].size, dtype_name(self.like), self.like) for index in missing]
        self.add(missing, zeros)

    # -- the collectives ------------------------------------------------------------------------------------

    @property
    def collective(self) -> Collective | None:
        """The collective whose result is needed next; None if the exchange waits for :meth:`deliver`, or is done."""
        return self.inner.collective if self.inner and self.level == "between" else self._collective

    @property
    def round(self) -> int:
        """The index of the collective at its level."""
        return self.inner.round if self.inner and self.level == "between" else 0

    @property
    def x(self) -> Array:
        """An array on the device of the payloads."""
        return self.like

    def start(self) -> None:
        """Start sending the gradients to the owner."""
        if not self.is_full:
            raise RuntimeError(self.describe_missing())
        self.stage = Stage.RUNNING
        num_bytes = int(self.vector.nbytes)
        nothing = (0,) * self.levels.to_owner.world_size
        owners = tuple(num_bytes * (rank == self.owner) for rank in range(len(nothing)))
        if self.is_owned:
            others = tuple(num_bytes - each for each in owners)
            self._collective = AllToAll(self.ops.to_bytes(self.vector[:0]), nothing, others)
        else:
            self._collective = AllToAll(self.ops.to_bytes(self.vector), owners, nothing)

    def known_lengths(self) -> tuple[int, ...] | None:
        """Return the bytes of all payloads of the current all-gather; see :meth:`Exchange.known_lengths`."""
        if self.level == "between":
            return self.inner.known_lengths() if self.inner else None
        num_bytes = int(self.vector.nbytes)
        return tuple(num_bytes * (rank == self.owner) for rank in range(self.levels.from_owner.world_size))

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
            self.stage = self.inner.stage
        return self.collective

    def _begin_between(self, pieces: Sequence[Array]) -> None:
        """Add the gradients of the node, and start to exchange the sum with the other nodes."""
        vector = self.vector
        gradients = [
            vector if rank == self.owner else self.ops.from_bytes(piece, dtype_name(vector))
            for rank, piece in enumerate(pieces)
        ]
        total = self.ops.add_all(gradients, into_first=True)
        group = self.levels.between.group
        self.inner = Exchange(Setup(self.rank_state, group, self.bucket, self.like, self.ops, self.loss_scale))
        self.level = "between"
        self.inner.add(range(len(self.outs)), self._parts(total), self._parts(vector))
        self.inner.start()
        self.stage = self.inner.stage

    def deliver(self, factor: float) -> None:
        """On the owner, write the result, and prepare to send it to the other ranks of the node."""
        assert self.inner is not None
        self.inner.deliver(factor)
        self._return_result()

    def _return_result(self) -> None:
        self.stage = Stage.RUNNING
        self.level = "from_owner"
        self._collective = AllGather(self.ops.to_bytes(self.vector if self.is_owned else self.vector[:0]))

    def _take_result(self, pieces: Sequence[Array]) -> None:
        """Write the result to :attr:`outs`."""
        if not self.is_owned:
            self._vector = self.ops.from_bytes(pieces[self.owner], dtype_name(self.vector))
        for out, part in zip(self.outs, self._parts(self.vector), strict=True):
            if out is not part and out is not self.vector:
                self.ops.write(out, part, 1.0)
        self._collective = None
        self.stage = Stage.DELIVERED

    # -- the commit -----------------------------------------------------------------------------------------

    @property
    def state(self) -> BucketState:
        """The state before the step. On other ranks than the owner it has only the progress of the bucket."""
        return self.inner.state if self.inner else self.next_step.state or BucketState(self.bucket, {})

    def new_state(self, before: BucketState, unused: Collection[str] = ()) -> BucketState:
        """Return the state after this step; see :meth:`Exchange.new_state`."""
        # All ranks of a node must find the same elements, and only the owner knows the indices of the method
        method = self.next_step.method
        sent = nonzero(self.vector) if method.sparse and momentum.adapts(method) else None
        if self.inner:
            new = self.inner.new_state(before, unused, sent)
            self.late = self.inner.late
            return new
        new, self.late = self.rank_state.progressed(self.next_step, before, unused, self.ops, sent)
        return new

    def close(self) -> None:
        """End the exchange after the commit."""
        if self.inner:
            self.inner.close()
        else:
            self.rank_state.note_committed(self.name)
        self.stage = Stage.CLOSED

    def abandon(self, fill: bool = False) -> None:
        """End the exchange without effect; see :meth:`Exchange.abandon`."""
        if self.inner:
            self.inner.abandon()
        self.stage = Stage.CLOSED
        for out in self.outs if fill else ():
            out[:] = float("nan")

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

    def describe_missing(self) -> str:
        """Name the gradients that have not been added."""
        return describe_missing(self.bucket, sorted(self._missing))
