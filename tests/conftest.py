"""What all tests share: reproducible hypothesis runs, and the methods' test modules as importable oracles."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# TensorFlow, where a test imports it: silent, and not on all cores at once
for setting, value in (("CPP_MIN_LOG_LEVEL", "3"), ("NUM_INTRAOP_THREADS", "1"), ("NUM_INTEROP_THREADS", "1")):
    os.environ.setdefault(f"TF_{setting}", value)

# Triton's kernels run in its interpreter, on CPU tensors; it looks for this when it is imported, later than this file.
# With a GPU:  TRITON_INTERPRET=0 pytest tests/ops/test_ops.py -k "triton and ops_on"
os.environ.setdefault("TRITON_INTERPRET", "1")
with suppress(ImportError):  # before TensorFlow, after which it cannot be imported
    import triton  # noqa: F401

# tests/mutations/ runs other tests again, with the library broken: it imports them by name
for folder in ("methods", "parts", "engine", "ops", "lab", "fuzz"):
    sys.path.insert(0, str(Path(__file__).resolve().parent / folder))

sys.path.insert(0, str(Path(__file__).resolve().parent))
import spoiled  # noqa: E402

from hvdcompress.method import REGISTERED  # noqa: E402

spoiled.spoil()

# No deadline: continuous integration shares its cores. Derandomized: a red run is red for everybody.
settings.register_profile(
    "hvdcompress",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("hvdcompress")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """A method that a test registers with ``@method("my_id")`` is forgotten at its end."""
    before = dict(REGISTERED)
    yield
    for id in REGISTERED.keys() - before.keys():
        sys.modules.pop(id, None)  # an example's module has the name of its method
        del REGISTERED[id]


# -- files of which no test is chosen are not imported ---------------------------------------------------

MARKS = ("slow", "parallel", "alone", "hosts")


def marks_in(file: Path) -> set[str]:
    """The marks that tests of a file can have, by its text; ``launched_tests`` makes launched ones."""
    text = file.read_text(encoding="utf-8")
    made = {"slow", "parallel"} if "launched_tests" in text else set()
    return made | {mark for mark in MARKS if f"mark.{mark}" in text}


def may_have(file: Path, expression: str) -> bool:
    """Whether pytest's ``-m EXPRESSION`` may choose a test of a file: some of the marks that it can have fulfil it."""
    if not set(re.findall(r"\w+", expression)) <= {*MARKS, "and", "or", "not"}:
        return True
    can = sorted(marks_in(file))
    for has in product((False, True), repeat=len(can)):
        if eval(expression, {}, {**dict.fromkeys(MARKS, False), **dict(zip(can, has, strict=True))}):
            return True
    return False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To collect all files takes 20 seconds, most of it for the frameworks that they import. launch/test.sh calls
    pytest several times, each time for other marks."""
    expression = config.getoption("markexpr")
    test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if expression and test and not may_have(collection_path, expression) else None


#: files of the longest launches, the longest first: two are tried at a time, and a long one at the end would be alone
LONGEST = (
    "test_promises_tensorflow.py",
    "test_cli.py",
    "test_promises_torch.py",
    "test_promises_ddp.py",
    "test_promises_mpi.py",
    "test_integrations.py",
    "test_readme.py",
    "test_ddp.py",
    "test_advise.py",
    "test_torch.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long launches come first. A mark that a file's text does not have would be overlooked above."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    can = {file: marks_in(file) for file in {item.path for item in items}}
    for item in items:
        hidden = {mark for mark in MARKS if item.get_closest_marker(mark)} - can[item.path]
        if hidden:
            raise pytest.UsageError(f"{item.nodeid}: write 'pytest.mark.{hidden.pop()}' in its file; see {__file__}")
