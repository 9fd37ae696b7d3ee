"""dgc: Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887), and the feedback "momentum"."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import hvdcompress
from hvdcompress import registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.plan import load_plan
from hvdcompress.testing import numbers
from tests.oracles.dgc import Oracle
from tests.unit.methods.comparing import assert_matches_oracle
from tests.unit.methods.distributions import distributions


def velocity(net: Loopback, rank: int) -> np.ndarray:
    return net.ranks[rank].states["w"].slots["velocity"].copy()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("world_size,n,density", [(1, 40, 0.1), (2, 57, 0.07), (3, 1, 0.5), (4, 33, 1.0)])
def test_matches_the_oracle(world_size: int, n: int, density: float, momentum: float) -> None:
    """Momentum correction and factor masking (§3.2, §3.3), with exact selection."""
    options = {"density": density, "momentum": momentum, "select": "exact", "min_elements": 1}
    net, oracle = Loopback("dgc", world_size=world_size, **options), Oracle(world_size, n, density, momentum)
    assert_matches_oracle(net, oracle, (n, 1), kinds=("normal", "normal", "heavy"), exact_residuals=True)
    for rank in range(world_size):
        np.testing.assert_array_equal(velocity(net, rank), oracle.u[rank])


@pytest.mark.parametrize(
    "one,other",
    [
        (("topk", {"feedback": "momentum"}), ("dgc", {"select": "exact"})),
        (("dgc", {"momentum": 0.0}), ("dgc", {"feedback": "plain"})),
    ],
)
def test_equal_methods(one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]) -> None:
    """topk with feedback "momentum" is DGC with exact selection; DGC without momentum has plain feedback."""
    nets = [Loopback(id, world_size=3, density=0.05, min_elements=1, **more) for id, more in (one, other)]
    for step in range(6):
        gradients = [numbers((8, 30), rank, step) for rank in range(3)]
        np.testing.assert_array_equal(*[net.allreduce(gradients, "w")[0] for net in nets])
        np.testing.assert_array_equal(*[net.residual("w", 2) for net in nets])


@pytest.mark.parametrize("id", [id for id, cls in registry.classes().items() if cls.sparse and len(cls.phases) == 1])
def test_velocity_ends_at_sent_elements_and_nowhere_else(id: str) -> None:
    density = {"density": 0.1} if "density" in hvdcompress.get_method(id).hyperparameters() else {}
    net = Loopback(id, world_size=1, feedback="momentum", momentum=0.9, min_elements=1, **density)
    u = np.zeros(400, np.float32)
    for step in range(5):
        g = numbers((20, 20), step)
        u = np.float32(0.9) * u + g.ravel()
        sent = net.allreduce([g], "w")[0].ravel() != 0
        u[sent] = 0
        np.testing.assert_array_equal(velocity(net, 0), u)


def first_threshold(u: np.ndarray, rank: int = 0, step: int = 0, **options: Any) -> float:
    method = hvdcompress.get_method("dgc", select="sampled", **options)
    ctx = Context(rank, 2, step, TensorSpec("w", (len(u), 1)))
    return float(method.threshold(u, ctx, Workspace(reference)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["normal", "student t, 1.1 degrees"])
def test_threshold_of_a_sample_fits_any_distribution(name: str) -> None:
    """The threshold assumes no distribution: the first count varies as the sample does, by 1/√(m·density)."""
    u = distributions()[name].astype(np.float32)
    count = np.count_nonzero(np.abs(u) > first_threshold(u, density=0.05, sample=0.1))  # 3000 of 30 000, 150 above
    assert abs(count - 1500) < 4 * 1500 / math.sqrt(150)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_sample_of_a_small_tensor_is_the_whole_tensor(n: int) -> None:
    u = numbers((n,), 3)
    assert np.count_nonzero(np.abs(u) > first_threshold(u, density=0.1)) == max(1, n // 10)


@pytest.mark.parametrize(
    "n,options,size",
    [
        (0, {}, 0),
        (16_000, {}, 16_000),
        (10**6, {}, 16_000),
        (10**7, {}, 100_000),
        (10**6, {"density": 0.25, "sample": 1e-6}, 1024),
        (10**6, {"density": 0.25, "sample": 1.0}, 10**6),
    ],
)
def test_sample_size(n: int, options: dict[str, float], size: int) -> None:
    assert hvdcompress.get_method("dgc", **{"density": 0.001, "select": "sampled", **options}).sample_size(n) == size  # type: ignore[attr-defined]


def test_sample_is_the_same_on_all_ranks_and_differs_between_steps() -> None:
    u = numbers((50_000,), 1)
    first = first_threshold(u, density=0.1)
    assert first == first_threshold(u, rank=1, density=0.1) != first_threshold(u, step=1, density=0.1)


@pytest.mark.parametrize("shape,dense", [((2000,), True), ((40, 50), False), ((5, 4, 10, 10), False)])
def test_vectors_are_sent_uncompressed(shape: tuple[int, ...], dense: bool) -> None:
    net = Loopback("dgc", world_size=2, density=0.01)
    net.allreduce([numbers(shape, rank) for rank in range(2)], "w")
    assert (net.ledger.bytes_sent(0) == 8000) == dense


def test_schedule_in_the_docstring_is_that_of_the_paper() -> None:
    text = (Path(hvdcompress.__file__).parent / "methods" / "dgc.py").read_text(encoding="utf-8")
    block = text.partition("::\n\n")[2].partition("\n\n``select")[0]
    plan = load_plan(yaml.safe_load(block))
    found = [plan.program.at(391 * epoch).density for epoch in range(6)]  # type: ignore[attr-defined]
    assert found == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert plan.program.main == hvdcompress.get_method("dgc", density=0.001)


def test_density_schedule_keeps_residual_and_velocity() -> None:
    plan = {"method": "dgc", "min_elements": 1, "schedule": {"density": {"steps": {0: 0.5, 2: 0.02}}}}
    net = Loopback(plan, world_size=1)
    sent, given, u = np.zeros(400), np.zeros(400), np.zeros(400)
    for step in range(5):
        g = numbers((20, 20), step)
        given += 0.7 * u + g.ravel()
        out = net.allreduce([g], "w")[0].ravel()
        sent += out
        u = velocity(net, 0).astype(np.float64)
        assert 133 <= np.count_nonzero(out) <= 267 if step < 2 else 5 <= np.count_nonzero(out) <= 11
        np.testing.assert_allclose(sent + net.residual("w", 0).ravel(), given, atol=1e-4)
