"""ScaleCom: cyclic local top-k and the low-pass filter (Chen et al. 2020, arXiv 2104.11125)."""

from __future__ import annotations

import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers
from tests.oracles.scalecom import Oracle
from tests.unit.methods.comparing import assert_matches_oracle


@pytest.mark.parametrize("select", ["chunk", "exact"])
@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("world_size,n,density", [(1, 50, 0.1), (2, 53, 0.1), (3, 7, 0.3), (5, 101, 0.05), (2, 5, 0.1)])
def test_matches_the_oracle(world_size: int, n: int, density: float, beta: float, select: str) -> None:
    """The gradients have no near-ties, which rounding would decide."""
    options = {"density": density, "beta": beta, "select": select, "min_elements": 1}
    net, oracle = Loopback("scalecom", world_size=world_size, **options), Oracle(world_size, n, density, beta, select)
    assert_matches_oracle(net, oracle, (n,), kinds=["heavy"], tolerance=1e-5)


@pytest.mark.parametrize("world_size", [1, 3])
def test_leader_is_step_modulo_world_size(world_size: int) -> None:
    net = Trial(hvdcompress.get_method("scalecom", density=0.1), world_size)
    for step in range(5):
        net.allreduce([numbers((50,), rank, step) for rank in range(world_size)], "w")
    assert [c.root for c in net.log if c.collective == "Broadcast"] == [step % world_size for step in range(5)]


def test_resumed_run_continues_with_the_next_leader() -> None:
    net, resumed = [Trial(hvdcompress.get_method("scalecom", density=0.1), 3) for _ in range(2)]
    for step in range(4):
        net.allreduce([numbers((50,), rank, step) for rank in range(3)], "w")
    saved = net.saved()
    assert [one["steps"] for one in saved] == [{"w": 4}] * 3
    resumed.restore(saved, [net.ranks[0].states["w"].bucket.spec])
    resumed.allreduce([numbers((50,), rank, 9) for rank in range(3)], "w")
    assert resumed.log[0].root == 4 % 3


def test_settings_of_the_paper() -> None:
    paper = hvdcompress.get_method("scalecom", select="chunk", feedback="lowpass", beta=0.1)
    assert hvdcompress.get_method("scalecom", paper=True) == paper
    assert hvdcompress.get_method("scalecom") == hvdcompress.get_method("scalecom", select="exact", beta=1.0)
