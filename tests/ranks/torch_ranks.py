"""Shared by the tests of PyTorch: the ranks of torch.distributed, or of Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.ranks import checks

HOROVOD = os.environ.get("DRIVER") == "torch"
if HOROVOD:
    import horovod.torch as hvd


def rank() -> int:
    return hvd.rank() if HOROVOD else dist.get_rank()


def world_size() -> int:
    return hvd.size() if HOROVOD else dist.get_world_size()


def gather(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks, or of those of a process group."""
    if HOROVOD:
        return hvd.allgather_object(value, name="gather")  # by default, the type is the name, which may differ
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def must_raise(kind: Any, words: list[str], run: Callable[[], object], same: bool = True) -> None:
    checks.must_raise(kind, words, run, gather, same)


def assert_same_on_all_ranks(arrays: Mapping[str, np.ndarray], what: str) -> None:
    checks.assert_same_on_all_ranks(dict(arrays), gather, what)
