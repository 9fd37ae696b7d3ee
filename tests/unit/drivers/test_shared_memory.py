"""Shared memory between the ranks of a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from hvdcompress.ddp import shared_memory
from hvdcompress.ddp.shared_memory import Note, SharedMemory

READ = """
import sys
from hvdcompress.ddp.shared_memory import Note, SharedMemory
memory = SharedMemory()
for line in sys.stdin:
    print(memory.get(Note(*map(int, line.split()))).tobytes().hex(), flush=True)
"""


class Reader:
    """Another process, which reads payloads."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def get(self, note: Note) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*note, file=self.process.stdin, flush=True)
        return bytes.fromhex(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=60)


def test_another_process_reads_what_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the memory has grown, and in a later step that uses the same memory again."""
    monkeypatch.setattr(shared_memory, "FIRST", 256)
    memory = SharedMemory()
    reader = Reader()
    random = np.random.default_rng(0)
    for _ in range(3):
        memory.begin()
        payloads = [random.integers(0, 256, size, np.uint8) for size in (100, 1, 200, 1000, 64)]
        notes = [memory.put(payload) for payload in payloads]
        for note, payload in zip(notes, payloads, strict=True):
            assert reader.get(note) == payload.tobytes()
            assert memory.get(note).tobytes() == payload.tobytes()
    reader.close()


def test_memory_of_a_process_that_has_ended_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError):
        SharedMemory().get(Note(ended.pid, 3, 4096, 0, 8))


def test_no_descriptor_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Compressor is often freed without ``close()``, and segments are replaced when they are too small."""

    def count() -> int:
        return sum("hvdcompress" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())

    monkeypatch.setattr(shared_memory, "FIRST", 256)
    before = count()
    memory = SharedMemory()
    with_one = count()
    for size in (300, 3000, 30_000):
        memory.put(np.zeros(size, np.uint8))
    assert count() > with_one
    memory.begin()
    assert count() == with_one
    del memory
    assert count() == before
