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
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Communication, Reduced, Verb
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import dtype_name

#: Returns an array [n] of a dtype that is kept from step to step: (name, n, dtype) -> array
Buffer = Callable[[str, int, str], Array]


class Together:
    """The communications of several tensors under one method, driven as if they were one.

    Inside a phase the number, verbs and dtypes of a method's collectives are fixed, so each round is one verb.

    Args:
        names: the tensors'.
        group: the ranks that take part.
        ops: the array verbs of their library.
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
        self._verbs: list[Verb | None] = [None] * len(names)
        self._reduced: list[Reduced | None] = [None] * len(names)
        self._round = 0
        self._joins: list[tuple[int, int]] = []  # where payloads were joined, in memory

    def begin(self, place: int, communication: Communication) -> None:
        """Run a tensor's communication to its first verb."""
        self._each[place] = communication
        self._run(place, None)

    def send(self, result: Any) -> Verb:
        """Hand all of them their parts of a collective's result (None at first); returns the next collective.

        Raises:
            StopIteration: all have returned; its value is the list of their results.
            RuntimeError: they do not ask for the same.
        """
        if self._round:
            for place, part in enumerate(self._parts(result)):
                self._run(place, part)
        left = sum(verb is not None for verb in self._verbs)
        if not left:
            raise StopIteration(self._reduced)
        if left < len(self._verbs):
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
            self._verbs[place] = communication.send(result)
        except StopIteration as stop:
            self._verbs[place] = None
            self._reduced[place] = self._kept(stop.value)

    def _join(self, arrays: list[Array]) -> Array:
        dtype = dtype_name(arrays[0])
        out = self.buffer(f"together.{self._round}.{dtype}", sum(map(len, arrays)), dtype)
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

    def _joined(self) -> Verb:
        """One verb for all."""
        verbs: list[Any] = self._verbs
        first, *others = verbs
        if any(_kind(verb) != _kind(first) for verb in others):
            self._unlike()
        if isinstance(first, Broadcast):
            if len({int(verb.root) for verb in verbs}) > 1:
                return self._from_several_roots(verbs)
            num_bytes = sum(verb.num_bytes for verb in verbs)
            return Broadcast(lambda: self._join([verb.make() for verb in verbs]), first.root, num_bytes)
        if isinstance(first, AllReduce):
            x = end_to_end([verb.x for verb in verbs])
            if x is not None:
                return AllReduce(x, first.op, spent=all(verb.spent for verb in verbs))
            return AllReduce(self._join([verb.x for verb in verbs]), first.op, spent=True)
        if isinstance(first, AllGather):
            lengths = tuple(len(verb.x) for verb in verbs)
            fixed = all(verb.fixed for verb in verbs)
            return AllGather(self._join([verb.x for verb in verbs]), fixed=fixed, lengths=lengths)
        # what goes to one rank, of all tensors, lies together
        pieces = [cut(verb.x, self._lengths(verb, verb.splits)) for verb in verbs]
        x = self._join([piece for to_one in zip(*pieces, strict=True) for piece in to_one])
        if first.splits is None:
            return AllToAll(x)
        return AllToAll(x, _sums([verb.splits for verb in verbs]), _sums([verb.receives for verb in verbs]))

    def _from_several_roots(self, verbs: list[Broadcast]) -> AllReduce:
        """A sum, to which each rank gives its own payloads, and zeros in the places of the others'."""
        x = self.buffer(f"together.{self._round}.roots", sum(verb.num_bytes for verb in verbs) // 4, "int32")
        self.ops.fill(x, 0)
        for verb, place in zip(verbs, cut(x, [verb.num_bytes // 4 for verb in verbs]), strict=True):
            if int(verb.root) == self.rank:
                self.ops.concat([self.ops.from_bytes(verb.make(), "int32")], place)
        return AllReduce(x, spent=True)

    def _parts(self, result: Any) -> list[Any]:
        """Each tensor's part of the collective's result."""
        verbs: list[Any] = self._verbs
        first = verbs[0]
        count = len(verbs)
        if isinstance(first, Broadcast):
            return cut(self.ops.to_bytes(result), [verb.num_bytes for verb in verbs])
        if isinstance(first, AllReduce):
            return cut(result, [len(verb.x) for verb in verbs])
        if isinstance(first, AllGather):  # a payload per rank and tensor
            return [result[place::count] for place in range(count)]
        lengths = [self._lengths(verb, verb.receives) for verb in verbs]
        from_ranks = [cut(piece, [each[rank] for each in lengths]) for rank, piece in enumerate(result)]
        return [list(pieces) for pieces in zip(*from_ranks, strict=True)]

    def _lengths(self, verb: AllToAll, given: Sequence[int] | None) -> Sequence[int]:
        return given if given is not None else (len(verb.x) // self.world,) * self.world

    def _unlike(self) -> NoReturn:
        kinds = [
            (type(verb).__name__ if verb else "nothing more", name)
            for verb, name in zip(self._verbs, self.names, strict=True)
        ]
        words = ", ".join(f"{kind} for {name!r}" for kind, name in kinds)
        raise RuntimeError(
            f"tensors that are exchanged together ask for different collectives in round {self._round}: {words}; "
            "bucket_elements: 0 keeps them apart"
        )


def end_to_end(arrays: Sequence[Any]) -> Array | None:
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


def _kind(verb: Any) -> tuple[Any, ...]:
    """What verbs must have alike to be one."""
    if isinstance(verb, Broadcast):
        return (Broadcast,)
    return type(verb), verb.x.dtype, getattr(verb, "op", ""), getattr(verb, "splits", None) is None


def _sums(each: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*each, strict=True)))
