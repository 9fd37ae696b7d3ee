"""dgc: Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887), and the feedback "momentum"."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hvdcompress
from hvdcompress import registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import numpy as reference
from hvdcompress.parts import seed
from hvdcompress.plan import load
from hvdcompress.testing import Trial, numbers
from tests.oracles.dgc import Oracle
from tests.unit.methods.distributions import shapes


def velocity(net: Loopback, rank: int, name: str = "w") -> np.ndarray:
    """Return a rank's velocity of one tensor, flat."""
    return net.ranks[rank].states[name].slots["velocity"].copy()


def residual(net: Loopback, rank: int, name: str = "w") -> np.ndarray:
    return net.residual(name, rank).ravel()


def run_beside_oracle(world_size: int = 3, n: int = 60, density: float = 0.07, momentum: float = 0.9) -> None:
    """Compare results up to rounding, residuals and velocities exactly."""
    net = Loopback("dgc", world_size=world_size, density=density, momentum=momentum, select="exact", min_elements=1)
    oracle = Oracle(world_size, n, density, momentum)
    for step in range(25):
        gradients = [
            numbers((n,), rank, step, kind="heavy" if step % 4 == 3 else "normal") for rank in range(world_size)
        ]
        total = oracle.step(gradients)
        out = net.allreduce([g.reshape(-1, 1) for g in gradients], "w", op="sum")[0]
        np.testing.assert_allclose(out.ravel(), total, rtol=1e-5, atol=1e-5 * np.abs(total).max())
        for rank in range(world_size):
            np.testing.assert_array_equal(residual(net, rank), oracle.v[rank])
            np.testing.assert_array_equal(velocity(net, rank), oracle.u[rank])


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("world_size,n,density", [(1, 40, 0.1), (2, 57, 0.07), (3, 1, 0.5), (4, 33, 1.0)])
def test_beside_an_independent_oracle(world_size: int, n: int, density: float, momentum: float) -> None:
    run_beside_oracle(world_size, n, density, momentum)


def test_topk_takes_the_feedback_momentum_as_well() -> None:
    """topk with feedback "momentum" is DGC with exact selection: every result is equal to the bit."""
    nets = [
        Loopback("topk", world_size=3, density=0.05, feedback="momentum", min_elements=1),
        Loopback("dgc", world_size=3, density=0.05, select="exact", min_elements=1),
    ]
    for step in range(12):
        gradients = [numbers((8, 30), rank, step) for rank in range(3)]
        np.testing.assert_array_equal(*[net.allreduce(gradients, "w")[0] for net in nets])
        for rank in range(3):
            np.testing.assert_array_equal(*[residual(net, rank) for net in nets])
            np.testing.assert_array_equal(*[velocity(net, rank) for net in nets])


@pytest.mark.parametrize("select", ["sampled", "exact"])
def test_without_momentum_it_is_plain_feedback(select: str) -> None:
    nets = [
        Loopback("dgc", world_size=2, density=0.05, select=select, min_elements=1, **more)
        for more in ({"momentum": 0.0}, {"feedback": "plain"})
    ]
    for step in range(8):
        gradients = [numbers((20, 20), rank, step) for rank in range(2)]
        np.testing.assert_array_equal(*[net.allreduce(gradients, "w")[0] for net in nets])
        np.testing.assert_array_equal(*[residual(net, 1) for net in nets])


FED_BACK = [id for id, cls in registry.classes().items() if cls.sparse and len(cls.phases) == 1]


@pytest.mark.parametrize("id", FED_BACK)
def test_sent_and_residual_make_up_the_velocities(id: str) -> None:
    """Σ_t sent_t + Σ_ranks v_T = Σ_t Σ_ranks u_t, the u_t = m·u_{t−1} + g_t of velocities after masking."""
    density = {"density": 0.05} if "density" in hvdcompress.get(id).hyperparameters() else {}
    net = Loopback(id, world_size=3, feedback="momentum", momentum=0.8, min_elements=1, **density)
    sent, put_in, u = np.zeros(900), np.zeros(900), [np.zeros(900)] * 3
    for step in range(10):
        gradients = [numbers((30, 30), rank, step) for rank in range(3)]
        put_in += sum(0.8 * u[rank] + gradients[rank].ravel() for rank in range(3))
        sent += net.allreduce(gradients, "w", op="sum")[0].ravel()
        u = [velocity(net, rank).astype(np.float64) for rank in range(3)]
        kept = sum(residual(net, rank).astype(np.float64) for rank in range(3))
        np.testing.assert_allclose(sent + kept, put_in, atol=2e-5 * np.abs(put_in).max())


def test_what_waited_is_what_momentum_sgd_would_have_moved() -> None:
    """Momentum correction (§3.2): the first time an entry is sent, it is the sum of its velocities so far."""
    net = Loopback("dgc", world_size=1, density=1 / 40, momentum=0.9, select="exact", min_elements=1)
    speed, moved, seen = np.zeros(40), np.zeros(40), np.zeros(40, bool)
    for step in range(60):
        g = numbers((40,), step) * np.float32(0.1) + np.linspace(1, 3, 40, dtype=np.float32)
        speed = 0.9 * speed + g
        moved += speed
        out = net.allreduce([g.reshape(8, 5)], "w")[0].ravel()
        (place,) = np.flatnonzero(out)
        if not seen[place]:
            np.testing.assert_allclose(out[place], moved[place], rtol=1e-5)
        seen[place] = True
    assert seen.sum() > 20


