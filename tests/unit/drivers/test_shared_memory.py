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

#: another process: for each note of a line of its input, it prints the payload
READER = """
import sys
from hvdcompress.ddp.shared_memory import Note, SharedMemory
memory = SharedMemory()
for line in sys.stdin:
    print(memory.get(Note(*map(int, line.split()))).tobytes().hex(), flush=True)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that must grow after few bytes."""
    monkeypatch.setattr(shared_memory, "FIRST", 256)


def test_another_process_reads_the_payloads() -> None:
    """Also after the memory has grown, and in a later step that uses the same memory again."""
    memory, random, pipe = SharedMemory(), np.random.default_rng(0), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", READER], stdin=pipe, stdout=pipe, text=True) as reader:
        assert reader.stdin and reader.stdout
        for _ in range(3):
            memory.begin()
            payloads = [random.integers(0, 256, size, np.uint8).tobytes() for size in (100, 1, 200, 1000, 64)]
            notes = [memory.put(np.frombuffer(payload, np.uint8)) for payload in payloads]
            for note, payload in zip(notes, payloads, strict=True):
                print(*note, file=reader.stdin, flush=True)
                assert bytes.fromhex(reader.stdout.readline()) == memory.get(note).tobytes() == payload


def test_memory_of_a_process_that_has_ended_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError):
        SharedMemory().get(Note(ended.pid, 3, 4096, 0, 8))


def test_no_descriptor_stays_open() -> None:
    """A Compressor is often freed without ``close()``, and segments are replaced when they are too small."""

    def count() -> int:
        return sum("hvdcompress" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())

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
