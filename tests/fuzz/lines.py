"""Which lines of the decoders the corpus reaches: ``python -m tests.fuzz.lines``.

Valid inputs and the corpus go through every decoder. The lines of the functions that are entered count: the others
mostly write, or serve other parts of the package; ``--missed`` lists both. What numba has compiled is one call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pandas as pd

import hvdcompress
from experiments.report import tables
from tests.fuzz.corpus import kept
from tests.fuzz.decoders import decoders

ROOT = Path(hvdcompress.__file__).parent
FILES = {
    "payloads: header, indices, coded values": (
        "parts/wire.py",
        "parts/pack.py",
        "parts/codecs.py",
        "parts/rangefloat.py",
    ),
    "payloads: methods": ("methods/[a-z]*.py",),
    "saved states": ("engine/saving/checkpoint.py", "engine/saving/snapshot.py"),
    "plans": ("plan/document.py", "plan/reading.py", "plan/schedule.py"),
}
seen: dict[str, set[int]] = {}
entered: set[tuple[str, int]] = set()  #: functions: file and first line


def functions(code: CodeType) -> Iterator[CodeType]:
    """The functions in a module's code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x2:  # CO_NEWLOCALS: not a class's body
                yield inner
            yield from functions(inner)


def lines(file: Path) -> dict[tuple[str, int], set[int]]:
    """The numbers of the lines of code of a file's functions, by name and first line."""
    found = functions(compile(file.read_text(encoding="utf-8"), str(file), "exec"))
    return {
        (code.co_name, code.co_firstlineno): {line for *_, line in code.co_lines() if line} - {code.co_firstlineno}
        for code in found
    }


def trace(frame: FrameType, event: str, _: Any) -> Any:
    """Note a line."""
    known = seen.get(frame.f_code.co_filename)
    if known is None:
        return None
    if event == "call":
        entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
    if event == "line":
        known.add(frame.f_lineno)
    return trace


def main() -> None:
    """Run, and print the table."""
    groups = {title: [file for word in words for file in sorted(ROOT.glob(word))] for title, words in FILES.items()}
    seen.update({str(file): set() for files in groups.values() for file in files})
    inputs = [(one, data) for one in decoders().values() for data in (*one.valid, *kept(one.name))]
    sys.settrace(trace)
    for one, data in inputs:
        one.outcome(data)
    sys.settrace(None)
    rows = []
    for title, files in groups.items():
        every = {(str(file), first): found for file in files for (_, first), found in lines(file).items()}
        there = {(file, line) for (file, first), found in every.items() if (file, first) in entered for line in found}
        reached = sum(line in seen[file] for file, line in there)
        rows.append((title, len(every), len(entered & every.keys()), len(there), reached))
    frame = pd.DataFrame(rows, columns=["what", "functions", "entered", "their lines", "reached"])
    tables.show(frame.assign(share=frame["reached"] / frame["their lines"]), share="{:.1%}".format)
    print(f"{len(inputs)} inputs of {len(decoders())} decoders")
    if "--missed" in sys.argv:
        for file in sorted(seen):
            for (name, first), found in lines(Path(file)).items():
                missed = sorted(found - seen[file]) if (file, first) in entered else ["is not entered"]
                if missed:
                    print(f"{Path(file).relative_to(ROOT)}:{first} {name}:", *missed)


if __name__ == "__main__":
    main()