def test_where_all_is_sent_there_is_no_momentum() -> None:
    """Factor masking (§3.3) resets the velocity of all that is sent: at density 1 this is SGD, not momentum SGD.

    That is why the paper's warm-up, at 0.25, has less momentum than what follows it.
    """
    net = Loopback("dgc", world_size=2, density=1.0, momentum=0.9, min_elements=1)
    for step in range(4):
        gradients = [numbers((6, 6), rank, step) for rank in range(2)]
        np.testing.assert_array_equal(net.allreduce(gradients, "w", op="sum")[0], gradients[0] + gradients[1])
        assert not velocity(net, 0).any() and not residual(net, 1).any()


def test_velocity_ends_at_sent_places_and_nowhere_else() -> None:
    for select in ("sampled", "exact"):
        net = Loopback("dgc", world_size=1, density=0.1, momentum=0.9, select=select, min_elements=1)
        u = np.zeros(400, np.float32)
        for step in range(5):
            g = numbers((20, 20), step)
            u = np.float32(0.9) * u + g.ravel()
            sent = net.allreduce([g], "w")[0].ravel() != 0
            u[sent] = 0
            np.testing.assert_array_equal(velocity(net, 0), u)


# -- selection --------------------------------------------------------------------------------------------


def sent_of(u: np.ndarray, density: float, **options: Any) -> np.ndarray:
    net = Loopback("dgc", world_size=1, density=density, min_elements=1, select="sampled", **options)
    out = net.allreduce([u.astype(np.float32).reshape(-1, 1)], "w")[0].ravel()
    np.testing.assert_array_equal(out + residual(net, 0), u.astype(np.float32))
    assert net.ledger.counters(0)["kept"] == np.count_nonzero(out)
    return out


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", shapes())
def test_count_is_near_k_on_any_distribution(name: str, density: float) -> None:
    u = shapes()[name].astype(np.float32)
    k = max(1, int(len(u) * density + 1e-9))
    out = sent_of(u, density)
    count = np.count_nonzero(out)
    assert 2 * k <= 3 * count and 3 * count <= 4 * k, f"{count} sent, k = {k}"
    assert np.abs(u[out == 0]).max() <= np.abs(out[out != 0]).min()  # the largest, nothing else


@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.sampled_from([0.02, 0.1, 0.3, 0.75, 1.0]),
)
def test_count_is_near_k_whatever_the_numbers(u: np.ndarray, density: float) -> None:
    k = min(len(u), max(1, int(len(u) * density + 1e-9)))
    count = np.count_nonzero(sent_of(u, density))
    assert 3 * count <= 4 * k
    assert 3 * count >= 2 * k or count == np.count_nonzero(u)


