"""One step with two levels: uncompressed inside a node, compressed between nodes.

Each bucket takes this way, and different buckets overlap::

    to the owner      the other ranks of the node send their gradients to the bucket's owner, which adds them up
    between nodes     the owners of the bucket on all nodes exchange the sums, as any one-level step does
    from the owner    the owner sends the result to the other ranks of its node

The sum is made in the order of ranks, so every driver and the loopback get the same bits.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcompress.engine.agreement import SharedConfig
from hvdcompress.engine.bucket_state import Memory
from hvdcompress.engine.collectives import Collectives, Pending
from hvdcompress.engine.exchange import Exchange, check_gradient, describe_missing
from hvdcompress.engine.late import nonzero
from hvdcompress.engine.nodes import Placement
from hvdcompress.engine.safety import verify
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import IGNORE_FLOAT_WARNINGS, Agree, Framework, Step
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.transport import Transport
from hvdcompress.method import AllGather, AllToAll, Array, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.parts import momentum
from hvdcompress.plan import Bucket


@dataclass(frozen=True)
class Levels:
    """The collectives of one rank, by the ranks that take part.

    Attributes:
        world: all ranks: statuses and errors.
        to_owner: the ranks of this node: gradients.
        between: the ranks with the same local rank on all nodes.
        from_owner: the ranks of this node: results. They have collectives of their own, because on ordered networks
            results and gradients must not wait for each other.
        allocate: returns memory that the ranks of this node share, uint8 of a number of bytes, for one step; None if
            there is none.
    """

    world: Collectives
    to_owner: Collectives
    between: Collectives
    from_owner: Collectives
    allocate: Callable[[int], Array] | None = None

    @classmethod
    def over(
        cls,
        world: Transport,
        parts: Sequence[Transport],
        observers: Sequence[Observer],
        allocate: Callable[[int], Array] | None = None,
    ) -> Levels:
        """Return the collectives over transports of all ranks, to the owner, between nodes, and from the owner."""
        to_owner, between, from_owner = parts
        return cls(
            Collectives(world, observers),
            Collectives(to_owner, observers, world.rank, inside_node=True),
            Collectives(between, observers, world.rank),
            Collectives(from_owner, observers, world.rank, inside_node=True),
            allocate,
        )


class NodeBucket:
    """A bucket of one step inside a node: its gradients on the way to the owner, and the result on the way back.

    Args:
        bucket: the bucket.
        owner: the local rank of its owner.
        levels: the collectives of this rank.
        memory: the reused buffers of the bucket.
        ops: the array ops of the gradients' library.
        like: an array on the gradients' device, in the working dtype.

    Attributes:
        name: the name of the bucket.
        outs: flat arrays that receive the results, one per tensor.
        pending: the collective in flight, or None.
        is_delivered: on the owner, whether the result is in :attr:`vector`.
        result: the result [n], after :meth:`receive_result`.
    """

    def __init__(self, bucket: Bucket, owner: int, levels: Levels, memory: Memory, ops: Ops, like: Array):
        self.bucket = bucket
        self.name = bucket.spec.name
        self.owner = owner
        self.levels = levels
        self.memory = memory
        self.ops = ops
        self.like = like
        self.outs: list[Any] = [None] * len(bucket.members)
        self.network = levels.to_owner  # of the collective in flight, or of the next one
        self.pending: Pending | None = None
        self.is_delivered = False
        self.result: Any = None
        self._missing = set(range(len(bucket.members)))
        self._vector: Array | None = None

    @property
    def is_owned(self) -> bool:
        """Whether this rank owns the bucket."""
        return self.owner == self.network.group.rank

    @property
    def vector(self) -> Array:
        """The gradients of this rank, and later the result, in the order of the bucket's tensors [n]."""
        if self._vector is None:
            size = self.bucket.spec.size
            dtype = dtype_name(self.like)
            if self.levels.allocate:
                self._vector = self.levels.allocate(size * np.dtype(dtype).itemsize).view(dtype)
            else:
                self._vector = Workspace(self.ops, self.memory.scratch).buffer("node", size, dtype, self.like)
        return self._vector

    def parts(self, vector: Array) -> list[Array]:
        """Return the views of the bucket's tensors in a vector."""
        return [vector[start:stop] for start, stop in self.bucket.spans]

    def add(self, indices: Sequence[int], gradients: Sequence[Array], outs: Sequence[Any] | None) -> None:
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

    def fill_missing(self) -> None:
        """Add zeros for the tensors that have no gradient on this rank."""
        for index in sorted(self._missing):
            size = self.bucket.members[index].size
            zeros = self.ops.zeros(size, dtype_name(self.like), self.like)
            self.add([index], [zeros], [zeros])

    def describe_missing(self) -> str:
        """Name the gradients that have not been added."""
        return describe_missing(self.bucket, sorted(self._missing))

    # -- to the owner ---------------------------------------------------------------------------------------

    def send_to_owner(self) -> None:
        """Start sending the gradients to the owner."""
        num_bytes = int(self.vector.nbytes)
        ranks = range(self.network.world_size)
        if self.is_owned:
            payload = self.vector[:0]
            splits = (0,) * len(ranks)
            receives = tuple(0 if rank == self.owner else num_bytes for rank in ranks)
        else:
            payload = self.vector
            splits = tuple(num_bytes if rank == self.owner else 0 for rank in ranks)
            receives = (0,) * len(ranks)
        collective = AllToAll(self.ops.to_bytes(payload), splits, receives)
        self.pending = self.network.start(self.name, 0, collective, self.ops, self.like)

    def receive_sum(self) -> Array | None:
        """Wait until the gradients have arrived at the owner.

        Returns:
            On the owner, the sum over the ranks of the node [n]; otherwise None.
        """
        pieces = self._wait()
        if not self.is_owned:
            return None
        dtype = dtype_name(self.vector)
        gradients = [
            self.vector if rank == self.owner else self.ops.from_bytes(piece, dtype)
            for rank, piece in enumerate(pieces)
        ]
        return self.ops.add_all(gradients, into_first=True)

    # -- from the owner -------------------------------------------------------------------------------------

    def send_result(self) -> None:
        """Start sending the result from the owner to the other ranks."""
        self.network = self.levels.from_owner
        payload = self.ops.to_bytes(self.vector if self.is_owned else self.vector[:0])
        num_bytes = int(self.vector.nbytes)
        lengths = tuple(num_bytes if rank == self.owner else 0 for rank in range(self.network.world_size))
        self.pending = self.network.start(self.name, 0, AllGather(payload), self.ops, self.like, lengths)

    def receive_result(self) -> None:
        """Wait for the result, and write it to :attr:`outs`."""
        result = self._wait()[self.owner]
        dtype = dtype_name(self.vector)
        vector = self.vector if self.is_owned else self.ops.from_bytes(result, dtype)
        self.result = vector
        parts = self.parts(vector)
        for out, part in zip(self.outs, parts, strict=True):
            if out is not part and out is not vector:
                self.ops.write(out, part, 1.0)

    def _wait(self) -> Any:
        assert self.pending is not None
        self.network.advance(self.pending)
        result = self.network.result(self.pending)
        self.pending = None
        return result


