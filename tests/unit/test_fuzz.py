"""Every decoder accepts any bytes, or refuses them with an error of its own.

The corpus has the inputs that fuzzers kept: they have different outcomes, reach different lines of the package, or once
showed a fault.
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
from tests.installed import python_path

BYTES = 64 * 4 * ELEMENTS  #: a decoder may allocate as much: copies of the tensor, files and error messages


def test_valid_inputs_are_accepted() -> None:
    for decoder in decoders().values():
        assert {decoder.outcome(data) for data in decoder.valid} == {"taken"}, decoder.name


@pytest.mark.parametrize("archive", sorted(ARCHIVES.glob("*.zip")), ids=lambda archive: archive.stem)
def test_corpus_is_accepted_or_refused(archive: Path) -> None:
    for name, data in read(archive).items():
        decoders()[name.partition("/")[0]].outcome(data)


@pytest.mark.parametrize("mutations", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_mutations_are_accepted_or_refused(mutations: int) -> None:
    seen: set[str] = set()
    for decoder in decoders().values():
        run = Run(decoder, seed=1)
        for _ in range(mutations):
            run.next()
        seen |= run.outcomes
    assert {outcome.partition(":")[0] for outcome in seen} >= {"taken", "WireError", "PlanError", "ValueError"}


@pytest.mark.parametrize("name", ["wire-split", "checkpoint-bytes", "checkpoint-folder"])
def test_memory_does_not_depend_on_lengths_in_headers(name: str) -> None:
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
    """With bounds checking compiled in, which raises IndexError for every access outside of an array."""
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
        **os.environ, "PYTHONPATH": python_path(), "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)
    }  # fmt: skip
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=850, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("done "), done.stderr[-4000:]
