"""The order of the launches."""

from __future__ import annotations

import pytest

#: files of the longest launches, the longest first: two are tried at a time, and a long one at the end would be alone
LONGEST = (
    "test_promises_tensorflow.py",
    "test_training.py",
    "test_promises_torch.py",
    "test_promises_ddp.py",
    "test_promises_mpi.py",
    "test_integrations.py",
    "test_examples.py",
    "test_ddp.py",
    "test_advise.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
