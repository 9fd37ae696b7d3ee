"""Fuzz one reader of headers or files, guided by coverage: ``python -m tests.fuzz.guided NAME SECONDS [OPTION…]``.

Needs atheris (Google's fuzzer for Python), which no test needs. Inputs that reach new branches are written
to the decoder's corpus, which the tests replay. A fault ends the run, and its bytes are written there, too.
"""

from __future__ import annotations

import os
import sys

import atheris

os.environ["NUMBA_DISABLE_JIT"] = "1"  # numba cannot compile what is instrumented

with atheris.instrument_imports(include=["hvdcompress"]):
    from tests.fuzz.decoders import readers
    from tests.fuzz.fuzz import CORPUS


def main() -> None:
    """Run until the time is over."""
    name, seconds, *options = sys.argv[1:]
    decoder, folder = readers()[name], CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(decoder.valid):
        (folder / f"valid-{number}").write_bytes(data)
    limits = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-max_len=8192", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *limits, *options, str(folder)], lambda data: void(decoder.outcome(data)))
    atheris.Fuzz()


def void(_: object) -> None:
    """libFuzzer takes what a target returns for its verdict."""


if __name__ == "__main__":
    main()
