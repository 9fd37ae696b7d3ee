"""Set-up of all tests: quiet frameworks with one thread, and the options --changed and --dist loadgroup."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# TensorFlow, where a test imports it: silent, and not on all cores at once
for setting, value in (("CPP_MIN_LOG_LEVEL", "3"), ("NUM_INTRAOP_THREADS", "1"), ("NUM_INTEROP_THREADS", "1")):
    os.environ.setdefault(f"TF_{setting}", value)

from hvdcompress.method import REGISTERED  # noqa: E402
from tests import SMALL_EXPERIMENT, changed  # noqa: E402
from tests.ranks.launches import launch_of  # noqa: E402
from tests.spoiled import spoil  # noqa: E402

spoil()
# for `python -m experiments`, which is not installed, in tests that run it in another folder
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", action="store_true", help="only tests that the changes since main can affect")


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if config.getoption("changed"):
        changed.choose(items, config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup``, give the tests of a launch (tests/ranks) to one worker."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByLaunch(LoadScopeScheduling):
        """pytest-xdist 3.8 writes its groups to an attribute that pytest 9.2 does not read."""

        def _split_scope(self, nodeid: str) -> str:
            return launch_of(nodeid) or nodeid

    return ByLaunch(config, log)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Unregister the methods that a test registers with ``@method("my_id")``."""
    before = dict(REGISTERED)
    yield
    for id in REGISTERED.keys() - before.keys():
        sys.modules.pop(id, None)  # an example's module has the name of its method
        del REGISTERED[id]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a small experiment, in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(SMALL_EXPERIMENT, encoding="utf-8")
    return file
