"""docs/interactions.md names a test for each pair of features, and the tests that it names are there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

import test_interactions
from interactions import FEATURES, HELD, PLANNED, REFUSED, holding, missing, pairs


def test_every_pair_is_held_by_a_test() -> None:
    assert [pair for pair in pairs() if not holding(pair)] == []
    assert all(set(held.features) <= set(FEATURES) for held in HELD)


def test_the_tests_are_there() -> None:
    assert missing(held.test for held in HELD) == []
    assert missing(test for _, test in REFUSED) == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    gone = ["tests/house/test_interactions_page.py::test_gone", "tests/gone.py::test_gone"]
    assert missing(iter([*gone, HELD[0].test])) == gone


def test_the_model_tries_what_the_page_says() -> None:
    assert test_interactions.FEATURES == PLANNED
