"""Bytes from elsewhere: everything that reads them takes them, or refuses them by name, whatever they are.

The corpus is what ``fuzz.py`` and ``guided.py`` kept: inputs with outcomes of their own, and those that once showed a
fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.corpus import ARCHIVES, read
from tests.fuzz.decoders import ELEMENTS, decoders
from tests.fuzz.fuzz import Run
from tests.fuzz.mutate import mutation
from tests.installed import python_path

MUTATIONS = 25  #: of each decoder, beside the corpus
BYTES = 64 * 4 * ELEMENTS  #: what a decoder may allocate: some copies of the tensor, of files' and of texts of errors


def test_valid_inputs_are_taken() -> None:
    for decoder in decoders().values():
        assert {decoder.outcome(data) for data in decoder.valid} == {"taken"}, decoder.name


@pytest.mark.parametrize("archive", sorted(ARCHIVES.glob("*.zip")), ids=lambda archive: archive.stem)
def test_the_corpus_is_taken_or_refused(archive: Path) -> None:
    for name, data in read(archive).items():
        decoders()[name.partition("/")[0]].outcome(data)


def test_mutations_are_taken_or_refused() -> None:
    seen = set()
    for decoder in decoders().values():
        run = Run(decoder, seed=1)
        for _ in range(MUTATIONS):
            run.next()
        seen |= run.outcomes
    assert {outcome.partition(":")[0] for outcome in seen} >= {"taken", "WireError", "PlanError", "ValueError"}


def test_a_mutation_is_its_numbers() -> None:
    inputs = [b"HC" + bytes(60), b"name: x\n"]
    again = [mutation("one", 3, number, inputs) for number in range(200)]
    assert again == [mutation("one", 3, number, inputs) for number in range(200)]
    assert len(set(again)) > 100 and again != [mutation("one", 4, number, inputs) for number in range(200)]


def test_what_is_kept_reaches_new_lines() -> None:
    """Any number of messages that quote what was given, and one line that was not reached before."""
    run = Run(decoders()["metrics"], seed=1)
    assert not run.reaches_more(run.inputs[0])
    run = Run(decoders()["plan"], seed=1)
    run.first = [b"method: topk\n", b"methodd: topk\n"]
    assert not run.reaches_more(b"methode: topk\n")
    assert run.reaches_more(b"method: topk\nwarmup: {steps: 3}\n")
    assert not run.reaches_more(b"method: topk\nwarmup: {steps: 4}\n")


@pytest.mark.parametrize("name", ["wire-split", "checkpoint-bytes", "checkpoint-folder"])
def test_memory_does_not_follow_what_headers_say(name: str) -> None:
    run = Run(decoders()[name], seed=2)
    for _ in range(300):
        tracemalloc.start()
        try:
            run.next()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < BYTES + 8 * len(run.data), f"{peak} bytes for {run.data!r:.200}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_kernels_stay_in_bounds(tmp_path: Path) -> None:
    """The same with bounds checking compiled in, which makes an IndexError of every access outside of an array."""
    code = (
        "from tests.fuzz.decoders import decoders\n"
        "from tests.fuzz.fuzz import Run\n"
        "for name, decoder in decoders().items():\n"
        "    run = Run(decoder, seed=3)\n"
        "    for _ in range(20 * name.startswith('method-')):\n"
        "        run.next()\n"
        "print('done', len(decoders()))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=850, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("done "), done.stderr[-4000:]
