"""Fuzz one reader of headers or files, guided by coverage: ``python -m tests.fuzz.guided NAME SECONDS [OPTION…]``.

Needs atheris (Google's fuzzer for Python), which no test needs. Inputs that reach new branches are written
to the decoder's corpus, which the tests replay. A fault ends the run, and its bytes are written there, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

os.environ["NUMBA_DISABLE_JIT"] = "1"  # numba cannot compile what is instrumented

with atheris.instrument_imports(include=["hvdcompress"]):
    from tests.fuzz.corpus import keep, kept
    from tests.fuzz.decoders import readers


def main() -> None:
    """Run until the time is over; a child process fuzzes, as ``atheris.Fuzz`` ends its process."""
    name, seconds, *options = sys.argv[1:]
    decoder = readers()[name]
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate((*decoder.valid, *kept(name))):
            Path(folder, str(number)).write_bytes(data)
        child = os.fork()
        if child == 0:
            limits = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-max_len=8192"]
            limits += [f"-artifact_prefix={folder}/", *options, folder]
            atheris.Setup([sys.argv[0], *limits], lambda data: void(decoder.outcome(data)))
            atheris.Fuzz()
        _, status = os.waitpid(child, 0)
        found = {file.read_bytes() for file in Path(folder).iterdir()}
        keep(name, found - set(decoder.valid))
    sys.exit(os.waitstatus_to_exitcode(status))


def void(_: object) -> None:
    """libFuzzer takes what a target returns for its verdict."""


if __name__ == "__main__":
    main()
