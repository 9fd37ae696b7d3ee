"""Drivers are tried with every kind of exchange that a method of the registry asks for."""

from __future__ import annotations

from typing import Any

import pytest

import hvdcompress
from hvdcompress import registry
from hvdcompress.plan import IN_ORDER, plan_of
from hvdcompress.testing import Trial
from tests.ranks.checks import heavy_tailed
from tests.ranks.exchanges import EXCHANGES, num_steps
from tests.variants import variants

SHAPES = {"a": (23, 21), "b": (8, 4, 3, 3), "c": (8, 31), "d": (1,)}


def kinds_of(method: str, settings: dict[str, Any]) -> set[Any]:
    """Return the sequences of collectives of a tensor's steps, and the types of results, among two ranks."""
    plan, forms = plan_of(method, **settings), set()
    main = plan.program.main
    original = main.exchange

    def exchange(*arguments: Any) -> Any:
        reduced = yield from original(*arguments)
        forms.add((type(reduced.total), type(reduced.own)))
        return reduced

    object.__setattr__(main, "exchange", exchange)
    net = Trial(plan, 2, grouping=IN_ORDER)
    for step in range(num_steps(settings)):
        net.allreduce([heavy_tailed(SHAPES, step, rank) for rank in range(2)])
    sequences: dict[Any, list[Any]] = {}
    for each in net.log:
        what = each.collective, each.op, each.dtypes[0], each.splits, len(set(each.lengths)) > 1
        sequences.setdefault((each.name, each.step), []).append(what)
    return forms | {tuple(sequence) for sequence in sequences.values()}


@pytest.fixture(scope="module")
def tried() -> set[Any]:
    return set().union(*(kinds_of(method, settings) for method, settings in EXCHANGES))


@pytest.mark.parametrize("method", hvdcompress.available())
def test_every_kind_of_exchange_is_tried(method: str, tried: set[Any]) -> None:
    """If this fails for a new method, add settings of it to ``EXCHANGES``."""
    for settings in variants(registry.classes()[method]).values():
        assert kinds_of(method, settings) <= tried, settings
