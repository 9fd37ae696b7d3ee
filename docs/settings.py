"""Write ``hvdcompress/settings.pyi``: the keyword arguments of all methods and of plans, for editors and type checkers.

python docs/settings.py            write the file
python docs/settings.py --check    write nothing; fail if the file would change
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "hvdcompress" / "settings.pyi"
sys.path.insert(0, str(ROOT))

from hvdcompress.registry import classes  # noqa: E402

TYPES = {"number": "float", "integer": "int", "string": "str", "boolean": "bool", "null": "None"}
PLAN = {
    "rules": "list[dict[str, Any]]", "schedule": "dict[str, Any]", "warmup": "dict[str, float]",
    "steps_per_epoch": "int", "min_elements": "int", "bucket_elements": "int", "seed": "int", "watchdog": "bool",
    "warn_after": "int", "end_after": "int", "verify_every": "int", "fallback": "bool",
    "nodes": 'int | Literal["auto"]', "paper": "bool",
}  # fmt: skip
TEXT = '''"""Made by docs/settings.py: run it after a change of a method's hyper-parameters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
    """Hyper-parameters of the methods, and keys of a plan."""

{keys}

class DriverSettings(Settings, total=False):
    """The same, and the settings of PyTorch's drivers."""

    loss_scale: float | Callable[[], float]
    backend: Literal["auto", "torch"]

class LocalStepsSettings(Settings, total=False):
    """The same, and the settings of local steps."""

    outer: Mapping[str, Any] | Literal["auto"] | None
    fragments: int
    delay: int
    mixing: float
    warmup: int  # type: ignore[misc]
    checkpoint: str | Path | None
'''


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the Python types that a field's JSON schema allows."""
    if "anyOf" in schema:
        return set().union(*map(types_of, schema["anyOf"]))
    return {TYPES[schema.get("type", "string")]}


def stub() -> str:
    """Return the text of the stub."""
    found: dict[str, set[str]] = {}
    for cls in (each for each in classes().values() if each.__module__.startswith("hvdcompress.")):
        for name, schema in TypeAdapter(cls).json_schema()["properties"].items():
            found.setdefault(name, set()).update(types_of(schema))
    keys = {**{name: " | ".join(sorted(types)) for name, types in found.items()}, **PLAN}
    return TEXT.format(keys="\n".join(f"    {name}: {keys[name]}" for name in sorted(keys)))


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(FILE.read_text() != stub())
    FILE.write_text(stub())
