"""ScaleCom: cyclic local top-k and the low-pass filter (Chen et al. 2020, arXiv 2104.11125)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.parts import pack
from hvdcompress.testing import Trial, numbers
from tests.oracles.scalecom import Oracle


def run_beside_oracle(
    world_size: int = 3,
    n: int = 50,
    density: float = 0.1,
    beta: float = 1.0,
    select: str = "chunk",
    steps: int = 25,
) -> None:
    """Compare library and oracle on gradients without near-ties, which rounding would decide."""
    net = Loopback("scalecom", world_size=world_size, density=density, beta=beta, select=select, min_elements=1)
    oracle = Oracle(world_size, n, density, beta, select)
    for step in range(steps):
        gradients = [numbers((n,), rank, step, kind="heavy") for rank in range(world_size)]
        total = oracle.step([g.astype(np.float64) for g in gradients])
        out = net.allreduce(gradients, "w", op="sum")[0]
        largest = max(np.abs(g).max() for g in gradients) + max(np.abs(m).max() for m in oracle.memory)
        np.testing.assert_allclose(out, total, rtol=1e-4, atol=1e-5 * largest)
        for rank in range(world_size):
            np.testing.assert_allclose(net.residual("w", rank), oracle.memory[rank], rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("select", ["chunk", "exact"])
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("world_size,n,density", [(1, 50, 0.1), (2, 53, 0.1), (3, 7, 0.3), (5, 101, 0.05)])
def test_beside_an_independent_oracle(world_size: int, n: int, density: float, beta: float, select: str) -> None:
    run_beside_oracle(world_size, n, density, beta, select)


def places(net: Trial) -> np.ndarray:
    """Return the positions that the last step of tensor w sent, from the broadcast's bytes."""
    method, worker = net.plan.program.main, net.ranks[0]
    sent = next(c for c in reversed(net.log) if c.collective == "Broadcast").sent[0]
    return method.decode_index(np.frombuffer(sent, np.uint8), worker.states["w"].bucket.spec, net.ops)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_leader_is_step_modulo_world(world_size: int) -> None:
    net = Trial(hvdcompress.get("scalecom", density=0.1), world_size)
    for step in range(9):
        net.allreduce([numbers((50,), rank, step) for rank in range(world_size)], "w")
    assert [c.root for c in net.log if c.collective == "Broadcast"] == [step % world_size for step in range(9)]


def test_leader_counter_is_in_the_checkpoint() -> None:
    """A resumed run continues with the next leader, not with rank 0."""
    net, resumed = [Trial(hvdcompress.get("scalecom", density=0.1), 3) for _ in range(2)]
    for step in range(4):
        net.allreduce([numbers((50,), rank, step) for rank in range(3)], "w")
    saved = net.saved()
    assert [one["steps"] for one in saved] == [{"w": 4}] * 3
    resumed.restore(saved, [net.ranks[0].states["w"].bucket.spec])
    resumed.allreduce([numbers((50,), rank, 9) for rank in range(3)], "w")
    assert next(c.root for c in resumed.log) == 4 % 3


def test_leader_does_not_move_on_at_an_abandoned_step() -> None:
    net = Trial(hvdcompress.get("scalecom", density=0.1), 3)
    bad = [numbers((50,), rank) for rank in range(3)]
    net.allreduce(bad, "w")
    bad[2][7] = np.nan
    net.allreduce(bad, "w")
    net.allreduce([numbers((50,), rank) for rank in range(3)], "w")
    assert [c.root for c in net.log if c.collective == "Broadcast"] == [0, 1, 1]


@pytest.mark.parametrize("select", ["chunk", "exact"])
def test_commutes_with_the_average(select: str) -> None:
    """For a fixed I, mean_i CLT(x_i) = CLT(mean_i x_i): the true average at the leader's positions."""
    world_size = 4
    net = Trial(hvdcompress.get("scalecom", density=0.07, select=select), world_size)
    gradients = [numbers((101,), rank) for rank in range(world_size)]
    out = net.allreduce(gradients, "w")[0]
    index = places(net)
    expected = np.zeros(101)
    expected[index] = np.mean(gradients, axis=0, dtype=np.float64)[index]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
    lead = Oracle(1, 101, 0.07, 1.0, select).clt(gradients[0].astype(np.float64))
    assert index.tolist() == lead


def test_one_worker_is_top_k_of_each_chunk() -> None:
    g = numbers((95,), 3)
    net = Loopback("scalecom", world_size=1, density=0.1, select="chunk", min_elements=1)
    out = net.allreduce([g], "w")[0]
    for start in range(0, 95, 10):
        piece = np.abs(g[start : start + 10])
        assert np.flatnonzero(out[start : start + 10]).tolist() == [int(piece.argmax())]
    np.testing.assert_array_equal(out + net.residual("w", 0), g)


