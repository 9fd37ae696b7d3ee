"""Checksums of what ranks must have alike, and the error where they do not."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from hvdcompress import load
from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.safety.verify import checksum, compare
from hvdcompress.loopback import Loopback
from hvdcompress.plan import PlanError
from hvdcompress.testing import numbers


def test_a_checksum_is_of_the_bits_in_the_arrays_order() -> None:
    array = numbers((30, 40))
    assert checksum(array) == checksum(np.asfortranarray(array)) == checksum(array.copy())
    other = array.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    assert checksum(other) != checksum(array)
    assert checksum(np.zeros(3, np.float32)) != checksum(-np.zeros(3, np.float32))
    assert checksum(np.zeros((0, 5), np.float32)) == checksum(np.zeros(0, np.float16))


def test_equal_checksums_are_no_error() -> None:
    compare([], 0)
    compare([{}, {}], 3)
    compare([{"a": 1, "b": 2}] * 3, 3)
    compare([{"a": 1}, {}], 3)  # a rank that failed before it made its own


def test_the_first_that_differs_is_named_with_its_ranks() -> None:
    everyone = [{"z": 1, "b": 2, "a": 5}, {"z": 1, "b": 3, "a": 6}, {"z": 1, "b": 2, "a": 5}]
    words = re.escape(
        "b is not equal on all ranks after 7 steps (checksums: 00000002 on rank 0, 2; 00000003 on rank 1)"
    )
    with pytest.raises(PeerError, match=words + ".*2 of 3"):
        compare(everyone, 7)
    with pytest.raises(PeerError, match="missing on rank 1"):
        compare([{"z": 1, "b": 2}, {"z": 1}], 7)


@pytest.mark.parametrize("every,steps", [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (0, []), (5, [0])])
def test_ranks_compare_before_the_first_step_and_every_so_many(every: int, steps: list[int]) -> None:
    net, found = Loopback("powersgd", world_size=2, verify_every=every), []
    for step in range(5):
        found += [step] if net.ranks[0].verifies() else []
        net.allreduce([numbers((40, 50), rank, step) for rank in range(2)])
    assert found == steps
    assert not Loopback("powersgd", world_size=1, verify_every=1).ranks[0].verifies(), "nobody is there to compare with"


def test_residuals_differ_and_are_no_error() -> None:
    net = Loopback("topk", world_size=2, density=0.05, verify_every=1)
    for step in range(3):
        net.allreduce([numbers((40, 50), rank, step) for rank in range(2)])
    assert (net.residual("tensor", 0) != net.residual("tensor", 1)).any()


def test_a_step_that_differs_changes_nothing() -> None:
    net = Loopback("powersgd", world_size=2, verify_every=1)
    net.allreduce([numbers((40, 50), rank) for rank in range(2)])
    ((name, state),) = net.ranks[1].states.items()
    bad = state.slots["q"].copy()
    bad[0] += 1
    residual = net.residual("tensor", 1).copy()
    net.ranks[1].swap({name: replace(state, slots={**state.slots, "q": bad})})
    with pytest.raises(PeerError, match="the state 'q' of tensor 'tensor'"):
        net.allreduce([numbers((40, 50), rank, 1) for rank in range(2)])
    np.testing.assert_array_equal(net.residual("tensor", 1), residual)
    net.ranks[1].swap({name: state})
    net.allreduce([numbers((40, 50), rank, 1) for rank in range(2)])


def test_the_key_is_checked() -> None:
    with pytest.raises(PlanError, match="verify_every"):
        load({"method": "topk", "verify_every": -1})
    assert load({"method": "topk", "verify_every": 7}).verify_every == 7
    assert load(load({"method": "topk", "verify_every": 7}).to_dict()).verify_every == 7
