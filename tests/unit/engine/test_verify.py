"""Checksums of state that must be equal on all ranks, and the error if they differ."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from hvdcompress.engine.agreement import PeerError, checksum, compare_checksums
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers
from tests.unit.engine.helpers import gradients, state_dicts, train, trained

SHAPES = {"w": (40, 50)}


def test_a_checksum_covers_the_bits_in_the_order_of_the_array() -> None:
    array = numbers((30, 40))
    assert checksum(array) == checksum(np.asfortranarray(array)) == checksum(array.copy())
    other = array.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    assert checksum(other) != checksum(array)
    assert checksum(np.zeros(3, np.float32)) != checksum(-np.zeros(3, np.float32))
    assert checksum(np.zeros((0, 5), np.float32)) == checksum(np.zeros(0, np.float16))


def test_equal_checksums_are_no_error() -> None:
    compare_checksums([], 0)
    compare_checksums([{"a": 1, "b": 2}] * 3, 3)
    compare_checksums([{"a": 1}, {}], 3)  # a rank that failed before it computed its own


def test_the_first_difference_is_named_with_its_ranks() -> None:
    everyone = [{"z": 1, "b": 2, "a": 5}, {"z": 1, "b": 3, "a": 6}, {"z": 1, "b": 2, "a": 5}]
    words = re.escape(
        "b is not equal on all ranks after 7 steps (checksums: 00000002 on rank 0, 2; 00000003 on rank 1)"
    )
    with pytest.raises(PeerError, match=words + ".*2 of 3"):
        compare_checksums(everyone, 7)
    with pytest.raises(PeerError, match="missing on rank 1"):
        compare_checksums([{"z": 1, "b": 2}, {"z": 1}], 7)


@pytest.mark.parametrize(
    "world_size,every,steps", [(2, 1, [0, 1, 2, 3, 4]), (2, 2, [0, 2, 4]), (2, 0, []), (2, 5, [0]), (1, 1, [])]
)
def test_ranks_compare_before_the_first_step_and_every_few_steps(world_size: int, every: int, steps: list[int]) -> None:
    net = Loopback("powersgd", world_size, verify_every=every)
    found = []
    for step in range(5):
        found += [step] if net.ranks[0].verifies() else []
        train(net, [step], SHAPES)
    assert found == steps


def test_a_step_that_finds_a_difference_changes_nothing() -> None:
    net = trained("powersgd", steps=1, shapes=SHAPES, verify_every=1)
    state = net.ranks[1].states["w"]
    net.ranks[1].swap({"w": replace(state, slots={**state.slots, "q": state.slots["q"] + 1})})
    before = state_dicts(net)
    with pytest.raises(PeerError, match="the state 'q' of tensor 'w'"):
        net.allreduce(gradients(SHAPES))
    np.testing.assert_equal(state_dicts(net), before)
    net.ranks[1].swap({"w": state})
    net.allreduce(gradients(SHAPES))
