"""Fused exchanges: the method runs on each tensor of a bucket, and their payloads are sent in one collective.

Each collective costs a call, a name that ranks agree on, and a message, however small the payload is. The result and
the new state of a tensor are bit-identical to those of an exchange of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hvdcompress.engine.collectives import cut, require_collective
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective, Communication, Reduced
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import dtype_name

#: (name, n, dtype) -> array [n] that is reused from step to step
Buffer = Callable[[str, int, str], Array]


class FusedCommunication:
    """The communications of several tensors under one method, driven like a single one.

    Within a phase the number, kinds and dtypes of a method's collectives are fixed, so the k-th collectives of all
    tensors can be combined into one.

    Args:
        names: names of the tensors.
        group: the ranks that take part.
        ops: the array ops of the gradients' library.
        buffer: returns the array in which payloads are concatenated.

    Attributes:
        current: name of the tensor whose method runs at the moment, for error messages.
    """

    def __init__(self, names: Sequence[str], group: Group, ops: Ops, buffer: Buffer):
        self.names = names
        self.rank, self.world_size = group
        self.ops = ops
        self.buffer = buffer
        self.current = names[0]
        self._communications: dict[int, Communication] = {}  # by index of the tensor
        self._collectives: list[Collective | None] = [None] * len(names)
        self._reduced: list[Reduced | None] = [None] * len(names)
        self._round = 0
        self._concatenated: list[tuple[int, int]] = []  # address ranges of the concatenated payloads

    def begin(self, index: int, communication: Communication) -> None:
        """Run the communication of one tensor to its first collective."""
        self._communications[index] = communication
        self._run(index, None)

    def send(self, result: Any) -> Collective:
        """Distribute the result of a collective (None at first) to all tensors and return the next collective.

        Raises:
            StopIteration: all communications have returned. Its value is the list of their results.
            RuntimeError: the tensors yield different kinds of collectives.
        """
        if self._round:
            for index, part in enumerate(self._parts(result)):
                self._run(index, part)
        # Within a phase all tensors yield equally many collectives, so they also finish in the same round
        left = sum(collective is not None for collective in self._collectives)
        if not left:
            raise StopIteration(self._reduced)
        if left < len(self._collectives):
            self._raise_mismatch()
        self._round += 1
        return self._combined()

    def close(self) -> None:
        """Close all communications."""
        for communication in self._communications.values():
            communication.close()

    # -- inside ---------------------------------------------------------------------------------------------

    def _run(self, index: int, result: Any) -> None:
        self.current = self.names[index]
        try:
            self._collectives[index] = require_collective(self._communications[index].send(result))
        except StopIteration as stop:
            self._collectives[index] = None
            self._reduced[index] = self._detached(stop.value)

    def _concatenate(self, arrays: list[Array]) -> Array:
        dtype = dtype_name(arrays[0])
        out = self.buffer(f"fused.{self._round}.{dtype}", sum(map(len, arrays)), dtype)
        self._concatenated.append(span(out))
        return self.ops.concat(arrays, out)

    def _detached(self, reduced: Reduced) -> Reduced:
        """Copy state out of buffers that the next step overwrites."""
        for slot, array in reduced.state.items():
            start, stop = span(array)
            # A method may keep (a view of) a result as its state, and results are views of the concatenated payloads
            if any(first < stop and start < last for first, last in self._concatenated):
                reduced.state[slot] = array.copy() if isinstance(array, np.ndarray) else array.clone()
        return reduced

    def _combined(self) -> Collective:
        """Combine the current collectives of all tensors into one."""
        collectives: list[Any] = self._collectives
        first, *others = collectives
        if any(_kind(collective) != _kind(first) for collective in others):
            self._raise_mismatch()
        if isinstance(first, Broadcast):
            # A method may spread the work of the root over the ranks, so that the roots of the tensors differ
            if len({int(collective.root) for collective in collectives}) > 1:
                return self._from_several_roots(collectives)
            num_bytes = sum(collective.num_bytes for collective in collectives)
            return Broadcast(
                lambda: self._concatenate([collective.make() for collective in collectives]), first.root, num_bytes
            )
        if isinstance(first, AllReduce):
            # Workspace.buffer places the buffers of neighbouring tensors next to each other, which saves this copy
            x = contiguous_view([collective.x for collective in collectives])
            if x is not None:
                return AllReduce(x, first.op, may_overwrite=all(collective.may_overwrite for collective in collectives))
            return AllReduce(
                self._concatenate([collective.x for collective in collectives]), first.op, may_overwrite=True
            )
        if isinstance(first, AllGather):
            lengths = tuple(len(collective.x) for collective in collectives)
            fixed = all(collective.fixed_length for collective in collectives)
            return AllGather(
                self._concatenate([collective.x for collective in collectives]), fixed_length=fixed, lengths=lengths
            )
        # Order by destination rank, because an all-to-all sends one contiguous piece to each rank
        pieces = [cut(collective.x, self._lengths(collective, collective.splits)) for collective in collectives]
        x = self._concatenate([piece for to_one in zip(*pieces, strict=True) for piece in to_one])
        if first.splits is None:
            return AllToAll(x)
        splits = _sums([collective.splits for collective in collectives])
        if first.receives_unknown:
            return AllToAll(x, splits, tensors=len(collectives))
        return AllToAll(x, splits, _sums([collective.receives for collective in collectives]))

    def _from_several_roots(self, collectives: list[Broadcast]) -> AllReduce:
        """Replace broadcasts from several roots by one sum in which non-root ranks contribute zeros."""
        x = self.buffer(
            f"fused.{self._round}.roots", sum(collective.num_bytes for collective in collectives) // 4, "int32"
        )
        x[:] = 0
        for collective, index in zip(
            collectives, cut(x, [collective.num_bytes // 4 for collective in collectives]), strict=True
        ):
            if int(collective.root) == self.rank:
                self.ops.concat([self.ops.from_bytes(collective.make(), "int32")], index)
        return AllReduce(x, may_overwrite=True)

    def _parts(self, result: Any) -> list[Any]:
        """Split the result of the combined collective by tensor."""
        collectives: list[Any] = self._collectives
        first = collectives[0]
        count = len(collectives)
        if isinstance(first, Broadcast):
            return cut(self.ops.to_bytes(result), [collective.num_bytes for collective in collectives])
        if isinstance(first, AllReduce):
            return cut(result, [len(collective.x) for collective in collectives])
        # The list has one payload per rank and tensor, rank by rank
        if isinstance(first, AllGather) or first.receives_unknown:
            return [result[index::count] for index in range(count)]
        lengths = [self._lengths(collective, collective.receives) for collective in collectives]
        from_ranks = [cut(piece, [each[rank] for each in lengths]) for rank, piece in enumerate(result)]
        return [list(pieces) for pieces in zip(*from_ranks, strict=True)]

    def _lengths(self, collective: AllToAll, given: Sequence[int] | None) -> Sequence[int]:
        return given if given is not None else (len(collective.x) // self.world_size,) * self.world_size

    def _raise_mismatch(self) -> NoReturn:
        kinds = [
            (type(collective).__name__ if collective else "no further collective", name)
            for collective, name in zip(self._collectives, self.names, strict=True)
        ]
        words = ", ".join(f"{kind} for {name!r}" for kind, name in kinds)
        raise RuntimeError(
            f"the tensors of a bucket yield different collectives in round {self._round}: {words}; "
            "set bucket_elements: 0 in the plan to exchange them separately"
        )


def contiguous_view(arrays: Sequence[Any]) -> Array | None:
    """Return adjacent arrays as one array without copying; None if they are not adjacent in memory."""
    first = arrays[0]
    spans = [span(array) for array in arrays]
    is_numpy = isinstance(first, np.ndarray)
    # Adjacent addresses are not enough: separate allocations can be adjacent by chance
    owners = {id(array.base) if is_numpy else array.untyped_storage().data_ptr() for array in arrays}
    if len(owners) > 1 or any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
        return None
    size = sum(map(len, arrays))
    return as_strided(first, (size,)) if is_numpy else first.as_strided((size,), (1,))


def span(array: Any) -> tuple[int, int]:
    """Return the address range (start, stop) of a contiguous vector."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return start, start + array.nbytes


def _kind(collective: Any) -> tuple[Any, ...]:
    """Return the properties in which collectives must agree to be combined."""
    if isinstance(collective, Broadcast):
        return (Broadcast,)
    return (
        type(collective),
        collective.x.dtype,
        getattr(collective, "op", ""),
        getattr(collective, "splits", None) is None,
        getattr(collective, "receives", None) is None,
    )


def _sums(each: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*each, strict=True)))