def first_threshold(u: np.ndarray, **options: Any) -> float:
    method = hvdcompress.get("dgc", **options)
    ctx = Context(0, 1, 0, TensorSpec("w", (len(u), 1)))
    return float(method.threshold(u, ctx, Workspace(reference)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["normal", "laplace", "student t, 1.1 degrees", "lognormal"])
def test_the_sample_tells_the_threshold_of_any_distribution(name: str) -> None:
    """The threshold assumes no distribution: the first count varies as the sample does, by 1/√(m·density)."""
    u = shapes()[name].astype(np.float32)
    count = np.count_nonzero(np.abs(u) > first_threshold(u, density=0.05, sample=0.1))  # 3000 of 30 000, 150 above
    assert abs(count - 1500) < 4 * 1500 / math.sqrt(150)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_of_small_tensors_the_sample_is_all(n: int) -> None:
    u = numbers((n,), 3)
    k = max(1, n // 10)
    assert np.count_nonzero(np.abs(u) > first_threshold(u, density=0.1)) == k


def test_sample_size_and_places() -> None:
    def size(n: int, **options: Any) -> int:
        return hvdcompress.get("dgc", **{"density": 0.001, **options}).sample_size(n)  # type: ignore[attr-defined]

    assert [size(n) for n in (0, 5, 16_000, 10**6, 10**7)] == [0, 5, 16_000, 16_000, 100_000]
    assert size(10**6, density=0.25, sample=1e-6) == 1024
    assert size(10**6, density=0.25, sample=1.0) == 10**6
    places = seed.distinct_indices(seed._key(1), size(2**25), 2**25)
    assert len(set(places.tolist())) == len(places) and (places % 2 == 1).any() and places.max() > 2**24


def test_the_sample_is_the_same_on_all_ranks_and_another_one_each_step() -> None:
    u, method = numbers((50_000,), 1), hvdcompress.get("dgc", density=0.1)
    turns = [Context(rank, 2, step, TensorSpec("w", (50_000, 1))) for rank, step in ((0, 0), (1, 0), (0, 1))]
    first, other, later = [method.threshold(u, ctx, Workspace(reference)) for ctx in turns]  # type: ignore[attr-defined]
    assert first == other != later


# -- clipping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-30, 1.0, 100.0, 1e37])
@pytest.mark.parametrize("world_size", [1, 4])
def test_gradients_are_clipped_to_their_share_of_the_norm(world_size: int, size: float) -> None:
    net = Loopback("dgc", world_size=world_size, density=1.0, local_clip_norm=2.0, min_elements=1)
    gradients = [numbers((10, 10), rank) * np.float32(size) for rank in range(world_size)]
    out = net.allreduce(gradients, "w", op="sum")[0].astype(np.float64)
    expected = np.zeros((10, 10))
    for g in gradients:
        norm = math.sqrt(math.fsum(float(x) ** 2 for x in g.ravel()))
        expected += g.astype(np.float64) * min(1.0, 2.0 / math.sqrt(world_size) / norm)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_clipping_is_in_unscaled_units() -> None:
    plain = Loopback("dgc", world_size=2, density=0.1, local_clip_norm=1.0, min_elements=1)
    scaled = Loopback("dgc", world_size=2, density=0.1, local_clip_norm=1.0, min_elements=1, loss_scale=1024.0)
    for step in range(4):
        gradients = [numbers((20, 20), rank, step) for rank in range(2)]
        expected = plain.allreduce(gradients, "w")[0]
        np.testing.assert_allclose(
            scaled.allreduce([g * np.float32(1024) for g in gradients], "w")[0], 1024 * expected, rtol=1e-5
        )
        np.testing.assert_allclose(residual(plain, 1), residual(scaled, 1), rtol=1e-5, atol=1e-7)


def test_zeros_and_small_gradients_are_not_clipped() -> None:
    net = Loopback("dgc", world_size=1, density=1.0, local_clip_norm=1e6, min_elements=1)
    for g in (np.zeros((3, 3), np.float32), numbers((3, 3), 1)):
        np.testing.assert_array_equal(net.allreduce([g], "w")[0], g)


# -- shapes, bytes and the plan ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape,dense", [((2000,), True), ((40, 50), False), ((5, 4, 10, 10), False)])
def test_vectors_go_dense(shape: tuple[int, ...], dense: bool) -> None:
    net = Loopback("dgc", world_size=2, density=0.01)
    gradients = [numbers(shape, rank) for rank in range(2)]
    out = net.allreduce(gradients, "w")[0]
    assert (np.count_nonzero(out) == 2000) == dense
    assert (net.ledger.bytes_sent(0) == 8000) == dense


@pytest.mark.parametrize("select", ["sampled", "exact"])
@pytest.mark.parametrize("n,density", [(100_000, 0.001), (4096, 0.3), (10, 0.1)])
def test_bytes_by_the_formula(n: int, density: float, select: str) -> None:
    k = max(1, int(n * density + 1e-9))
    entries = k if select == "exact" else max(1, 4 * k // 3)
    low = int(np.log2(n // entries)) if n // entries > 1 else 0

    def up4(num_bytes: float) -> int:
        return int(-(-num_bytes // 4) * 4)

    elias_fano = up4(-(-entries * low // 8)) + up4(-(-(entries + (n >> low) + 1) // 8))
    codings = [elias_fano, 4 * entries] + ([up4(-(-n // 8))] if select == "exact" else [])
    net = Trial(hvdcompress.get("dgc", density=density, select=select), 2)
    net.allreduce([numbers((n, 1), rank) for rank in range(2)])
    assert net.ledger.bytes_sent(0) == 24 + min(codings) + 4 * entries == len(net.log[0].sent[0])


def test_the_docstrings_schedule_is_the_papers() -> None:
    text = (Path(hvdcompress.__file__).parent / "methods" / "dgc.py").read_text(encoding="utf-8")
    block = text.partition("::\n\n")[2].partition("\n\n``select")[0]
    plan = load(yaml.safe_load(block))
    found = [plan.program.at(391 * epoch).density for epoch in range(6)]  # type: ignore[attr-defined]
    assert found == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert plan.program.main == hvdcompress.get("dgc", density=0.001)


def test_a_density_schedule_keeps_residual_and_velocity() -> None:
    plan = {"method": "dgc", "min_elements": 1, "schedule": {"density": {"steps": {0: 0.5, 2: 0.02}}}}
    net, sent, put_in, u = Loopback(plan, world_size=1), np.zeros(400), np.zeros(400), np.zeros(400)
    for step in range(5):
        g = numbers((20, 20), step)
        put_in += 0.7 * u + g.ravel()
        sent += (out := net.allreduce([g], "w")[0].ravel())
        u = velocity(net, 0).astype(np.float64)
        assert 133 <= np.count_nonzero(out) <= 267 if step < 2 else 5 <= np.count_nonzero(out) <= 11
        np.testing.assert_allclose(sent + residual(net, 0), put_in, atol=1e-4)