class NodeStep(Step):
    """A step with two levels. Its exchanges are those of the buckets that this rank owns.

    Args:
        local: the state of this rank; its ``placement`` says which rank owns a bucket.
        levels: the collectives of this rank.
        config: plan and tensors, which must be equal on all ranks.
        agree: when the ranks agree; None if the driver compares the status itself.
        framework: the functions of the driver's framework.

    Attributes:
        node_buckets: {bucket name: bucket inside the node}, of all buckets.
    """

    def __init__(
        self,
        local: RankState,
        levels: Levels,
        config: SharedConfig,
        agree: Agree | None = None,
        framework: Framework = Framework(),  # noqa: B008  (it has no state)
    ):
        super().__init__(local, levels.world, config, agree, framework)
        assert local.placement is not None
        self.placement: Placement = local.placement
        self._agrees_again = agree is Agree.BEFORE_WAITING
        self.network = levels.between
        self.levels = levels
        self.node_buckets: dict[str, NodeBucket] = {}
        self._to_owner: deque[NodeBucket] = deque()  # with gradients in flight to the owner, oldest first
        self._to_return: deque[NodeBucket] = deque()  # whose result is not on its way yet, in the order of their start
        self._from_owner: deque[NodeBucket] = deque()  # with a result in flight

    # -- adding gradients -----------------------------------------------------------------------------------

    @IGNORE_FLOAT_WARNINGS
    def add(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        gradients: Sequence[Array],
        outs: Sequence[Any] | None = None,
        may_carry: bool = False,
    ) -> Exchange | None:
        """Add gradients of a bucket. The last one sends them to the owner of the bucket.

        Args and Raises are those of :meth:`Step.add`. ``may_carry`` has no effect.

        Returns:
            None.
        """
        name = bucket.spec.name
        node_bucket = self.node_buckets.get(name)
        if node_bucket is None:
            like = gradients[0]
            node_bucket = self.node_buckets[name] = NodeBucket(
                bucket,
                self.placement.owner(bucket),
                self.levels,
                self.rank_state.memory_of(name),
                self.framework.ops(like),
                like,
            )
        node_bucket.add(indices, gradients, outs)
        if node_bucket.is_full:
            self._start_node_bucket(node_bucket)
        return None

    def _start_node_bucket(self, node_bucket: NodeBucket) -> None:
        if self.agree is Agree.FIRST_AND_LAST:
            self.receive_status()
        node_bucket.send_to_owner()
        self._to_owner.append(node_bucket)
        self._to_return.append(node_bucket)
        if not node_bucket.is_owned:
            self.followed.append(self.rank_state.follow(node_bucket.bucket))

    @IGNORE_FLOAT_WARNINGS
    def fill_missing(self) -> None:
        """Start the buckets that have only some of their gradients. Missing gradients count as zeros."""
        for _, node_bucket in sorted(self.node_buckets.items()):
            if not node_bucket.is_full:
                node_bucket.fill_missing()
                self._start_node_bucket(node_bucket)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Context manager for adding gradients; see :meth:`Step.batch`.

        On exit, earlier batches have arrived at their owners, and the exchanges between nodes have begun.
        """
        before = len(self._to_owner)
        with super().batch():
            yield
            self._receive_sums(before)
        self.send_results()

    @property
    def has_begun(self) -> bool:
        """Whether a gradient was added."""
        return bool(self.node_buckets)

    @property
    def is_busy(self) -> bool:
        """Whether a collective of a tensor is in flight."""
        return super().is_busy or bool(self._to_owner or self._from_owner)

    def waits_for(self) -> str:
        """Describe the collective that this rank waits for. The watchdog's thread calls it."""
        local_ranks = self.placement.nodes.ranks_of_node(self.placement.node)
        for waiting in list(self._to_owner):
            return f"the gradients of tensor {waiting.name!r} of the ranks of node {self.placement.node}"
        if self._in_flight:
            return super().waits_for()
        for waiting in [*self._from_owner, *self._to_return]:
            return f"the result of tensor {waiting.name!r} from rank {local_ranks[waiting.owner]} of this node"
        return super().waits_for()

    # -- the ranks agree ------------------------------------------------------------------------------------

    def _checksums_of_all(self) -> dict[str, int]:
        """Return nothing: each rank of a node has the state of other tensors, so checksums are compared later."""
        return {}

    def receive_status(self) -> None:
        """Wait for the reduced status and apply it; see :meth:`Step.receive_status`. Then compare checksums."""
        is_first = self._first_status is not None
        super().receive_status()
        # Only now is it certain that all ranks are at the same step, and so compare in the same one
        if is_first and self.rank_state.verifies():
            texts = self.collectives.gather_text("verify", json.dumps(self.checksums))
            local_size = self.placement.nodes.local_size
            verify.compare([json.loads(text) for text in texts], self.rank_state.steps_done(), local_size)

    # -- the levels -----------------------------------------------------------------------------------------

    def _receive_sums(self, count: int) -> None:
        """Wait for the ``count`` oldest sums, in order, and start their exchanges between nodes."""
        for _ in range(count):
            self._receive_sum(self._to_owner.popleft())

    def _receive_sum(self, node_bucket: NodeBucket) -> None:
        total = node_bucket.receive_sum()
        if total is None:
            return
        members = range(len(node_bucket.bucket.members))
        results = node_bucket.parts(node_bucket.vector)
        super().add(node_bucket.bucket, members, node_bucket.parts(total), results)

    def _deliver(self, exchange: Exchange, factor: float) -> None:
        super()._deliver(exchange, factor)
        self.node_buckets[exchange.name].is_delivered = True

    def send_results(self) -> None:
        """Start sending the results that are available, in the order in which all ranks of the node started them."""
        while self._to_return:
            oldest = self._to_return[0]
            if oldest.pending or (oldest.is_owned and not oldest.is_delivered):
                return
            self._to_return.popleft()
            oldest.send_result()
            self._from_owner.append(oldest)

    def receive_results(self) -> None:
        """Wait for all results of the other ranks of the node."""
        while self._from_owner:
            self._from_owner.popleft().receive_result()

    @IGNORE_FLOAT_WARNINGS
    def advance_ready(self) -> None:
        """Take the results of collectives that are done, oldest first, without waiting."""
        while self._to_owner and self._is_done(self.levels.to_owner, self._to_owner[0]):
            self._receive_sums(1)
        super().advance_ready()
        self.send_results()
        while self._from_owner and self._is_done(self.levels.from_owner, self._from_owner[0]):
            self._from_owner.popleft().receive_result()

    @staticmethod
    def _is_done(group: Collectives, node_bucket: NodeBucket) -> bool:
        return node_bucket.pending is not None and group.ready(node_bucket.pending)

    def _advance_any(self) -> None:
        for number, node_bucket in enumerate(self._to_owner):
            if self._is_done(self.levels.to_owner, node_bucket):
                del self._to_owner[number]
                self._receive_sum(node_bucket)
                break
        else:
            super()._advance_any()
        self.send_results()

    def _drain(self) -> None:
        """Wait for all levels of all buckets."""
        while self._to_owner or self._in_flight:
            if self.network.ordered:
                self._receive_sums(len(self._to_owner))
                self._advance_oldest(len(self._in_flight))
                self.send_results()
            else:
                self._advance_any()
        self._deliver_done()
        self.send_results()
        self.receive_results()

    def _refuse_missing(self) -> None:
        for node_bucket in self.node_buckets.values():
            if not node_bucket.is_full:
                raise RuntimeError(f"{node_bucket.describe_missing()}; add them, or call fill_missing()")
        super()._refuse_missing()

    @IGNORE_FLOAT_WARNINGS
    def finish(self) -> None:
        """Complete all exchanges, then keep or discard the new state; see :meth:`Step.finish`."""
        if self.agree is Agree.BEFORE_WAITING:
            # The owners see only now whether the sums are finite, and run the methods. So the ranks agree again
            self._wait_for_status()
            with self.defer_errors:
                self._receive_sums(len(self._to_owner))
            self._agrees_again = False
            self.send_status()
        super().finish()

    # -- the end --------------------------------------------------------------------------------------------

    def _sent(self) -> dict[str, tuple[Ops, Array]]:
        # All ranks of a node must find the same elements, and only the owner knows the indices of the method
        found = {}
        for name, each in self.node_buckets.items():
            method = self.rank_state.next_step(each.bucket).method
            if method.sparse and momentum.adapts(method):
                found[name] = each.ops, nonzero(each.result)
        return found

    @IGNORE_FLOAT_WARNINGS
    def close(self) -> None:
        """Commit the step; see :meth:`Step.close`."""
        super().close()
        for node_bucket in self.node_buckets.values():
            for out in () if self.finite else node_bucket.outs:
                node_bucket.ops.fill(out, float("nan"))
            self.framework.store(node_bucket.name)

    def abandon(self) -> None:
        """Undo a failed step: states stay as they were."""
        super().abandon()
        for node_bucket in self.node_buckets.values():
            node_bucket.memory.clear_scratch()


def new_step(
    local: RankState,
    network: Collectives | Levels,
    config: SharedConfig,
    agree: Agree | None = None,
    framework: Framework = Framework(),  # noqa: B008  (it has no state)
) -> Step:
    """Return a step with one level or with two; see :class:`Step` for the arguments.

    Args:
        local: the state of this rank.
        network: the collectives of this rank.
        config: plan and tensors, which must be equal on all ranks.
        agree: when the ranks agree; None if the driver compares the status itself.
        framework: the functions of the driver's framework.
    """
    if isinstance(network, Levels):
        return NodeStep(local, network, config, agree, framework)
    return Step(local, network, config, agree, framework)