def test_one_worker_with_exact_selection_is_topk() -> None:
    nets = [Loopback(id, world_size=1, density=0.05, feedback="plain", min_elements=1) for id in ("scalecom", "topk")]
    for step in range(10):
        outs = [net.allreduce([numbers((200,), step)], "w")[0] for net in nets]
        np.testing.assert_array_equal(*outs)


def test_exact_selection_equals_top_k_of_the_leader() -> None:
    net = Trial(hvdcompress.get("scalecom", density=0.05, select="exact", feedback="none"), 3)
    for step in range(6):
        gradients = [numbers((200,), rank, step) for rank in range(3)]
        net.allreduce(gradients, "w")
        leader = np.abs(gradients[step % 3])
        assert set(places(net).tolist()) == set(np.argsort(-leader, kind="stable")[:10].tolist())


@pytest.mark.parametrize("n,chunk", [(1, 10), (9, 10), (10, 10), (11, 10), (19, 10), (101, 7), (5, 5)])
def test_ragged_last_chunk_sends_one_and_stays_inside(n: int, chunk: int) -> None:
    net = Trial(hvdcompress.get("scalecom", density=1 / chunk, select="chunk"), 2)
    for step in range(5):
        net.allreduce([numbers((n,), rank, step) for rank in range(2)], "w")
        index = places(net)
        assert [int(i) // chunk for i in index] == list(range(-(-n // chunk)))
        assert index[-1] < n


@pytest.mark.parametrize(
    "density,bits", [(1.0, 0), (0.5, 1), (0.25, 2), (0.1, 4), (0.01, 7), (1 / 128, 7), (0.001, 10)]
)
def test_an_index_costs_log2_of_the_chunk(density: float, bits: int) -> None:
    n = 20_000
    k = -(-n // round(1 / density))
    net = Trial(hvdcompress.get("scalecom", density=density, select="chunk"), 2)
    net.allreduce([numbers((n,), rank) for rank in range(2)], "w")
    broadcast, reduce = net.log
    assert broadcast.num_bytes == (4 * -(-k * bits // 32),) * 2
    assert (reduce.collective, reduce.num_bytes) == ("AllReduce", (4 * k, 4 * k))


@pytest.mark.parametrize("select", ["exact", "chunk"])
@pytest.mark.parametrize("values,width", [("fp32", 4), ("fp16", 2)])
def test_bytes_are_constant_in_the_number_of_workers(values: str, width: int, select: str) -> None:
    sent = set()
    for world_size in (1, 2, 3, 8, 64, 256):
        net = Loopback("scalecom", world_size=world_size, density=0.01, values=values, select=select)
        outs = net.allreduce([numbers((2000,), rank) for rank in range(world_size)])
        assert len({out.tobytes() for out in outs}) == 1
        sent |= {net.ledger.bytes_sent(rank) for rank in range(world_size)}
    index = {"exact": pack.index_num_bytes(pack.best_coding(20, 2000), 20, 2000), "chunk": 4 * -(-20 * 7 // 32)}
    assert sent == {index[select] + 20 * width}


def test_rate_of_a_hundred() -> None:
    """Density 1/128 in fp32: 128·32/(32 + 7) = 105x with chunks, 128·32/(32 + 9) = 100x by default."""
    for select, bits in (("chunk", 7), ("exact", 9)):
        net = Loopback("scalecom", world_size=2, density=1 / 128, select=select)
        net.allreduce([numbers((128 * 320,), rank) for rank in range(2)])
        np.testing.assert_allclose(net.ledger.compression_ratio(0), 128 * 32 / (32 + bits), rtol=5e-3)


def test_the_papers_settings() -> None:
    """``paper: true`` is chunks and β = 0.1; by default the leader's k largest are sent, with plain feedback."""
    paper = hvdcompress.get("scalecom", select="chunk", feedback="lowpass", beta=0.1)
    assert hvdcompress.get("scalecom", paper=True) == paper
    settings = {"paper": {"paper": True}, "default": {}, "exact": {"select": "exact", "feedback": "plain"}}
    nets = {name: Trial(hvdcompress.get("scalecom", density=0.1, **given), 2) for name, given in settings.items()}
    for step in range(4):
        gradients = [numbers((60,), rank, step) for rank in range(2)]
        outs = {name: net.allreduce(gradients, "w")[0] for name, net in nets.items()}
        np.testing.assert_array_equal(outs["default"], outs["exact"])
        assert not np.array_equal(outs["default"], outs["paper"])
    np.testing.assert_array_equal(nets["default"].residual("w", 1), nets["exact"].residual("w", 1))


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
def test_low_pass_residual(beta: float) -> None:
    """At sent places m' = (1 − β)m, not zero unless β = 1; elsewhere m' = m + βg."""
    net = Trial(hvdcompress.get("scalecom", density=0.1, feedback="lowpass", beta=beta), 2)
    for step in range(12):
        gradients = [numbers((60,), rank, step) for rank in range(2)]
        before = [net.residual("w", rank) if step else np.zeros(60, np.float32) for rank in range(2)]
        net.allreduce(gradients, "w")
        sent = np.zeros(60, bool)
        sent[places(net)] = True
        for rank in range(2):
            after, m, g = net.residual("w", rank), before[rank], gradients[rank]
            np.testing.assert_allclose(after[sent], (1 - beta) * m[sent], rtol=1e-4, atol=3e-6)
            np.testing.assert_allclose(after[~sent], (m + beta * g)[~sent], rtol=1e-4, atol=3e-6)
    if beta < 1:
        assert np.abs(after[sent]).max() > 0


def test_low_pass_identity() -> None:
    """Σ_t c_t = Σ_t g_t − (m_T − m_0)/β, on each rank alone as well."""
    beta, n = 0.1, 40
    net = Trial(hvdcompress.get("scalecom", density=0.1, feedback="lowpass", beta=beta), 1)
    sent, given = np.zeros(n), np.zeros(n)
    for step in range(50):
        g = numbers((n,), step)
        given += g
        sent += net.allreduce([g], "w", op="sum")[0]
    np.testing.assert_allclose(sent, given - net.residual("w", 0) / beta, atol=1e-3)


def test_averaged_contraction() -> None:
    """The paper's lemma 1: with the averaged u's true top-k and the leader's I at Hamming distance 2d,

    ‖ȳ − CLT(ȳ)‖² ≤ γ‖ȳ‖² with γ = d/k + (1 − d/k)·γ0, where γ0 is the contraction of the exact top-k.
    """
    world_size, n, density = 4, 200, 0.1
    k, distances = 20, []
    for trial in range(20):
        common = numbers((n,), trial, kind="heavy")
        gradients = [common + np.float32(trial % 5) * numbers((n,), rank, trial, 1) for rank in range(world_size)]
        net = Trial(hvdcompress.get("scalecom", density=density, select="exact", feedback="none"), world_size)
        out = net.allreduce(gradients, "w")[0].astype(np.float64)
        y = np.mean(gradients, axis=0, dtype=np.float64)
        exact = set(np.argsort(-np.abs(y), kind="stable")[:k].tolist())
        d = k - len(exact & set(places(net).tolist()))  # each of d positions is missed and another taken, so 2d differ
        gamma0 = 1 - sum(y[i] ** 2 for i in exact) / (y**2).sum()
        error = ((y - out) ** 2).sum() / (y**2).sum()
        assert error <= d / k + (1 - d / k) * gamma0 + 1e-6
        distances.append(d)
        # brute force: at distance 2d the worst I misses the d largest and takes the d smallest instead
        order = np.argsort(-np.abs(y), kind="stable")
        worst = np.r_[order[d:k], order[n - d :]]
        assert error <= 1 - (y[worst] ** 2).sum() / (y**2).sum() + 1e-6
        assert error >= gamma0 - 1e-6
    assert min(distances) == 0 and max(distances) >= 5, "the bound must have been tried near and far"


def test_residuals_of_workers_grow_alike() -> None:
    """If gradients share a signal, so do residuals: their pairwise cosine distance is small."""
    world_size, n = 4, 400
    net = Loopback("scalecom", world_size=world_size, density=0.02, beta=1.0, min_elements=1)
    signal = numbers((n,), 99)
    for step in range(40):
        net.allreduce([signal + numbers((n,), rank, step) for rank in range(world_size)], "w")
    m = [net.residual("w", rank).astype(np.float64) for rank in range(world_size)]
    cosine = [1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) for i, a in enumerate(m) for b in m[:i]]
    assert max(cosine) < 0.3


def test_warm_up_is_dense_and_the_leader_turns_on() -> None:
    net = Loopback("scalecom", world_size=2, density=0.1, warmup={"steps": 3}, min_elements=1)
    for step in range(4):
        gradients = [numbers((50,), rank, step) for rank in range(2)]
        out = net.allreduce(gradients, "w")[0]
        dense = np.allclose(out, (gradients[0] + gradients[1]) / 2, atol=1e-6)
        assert dense == (step < 3)
