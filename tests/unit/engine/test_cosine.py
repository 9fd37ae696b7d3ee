"""Compressed gradients compared with the uncompressed average: `cosine_every` in the plan."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.cosine import Product
from hvdcompress.engine.telemetry.observer import Compared, Observer
from hvdcompress.loopback import Loopback
from hvdcompress.ops import fast
from hvdcompress.optimizers import SGD
from hvdcompress.plan import PlanError, load, plan_of
from hvdcompress.testing import numbers
from hvdcompress.testing.trial import equal, same_states

SHAPES = {"a": (40, 50), "b": (30, 20), "c": (3,), "empty": (0,)}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"density": 0.05}),
    ("powersgd", {}),
    ("fft", {"density": 0.05}),
    ("qsgd", {}),
    ("topk", {"density": 0.05, "clip_norm": 0.1}),
    ("topk", {"density": 0.05, "bucket_elements": 10_000}),
    ("topk", {"density": 0.05, "loss_scale": 1024.0}),
    ("topk", {"density": 0.05, "optimizer": SGD(momentum=0.9)}),
]


class Kept(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[int, Compared]] = []

    def compared(self, rank: int, what: Compared) -> None:
        self.seen.append((rank, what))


def gradients(step: int, world_size: int = 2) -> list[dict[str, np.ndarray]]:
    return [{name: numbers(shape, rank, step) for name, shape in SHAPES.items()} for rank in range(world_size)]


def cosine(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    first, second = (np.concatenate([each.ravel() for each in one]).astype(np.float64) for one in (a, b))
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))


@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_nothing_but_the_comparison_is_new(method: str, settings: dict[str, Any]) -> None:
    plain, net = Loopback(method, 2, **settings), Loopback(method, 2, cosine_every=2, **settings)
    kept = Kept()
    net.watch(kept)
    for step in range(5):
        wanted, got = (each.allreduce_many(gradients(step)) for each in (plain, net))
        assert all(equal(one[name], other[name]) for one, other in zip(wanted, got, strict=True) for name in SHAPES)
    states = [[rank.state_dict() for rank in each.ranks] for each in (plain, net)]
    assert same_states(*states)
    assert [(rank, what.step) for rank, what in kept.seen] == [(0, 2), (1, 2), (0, 4), (1, 4)]
    assert all(0 < what.least <= what.cosine < 1 for _, what in kept.seen)


def test_it_is_the_angle_of_all_tensors_and_names_the_worst() -> None:
    net = Loopback("topk", 2, density=0.05, cosine_every=1)
    for step in range(3):
        everyone = gradients(step)
        got = net.allreduce_many(everyone)[0]
        mean = {name: sum(each[name] for each in everyone) / 2 for name in SHAPES}
        by_name = {name: cosine([got[name]], [mean[name]]) for name in ("a", "b", "c")}
        found = net.ledger.last_compared(1)
        assert found is not None and found.step == step + 1
        assert found.cosine == pytest.approx(cosine([*got.values()], [mean[name] for name in got]), abs=1e-6)
        assert found.name == min(by_name, key=lambda name: by_name[name]) and found.name in ("a", "b")
        assert found.least == pytest.approx(by_name[found.name], abs=1e-6)


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_uncompressed_gradients_have_a_cosine_of_one(op: Any, dtype: str) -> None:
    net = Loopback("none", 3, cosine_every=1)
    net.allreduce_many([{n: g.astype(dtype) for n, g in one.items()} for one in gradients(0, 3)], op)
    found = net.ledger.last_compared()
    assert found is not None and (found.cosine, found.least) == pytest.approx((1, 1), abs=1e-6)


def test_clipping_and_adapted_momentum_are_left_out() -> None:
    plain, adapted = (
        Loopback("topk", 2, density=0.05, cosine_every=1, **more)
        for more in ({}, {"optimizer": SGD(momentum=0.9), "clip_norm": 1e-3})
    )
    for step in range(4):
        for net in (plain, adapted):
            net.allreduce_many(gradients(step))
        assert plain.ledger.last_compared() == adapted.ledger.last_compared()


def test_a_nan_or_a_pause_is_not_compared() -> None:
    net = Loopback("topk", 2, density=0.05, cosine_every=1)
    everyone = gradients(0)
    everyone[1]["a"][3, 3] = np.nan
    net.allreduce_many(everyone)
    with net.paused():
        net.allreduce_many(gradients(1))
    assert net.ledger.last_compared() is None
    net.allreduce_many(gradients(2))
    assert net.ledger.last_compared() is not None
    net.ledger.reset()
    assert net.ledger.last_compared() is None


def test_a_gradient_of_zeros() -> None:
    net = Loopback("topk", 2, cosine_every=1)
    net.allreduce_many([{"w": np.zeros(2000, np.float32)}] * 2)
    assert net.ledger.last_compared() is None
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    assert Product.of(zeros, ones, fast).cosine == 0
    assert Product.of(ones, -3 * ones, fast).cosine == pytest.approx(-1)
    assert np.isnan(Product.of(zeros, zeros, fast).cosine)
    # what a framework has summed over 3 ranks is 3 times the average
    assert (Product.exact(6.0, 3.0) + Product()).cosine == pytest.approx(1)
    assert Product.exact(6.0, 3.0) == Product(12.0, 36.0, 4.0)


def test_it_is_shown_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    net = Loopback("topk", 2, density=0.05, cosine_every=3)
    scalars: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            scalars[tag] = value

    with caplog.at_level(logging.INFO, "hvdcompress"):
        for step in range(4):
            net.allreduce_many(gradients(step))
    found = net.ledger.last_compared()
    assert found is not None
    assert caplog.messages == [str(found)] and f"{found.cosine:.3f} in step 3" in str(found)
    assert str(found) in net.summary().replace("\n", " ")
    net.log_to(Writer())
    assert scalars["hvdcompress/cosine"] == found.cosine and scalars["hvdcompress/least_cosine"] == found.least
    assert f'hvdcompress_cosine{{rank="0"}} {found.cosine!r}' in net.openmetrics()
    assert net.ledger.tensors()["cosine"].sent == sum(4 * int(np.prod(shape)) for shape in SHAPES.values())


def test_it_is_off_unless_the_plan_asks() -> None:
    assert plan_of("topk").cosine_every == 0 and "cosine_every" not in plan_of("topk").to_dict()
    plan = plan_of("topk", cosine_every=7)
    assert plan.cosine_every == 7 and load(plan.to_dict()) == plan
    with pytest.raises(PlanError, match="cosine_every"):
        load({"method": "topk", "cosine_every": -1})
