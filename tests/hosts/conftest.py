"""Skip the tests where hosts cannot be emulated, and check that they leave none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.cluster import hosts
from tests.hosts.commands import namespaces


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    if reason := hosts.problem():
        assert "Without emulated hosts" in reason, f"this is a fault of the script: {reason}"
        pytest.skip(" ".join(reason.split()))

    def found() -> set[str]:
        return {*namespaces(), *(str(path) for root in (hosts.STATES, "/etc/netns") for path in Path(root).glob("*"))}

    before = found()
    yield
    assert not found() - before
