"""Exchanges between ranks of one node through shared memory, for levels inside a node on the CPU.

gloo sends between the ranks of a node by TCP, which costs more processor time than everything else in an exchange with
two levels. Here a rank copies its payload to memory that all ranks of the node have mapped, and gloo only carries a
note of where it is. The receivers read it there.

The memory is anonymous (``memfd_create``) and is opened through ``/proc``, so nothing is left behind if a rank is
killed. Ranks that cannot open each other's memory, because they are in different containers for example, keep to TCP.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.ddp.transport import ProcessGroupTransport
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array

SMALL = 1 << 16  #: bytes; smaller payloads are sent by gloo itself
FIRST = 1 << 24  #: bytes of the first segment


class Note(NamedTuple):
    """Where a payload is: in which segment of which process, from which byte on, and its length."""

    pid: int
    descriptor: int
    size: int  #: bytes of the segment
    start: int
    length: int

    def to_array(self) -> Array:
        """Return the note as bytes, for a collective."""
        return np.array(self, np.int64).view(np.uint8)


NOTE_BYTES = 8 * len(Note._fields)


class Segment:
    """Memory that other processes can map. It is freed once no process has it mapped.

    Args:
        size: bytes.
    """

    def __init__(self, size: int):
        self.size = size
        self._file = os.fdopen(os.memfd_create("hvdcompress"), "r+b")  # closed together with this object
        self._file.truncate(size)
        self.array = np.frombuffer(mmap.mmap(self._file.fileno(), size), np.uint8)

    def offset_of(self, payload: Array) -> int | None:
        """Return at which byte of this memory an array begins; None if it is elsewhere."""
        offset = payload.ctypes.data - self.array.ctypes.data
        return offset if 0 <= offset < self.size else None

    @property
    def descriptor(self) -> int:
        """The file descriptor, through which other processes open the memory."""
        return self._file.fileno()


class SharedMemory:
    """The segments of this rank, and those of the other ranks of its node that it has mapped.

    Payloads of one step follow each other in the segment. The next step begins at its start: by then all ranks have
    read them, because they have sent the last status of the step.
    """

    def __init__(self) -> None:
        self.segment = Segment(FIRST)
        self._old: list[Segment] = []  # segments that were too small for this step
        self._used = 0
        self._mapped: dict[int, tuple[Note, Array]] = {}  # by process: its latest segment

    def begin(self) -> None:
        """Begin a step: the memory may be written again."""
        self._used = 0
        self._old.clear()

    def allocate(self, size: int) -> Array:
        """Return shared memory for this step, uint8 [size]. Its contents are undefined."""
        if self._used + size > self.segment.size:
            self._old.append(self.segment)
            self.segment = Segment(2 * (self.segment.size + size))
            self._used = 0
        start = self._used
        self._used += -(-size // 64) * 64  # what follows is aligned
        return self.segment.array[start : start + size]

    def put(self, payload: Array) -> Note:
        """Copy a payload to shared memory, unless it is there already, and return where it is."""
        segments = (self.segment, *self._old)
        segment = next((each for each in segments if each.offset_of(payload) is not None), None)
        if segment is None:
            copy = self.allocate(len(payload))
            copy[:] = payload
            payload = copy
            segment = self.segment
        offset = segment.offset_of(payload)
        assert offset is not None
        return Note(os.getpid(), segment.descriptor, segment.size, offset, len(payload))

    def get(self, note: Note) -> Array:
        """Return a payload of a rank of this node, as a view of its memory, uint8 [length].

        Raises:
            OSError: this process cannot open the memory.
        """
        if note.pid == os.getpid():
            segments = [self.segment, *self._old]
            own = next(each for each in segments if each.descriptor == note.descriptor)
            return own.array[note.start : note.start + note.length]
        known = self._mapped.get(note.pid)
        if known is None or known[0][:3] != note[:3]:
            with open(f"/proc/{note.pid}/fd/{note.descriptor}", "r+b") as file:
                memory = mmap.mmap(file.fileno(), note.size)
            known = self._mapped[note.pid] = note, np.frombuffer(memory, np.uint8)
        return known[1][note.start : note.start + note.length]


class Handle(NamedTuple):
    """A collective in flight: the one that carries the notes, and what is to be received."""

    notes: Any
    request: Request


class NodeTransport:
    """Collectives between the ranks of a node: payloads through shared memory, notes and small payloads over gloo.

    Args:
        inner: the transport of these ranks.
        memory: the shared memory of this rank.
    """

    ordered = True
    native_broadcast = False
    variable_lengths = False

    def __init__(self, inner: ProcessGroupTransport, memory: SharedMemory):
        self.inner = inner
        self.memory = memory
        self.rank = inner.rank
        self.world_size = inner.world_size

    def start(self, name: str, request: Request) -> Any:
        """Start a collective; return without waiting for it."""
        lengths = (request.send_lengths or ()) + (request.recv_lengths or ())
        # All ranks must choose alike. Payloads of a bucket are all empty or of one length, which all ranks know
        if request.kind == "all_reduce" or max(lengths) < SMALL or not isinstance(request.payload, np.ndarray):
            return self.inner.start(name, request)
        note = self.memory.put(request.payload) if len(request.payload) else Note(0, 0, 0, 0, 0)
        notes = Request("all_gather", note.to_array(), recv_lengths=(NOTE_BYTES,) * self.world_size)
        return Handle(self.inner.start(name, notes), request)

    def ready(self, handle: Any) -> bool:
        """Return whether the result is available (:meth:`wait` would not block)."""
        return self.inner.ready(handle.notes if isinstance(handle, Handle) else handle)

    def wait(self, handle: Any) -> Array | list[Array]:
        """Wait for a collective; return its result, or a list of the pieces in shared memory, in rank order.

        Raises:
            Alarm: a rank has failed in this step.
            PeerLost: the process group has failed.
        """
        if not isinstance(handle, Handle):
            return self.inner.wait(handle)
        rows = self.inner.wait(handle.notes).view(np.int64).reshape(self.world_size, -1)
        notes = [Note(*row) for row in rows.tolist()]
        expected = handle.request.recv_lengths or ()
        nothing = np.empty(0, np.uint8)
        return [self.memory.get(note) if size else nothing for note, size in zip(notes, expected, strict=True)]

    def idle(self, handle: Any) -> None:
        """Sleep for one poll interval."""
        self.inner.idle(handle.notes if isinstance(handle, Handle) else handle)


def share_memory(transport: ProcessGroupTransport) -> SharedMemory | None:
    """Return shared memory for the ranks of a node; None if they cannot map each other's. Collective.

    Args:
        transport: a transport of these ranks.
    """
    memory = SharedMemory()
    word = np.array([os.getpid()], np.int64).view(np.uint8)
    note = memory.put(word)
    request = Request("all_gather", note.to_array(), recv_lengths=(NOTE_BYTES,) * transport.world_size)
    rows = transport.wait(transport.start("memory", request)).view(np.int64).reshape(transport.world_size, -1)
    try:
        notes = [Note(*row) for row in rows.tolist()]
        works = all(memory.get(each).view(np.int64)[0] == each.pid for each in notes)
    except (OSError, ValueError):  # another container, another user, or no such memory
        works = False
    verdict = transport.start("memory", Request("all_reduce", np.array([float(not works)]), "max"))
    if transport.wait(verdict)[0]:
        return None
    return memory
