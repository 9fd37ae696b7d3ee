"""Several tensors' exchanges as one: each method runs on its own tensor, and their payloads travel together.

A collective costs a call, a name that ranks agree on and a message, however small it is. What a tensor gets and keeps
is the same as alone, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hvdcompress.engine.collectives import cut
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective, Communication, Reduced
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import dtype_name

#: Returns an array [n] of a dtype that is kept from step to step: (name, n, dtype) -> array
Buffer = Callable[[str, int, str], Array]


class FusedCommunication:
    """The communications of several tensors under one method, driven as if they were one.

    Inside a phase the number, kinds and dtypes of a method's collectives are fixed, so each round is one collective.

    Args:
        names: the tensors'.
        group: the ranks that take part.
        ops: the array ops of their library.
        buffer: where payloads are joined.

    Attributes:
        now: the tensor whose method runs, for error messages.
    """

    def __init__(self, names: Sequence[str], group: Group, ops: Ops, buffer: Buffer):
        self.names = names
        self.rank, self.world = group
        self.ops = ops
        self.buffer = buffer
        self.now = names[0]
        self._each: list[Communication | None] = [None] * len(names)
        self._collectives: list[Collective | None] = [None] * len(names)
        self._reduced: list[Reduced | None] = [None] * len(names)
        self._round = 0
        self._joins: list[tuple[int, int]] = []  # where payloads were joined, in memory

    def begin(self, place: int, communication: Communication) -> None:
        """Run a tensor's communication to its first collective."""
        self._each[place] = communication
        self._run(place, None)

    def send(self, result: Any) -> Collective:
        """Hand all of them their parts of a collective's result (None at first); returns the next collective.

        Raises:
            StopIteration: all have returned; its value is the list of their results.
            RuntimeError: they do not ask for the same.
        """
        if self._round:
            for place, part in enumerate(self._parts(result)):
                self._run(place, part)
        left = sum(collective is not None for collective in self._collectives)
        if not left:
            raise StopIteration(self._reduced)
        if left < len(self._collectives):
            self._unlike()
        self._round += 1
        return self._joined()

    def close(self) -> None:
        """End the communications that are under way."""
        for communication in self._each:
            if communication is not None:
                communication.close()

    # -- inside ---------------------------------------------------------------------------------------------

    def _run(self, place: int, result: Any) -> None:
        communication = self._each[place]
        assert communication is not None
        self.now = self.names[place]
        try:
            self._collectives[place] = communication.send(result)
        except StopIteration as stop:
            self._collectives[place] = None
            self._reduced[place] = self._kept(stop.value)

    def _join(self, arrays: list[Array]) -> Array:
        dtype = dtype_name(arrays[0])
        out = self.buffer(f"fused.{self._round}.{dtype}", sum(map(len, arrays)), dtype)
        self._joins.append(span(out))
        return self.ops.concat(arrays, out)

    def _kept(self, reduced: Reduced) -> Reduced:
        """The same, without state in memory that the next step's collectives are written to."""

        def kept(array: Array) -> Array:
            start, stop = span(array)
            if not any(a < stop and start < b for a, b in self._joins):
                return array
            return self.ops.concat([array], self.ops.zeros(len(array), dtype_name(array), array))

        return replace(reduced, state={slot: kept(array) for slot, array in reduced.state.items()})

    def _joined(self) -> Collective:
        """One collective for all."""
        collectives: list[Any] = self._collectives
        first, *others = collectives
        if any(_kind(collective) != _kind(first) for collective in others):
            self._unlike()
        if isinstance(first, Broadcast):
            if len({int(collective.root) for collective in collectives}) > 1:
                return self._from_several_roots(collectives)
            num_bytes = sum(collective.num_bytes for collective in collectives)
            return Broadcast(
                lambda: self._join([collective.make() for collective in collectives]), first.root, num_bytes
            )
        if isinstance(first, AllReduce):
            x = contiguous_view([collective.x for collective in collectives])
            if x is not None:
                return AllReduce(x, first.op, may_overwrite=all(collective.may_overwrite for collective in collectives))
            return AllReduce(self._join([collective.x for collective in collectives]), first.op, may_overwrite=True)
        if isinstance(first, AllGather):
            lengths = tuple(len(collective.x) for collective in collectives)
            fixed = all(collective.fixed_length for collective in collectives)
            return AllGather(
                self._join([collective.x for collective in collectives]), fixed_length=fixed, lengths=lengths
            )
        # what goes to one rank, of all tensors, lies together
        pieces = [cut(collective.x, self._lengths(collective, collective.splits)) for collective in collectives]
        x = self._join([piece for to_one in zip(*pieces, strict=True) for piece in to_one])
        if first.splits is None:
            return AllToAll(x)
        return AllToAll(
            x,
            _sums([collective.splits for collective in collectives]),
            _sums([collective.receives for collective in collectives]),
        )

    def _from_several_roots(self, collectives: list[Broadcast]) -> AllReduce:
        """A sum, to which each rank gives its own payloads, and zeros in the places of the others'."""
        x = self.buffer(
            f"fused.{self._round}.roots", sum(collective.num_bytes for collective in collectives) // 4, "int32"
        )
        self.ops.fill(x, 0)
        for collective, place in zip(
            collectives, cut(x, [collective.num_bytes // 4 for collective in collectives]), strict=True
        ):
            if int(collective.root) == self.rank:
                self.ops.concat([self.ops.from_bytes(collective.make(), "int32")], place)
        return AllReduce(x, may_overwrite=True)

    def _parts(self, result: Any) -> list[Any]:
        """Each tensor's part of the collective's result."""
        collectives: list[Any] = self._collectives
        first = collectives[0]
        count = len(collectives)
        if isinstance(first, Broadcast):
            return cut(self.ops.to_bytes(result), [collective.num_bytes for collective in collectives])
        if isinstance(first, AllReduce):
            return cut(result, [len(collective.x) for collective in collectives])
        if isinstance(first, AllGather):  # a payload per rank and tensor
            return [result[place::count] for place in range(count)]
        lengths = [self._lengths(collective, collective.receives) for collective in collectives]
        from_ranks = [cut(piece, [each[rank] for each in lengths]) for rank, piece in enumerate(result)]
        return [list(pieces) for pieces in zip(*from_ranks, strict=True)]

    def _lengths(self, collective: AllToAll, given: Sequence[int] | None) -> Sequence[int]:
        return given if given is not None else (len(collective.x) // self.world,) * self.world

    def _unlike(self) -> NoReturn:
        kinds = [
            (type(collective).__name__ if collective else "nothing more", name)
            for collective, name in zip(self._collectives, self.names, strict=True)
        ]
        words = ", ".join(f"{kind} for {name!r}" for kind, name in kinds)
        raise RuntimeError(
            f"tensors that are exchanged together ask for different collectives in round {self._round}: {words}; "
            "bucket_elements: 0 keeps them apart"
        )


def contiguous_view(arrays: Sequence[Any]) -> Array | None:
    """The arrays as one, if each lies in memory where the one before it ends; otherwise None."""
    first = arrays[0]
    spans = [span(array) for array in arrays]
    is_numpy = isinstance(first, np.ndarray)
    owners = {id(array.base) if is_numpy else array.untyped_storage().data_ptr() for array in arrays}
    if len(owners) > 1 or any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
        return None
    size = sum(map(len, arrays))
    return as_strided(first, (size,)) if is_numpy else first.as_strided((size,), (1,))


def span(array: Any) -> tuple[int, int]:
    """Where a vector begins and ends in memory."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return start, start + array.nbytes


def _kind(collective: Any) -> tuple[Any, ...]:
    """What collectives must have alike to be one."""
    if isinstance(collective, Broadcast):
        return (Broadcast,)
    return (
        type(collective),
        collective.x.dtype,
        getattr(collective, "op", ""),
        getattr(collective, "splits", None) is None,
    )


def _sums(each: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*each, strict=True)))
