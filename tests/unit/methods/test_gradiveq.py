"""GradiVeQ: linear vector quantization of convolutions' gradients (Yu et al. 2018, arXiv 1811.03617)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine import lockstep
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, Reduced, TensorSpec, Workspace
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.parts import matrices
from hvdcompress.parts.wire import WireError
from hvdcompress.testing import Trial, numbers
from tests.oracles.gradiveq import Oracle

SHAPE = (4, 2, 3, 3)  # F, D, H, W: 72 elements
SPEC = TensorSpec("w", SHAPE)
OURS: dict[str, Any] = {"dense_steps": 4, "compressed_steps": 3, "slice_elements": 24}
PAPER: dict[str, Any] = {**OURS, "paper": True}


def gradient(rank: int, step: int, shape: tuple[int, ...] = SHAPE, noise: float = 0.05) -> np.ndarray:
    """Return slices that are random mixtures of two directions, one of them stronger, plus a mean and noise."""
    block, count = matrices.blocks(TensorSpec("w", shape))
    directions = numbers((2, block), 77) * np.float32([[3.0], [1.0]])
    mean = np.float32(0.5) * numbers((count, block), 78)
    flat = numbers((count, 2), rank, step, 5) @ directions + mean
    flat = flat + np.float32(noise) * numbers((count, block), rank, step, 6)
    return matrices.stored_order(flat.ravel(), TensorSpec("w", shape), reference).reshape(shape)


def assert_matches_oracle(oracle: Oracle, **settings: Any) -> None:
    """Compare library and oracle in 16 steps of cycles of 4 dense and 3 compressed steps."""
    net = Loopback("gradiveq", world_size=oracle.world_size, min_elements=1, **settings)
    for step in range(16):
        gradients = [gradient(rank, step, oracle.shape) for rank in range(oracle.world_size)]
        expected = oracle.step([g.astype(np.float64) for g in gradients])
        found = net.allreduce(gradients, "w", op="sum")[0]
        np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), err_msg=f"step {step}")
    assert int(net.ranks[0].states["w"].slots["rank"][0]) == oracle.d


@pytest.mark.parametrize(
    "world_size,shape,size,d,lam",
    [
        (1, SHAPE, 24, None, 0.001),
        (2, SHAPE, 24, 1, 0.05),
        (3, (4, 2, 3, 2), 8, None, 0.05),
        (2, SHAPE, 20, None, 0.5),
        (4, (2, 3, 2, 2), 24, 2, 0.05),
        (2, SHAPE, 8, 9, 0.05),
        (2, (5, 1, 3, 3), 7, None, 0.05),
    ],
)
def test_settings_of_the_paper_match_the_oracle(
    world_size: int, shape: tuple[int, ...], size: int, d: int | None, lam: float
) -> None:
    oracle = Oracle(world_size, shape, size, 4, 3, lam, d)
    assert_matches_oracle(oracle, **{**PAPER, "slice_elements": size, "matrix_rank": d, "lam": lam})


@pytest.mark.parametrize(
    "size,d,order,mean,max_samples",
    [
        (6, None, "oihw", False, 1024),
        (24, None, "hwio", False, 9),
        (24, 5, "oihw", True, 9),
        (20, 3, "oihw", False, 1024),
        (18, 1, "hwio", True, 1024),
    ],
)
def test_samples_of_all_slices_match_the_oracle(
    size: int, d: int | None, order: str, mean: bool, max_samples: int
) -> None:
    """More samples than elements of a slice, or fewer; a step's samples follow those of the previous step."""
    oracle = Oracle(2, SHAPE, size, 4, 3, 0.05, d, min(72 // size, max_samples // 4), order, mean, size // 2)
    options = {"order": order, "mean": mean, "max_samples": max_samples, "min_rate": 2.0}
    assert_matches_oracle(oracle, **{**OURS, "slice_elements": size, "matrix_rank": d, "lam": 0.05}, **options)


def trained(world_size: int = 2, shape: tuple[int, ...] = SHAPE, **settings: Any) -> Trial:
    """Return a network before its first compressed step."""
    net = Trial(hvdcompress.get_method("gradiveq", **{**PAPER, "compressed_steps": 50, **settings}), world_size)
    for step in range(net.plan.program.main.dense_steps):  # type: ignore[attr-defined]
        net.allreduce([gradient(rank, step, shape) for rank in range(world_size)], "w")
    net.log.clear()
    return net


def basis(net: Trial) -> np.ndarray:
    """Return U [slice × d]."""
    state = net.ranks[0].states["w"]
    size = net.plan.program.main.slice_of(state.bucket.spec)  # type: ignore[attr-defined]
    return state.slots["basis"].reshape(-1, size)[: int(state.slots["rank"][0])].T


def test_basis_is_computed_by_one_rank() -> None:
    """LAPACKs differ in signs and order of addition, so the SVDs of the other ranks must not matter."""
    roots = {}
    for name in ("a", "b", "c", "d"):
        net = Trial(hvdcompress.get_method("gradiveq", **PAPER), 3)
        for step in range(4):
            net.allreduce([gradient(rank, step) for rank in range(3)], name)
        (fit,) = [c for c in net.log if c.collective == "Broadcast"]
        assert fit.step == 3 and fit.num_bytes == (4 + 4 * 3 * 4,) * 3
        roots[name] = fit.root
    assert len(set(roots.values())) > 1  # tensors take turns


def run_exchange(method: Any, x: np.ndarray, state: dict[str, Any], ctx: Context) -> Reduced:
    """Run one exchange in a world of one, without a driver."""
    running = method.exchange(x, state, ctx, Workspace(reference))
    result = None
    while True:
        try:
            (result,) = lockstep.perform([running.send(result)])
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("settings", [PAPER, OURS])
def test_state_and_sum_are_the_same_in_both_frameworks(settings: dict[str, Any]) -> None:
    method, states, totals = hvdcompress.get_method("gradiveq", **settings), [], []
    for spec, axes in ((SPEC, (0, 1, 2, 3)), (TensorSpec("w", (3, 3, 2, 4), layout="hwio"), (2, 3, 1, 0))):
        state = {name: np.zeros(np.prod(slot.shape), slot.dtype) for name, slot in method.state(spec).items()}
        for step in range(6):
            x = np.ascontiguousarray(gradient(0, step).transpose(axes)).ravel()
            done = run_exchange(method, x, state, Context(0, 1, step, spec, phase=method.phase_of(step)))
            state |= done.state
        states.append(state)
        totals.append(done.total.reshape(spec.shape))
    for slot in states[0]:
        np.testing.assert_array_equal(states[0][slot], states[1][slot])
    np.testing.assert_array_equal(totals[0].transpose(2, 3, 1, 0), totals[1])


# -- schedule ---------------------------------------------------------------------------------------------------


def is_dense(net: Trial, shape: tuple[int, ...] = SHAPE, key: int = 0) -> bool:
    """Take a step with noise, which the basis cannot represent, and return whether it is unchanged."""
    given = [numbers(shape, rank, key, 123) for rank in range(net.world_size)]
    return bool(np.allclose(net.allreduce(given, "w", op="sum")[0], sum(given), atol=1e-5))


def test_settings_of_the_paper() -> None:
    method = hvdcompress.get_method("gradiveq", paper=True)
    assert (method.dense_steps, method.compressed_steps, method.lam) == (100, 400, 0.01)
    assert (method.samples, method.order, method.mean, method.min_rate) == ("first", "hwio", True, 1.0)
    assert [method.phase_of(age) for age in (0, 98, 99, 100, 499, 500)] == [0, 0, 1, 2, 2, 0]
    assert method.feedback == "none"


def test_warmup_comes_before_the_training() -> None:
    net = Loopback("gradiveq", world_size=2, warmup={"steps": 5}, min_elements=1, **PAPER)
    for _ in range(5):
        net.allreduce([gradient(rank, 0) for rank in range(2)], "w")
    assert not any(array.any() for name, array in net.ranks[0].states["w"].slots.items() if "samples" in name)
    assert [is_dense(net, key=step) for step in range(8)] == 4 * [True] + 3 * [False] + [True]


@pytest.mark.parametrize("at", [5, 2])
def test_trigger_starts_a_new_training(at: int) -> None:
    """After a trigger, in a compressed or in a dense step, Lt dense steps follow; μ and U contain no earlier step."""
    net, fresh = [Trial(hvdcompress.get_method("gradiveq", **PAPER), 2) for _ in range(2)]
    for step in range(at + 1):
        if step == at:
            net.trigger()
        net.allreduce([10 * gradient(rank, step) for rank in range(2)], "w")
    dense = []
    for step in range(9):
        dense.append(is_dense(net, key=step))
        is_dense(fresh, key=step)
    assert dense == 4 * [True] + 3 * [False] + 2 * [True]
    for slot in ("mean", "rank", "count"):
        np.testing.assert_allclose(*[one.ranks[0].states["w"].slots[slot] for one in (net, fresh)], atol=1e-5)
    np.testing.assert_allclose(*[basis(one) @ basis(one).T for one in (net, fresh)], atol=1e-4)  # signs are arbitrary


def test_falling_learning_rate_starts_a_new_training() -> None:
    method = hvdcompress.get_method("gradiveq")
    assert method.wants_trigger("learning_rate", 0.049, 0.049, 0.1)
    assert not method.wants_trigger("learning_rate", 0.05, 0.05, 0.1)
    assert not method.wants_trigger("loss", 0.0, 0.0, 9.0)
    assert not hvdcompress.get_method("gradiveq", retrain_drop=0).wants_trigger("learning_rate", 0.0, 0.0, 1.0)
    net = trained(2)
    net.report_metrics(learning_rate=0.1)
    assert not is_dense(net, key=1)
    net.report_metrics(learning_rate=0.01)
    assert [is_dense(net, key=step) for step in range(2, 8)] == [False, *4 * [True], False]


@pytest.mark.parametrize("threshold,expected", [(0.5, [False, True, True]), (1.5, 3 * [False])])
def test_large_error_on_one_rank_starts_a_new_training(threshold: float, expected: list[bool]) -> None:
    net = trained(2, retrain_error=threshold, slice_elements=8, dense_steps=8)
    net.allreduce([gradient(rank, 50) for rank in range(2)], "w")  # like the dense steps: a small error
    assert not net.ranks[0].trigger_requests
    net.allreduce([gradient(0, 51), numbers(SHAPE, 5)], "w")  # noise on rank 1
    assert [bool(rank.trigger_requests) for rank in net.ranks] == [False, threshold < 1]
    assert [is_dense(net, key=step) for step in range(1, 4)] == expected


@pytest.mark.parametrize("settings", [PAPER, {**OURS, "slice_elements": 6, "max_samples": 20, "min_rate": 2.0}])
@pytest.mark.parametrize("stop", [2, 4, 6, 8])
def test_resume_in_any_phase(stop: int, settings: dict[str, Any]) -> None:
    straight, resumed = [Trial(hvdcompress.get_method("gradiveq", **settings, feedback="plain"), 2) for _ in range(2)]
    for step in range(stop):
        straight.allreduce([gradient(rank, step) for rank in range(2)], "w")
    resumed.restore(straight.saved(), [SPEC])
    for step in range(stop, stop + 8):
        outs = [net.allreduce([gradient(rank, step) for rank in range(2)], "w")[0] for net in (straight, resumed)]
        np.testing.assert_array_equal(*outs)


def test_state_is_shared_and_kept_when_the_world_changes() -> None:
    slots = hvdcompress.get_method("gradiveq", **PAPER).state(SPEC)
    assert {(slot.scope, slot.merge) for slot in slots.values()} == {("shared", "keep")}
    assert {name: slot.shape for name, slot in slots.items()} == {
        **{f"samples{step}": (1, 24) for step in range(4)},
        "mean": (72,), "basis": (3, 24), "count": (1,), "rank": (1,), "since": (1,),
    }  # fmt: skip


# -- what is sent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size,size", [(1, 24), (3, 20), (16, 24)])
def test_number_of_bytes(world_size: int, size: int) -> None:
    net = trained(world_size, slice_elements=size, matrix_rank=2)
    before = net.ledger.bytes_sent(0)
    assert before == 4 * 4 * 72 + 4 + 4 * 2 * 4
    net.allreduce([gradient(rank, 9) for rank in range(world_size)], "w")
    values = 2 * (72 // size) + 72 % size
    assert net.ledger.bytes_sent(0) - before == 4 * values
    assert [(c.collective, c.lengths[0], c.dtypes[0]) for c in net.log] == [("AllReduce", values, "float32")]


@pytest.mark.parametrize(
    "shape,hwio,oihw",
    [
        ((16, 16, 3, 3), 768, 576),  # the paper's
        ((16, 3, 3, 3), 432, 432),
        ((64, 64, 5, 5), 4096, 1600),
        ((512, 512, 3, 3), 1024, 768),
        ((4099, 1, 3, 3), 4099, 9),  # a prime
    ],
)
def test_slices_are_near_those_of_the_paper(shape: tuple[int, ...], hwio: int, oihw: int) -> None:
    keras = TensorSpec("w", (*shape[2:], shape[1], shape[0]), layout="hwio")
    for order, size in (("hwio", hwio), ("oihw", oihw)):
        method = hvdcompress.get_method("gradiveq", order=order)
        assert method.slice_of(TensorSpec("w", shape)) == method.slice_of(keras) == size
        assert np.prod(shape) % size == 0


@pytest.mark.parametrize(
    "spec,default,everything",
    [
        (TensorSpec("w", (8, 4, 3, 3)), True, True),
        (TensorSpec("w", (8, 4, 1, 1)), False, True),
        (TensorSpec("w", (64, 32)), False, True),
        (TensorSpec("w", (64,)), False, True),
        (TensorSpec("w", (4, 3, 5)), False, True),
        (TensorSpec("w", (3, 3, 4, 8), layout="hwio"), True, True),
        (TensorSpec("w", (1, 1, 4, 8), layout="hwio"), False, True),
        (TensorSpec("w", (0, 4, 3, 3)), False, False),
        (TensorSpec("w", (4, 4, 0, 3)), False, False),
        (TensorSpec("w", (0,)), False, False),
    ],
)
def test_suitable_tensors(spec: TensorSpec, default: bool, everything: bool) -> None:
    assert hvdcompress.get_method("gradiveq").suits(spec) == default
    assert hvdcompress.get_method("gradiveq", tensors="all").suits(spec) == everything
    assert not hvdcompress.get_method("gradiveq", slice_elements=300).suits(spec), "smaller than a slice"


# -- composition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"values": "fp16"},
        {"values": "qsgd8", "dense_values": "qsgd4"},
        {"slice_elements": 20, "retrain_error": 0.3},
    ],
)
def test_nothing_is_lost_across_phases_with_feedback(more: dict[str, Any]) -> None:
    net = Trial(hvdcompress.get_method("gradiveq", **{**PAPER, **more}, feedback="plain"), 3)
    sent, given = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(16):
        gradients = [gradient(rank, step, noise=0.5) for rank in range(3)]
        given += np.sum(gradients, axis=0)
        sent += net.allreduce(gradients, "w", op="sum")[0]
        kept = np.sum([net.residual("w", rank) for rank in range(3)], axis=0)
        np.testing.assert_allclose(sent + kept, given, atol=0.1 if more.get("values") == "fp16" else 1e-3)
        if step % 7 < 4 and not more:
            assert not kept.any()  # a dense step sends all that was left


@pytest.mark.parametrize("values", ["qsgd8", "rangefloat12", "bf16"])
def test_quantized_payloads_are_close_to_exact_ones(values: str) -> None:
    given = [gradient(rank, 40) for rank in range(2)]
    nets = [trained(2, values=one, lam=0.001, dense_steps=8) for one in ("fp32", values)]
    exact, out = [net.allreduce(given, "w")[0] for net in nets]
    assert 0 < np.linalg.norm(out - exact) < 0.03 * np.linalg.norm(exact)


# -- extremes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,values", [("zero", "fp32"), ("constant", "fp16"), ("denormal", "fp32"), ("mixed", "fp32"), ("huge", "fp16")]
)
def test_finite_gradients_give_finite_results_in_all_phases(kind: Any, values: str) -> None:
    net = Trial(hvdcompress.get_method("gradiveq", **PAPER, values=values, feedback="plain"), 3)
    for step in range(8):
        given = [numbers(SHAPE, rank, step, kind=kind) for rank in range(3)]
        out = net.allreduce(given, "w", op="sum")[0]
        arrays = [out, *(net.residual("w", rank) for rank in range(3)), *net.ranks[0].states["w"].slots.values()]
        assert all(np.isfinite(array).all() for array in arrays)
        if kind in ("zero", "constant"):
            np.testing.assert_allclose(out, sum(given), rtol=5e-3)
            assert step < 3 or int(net.ranks[0].states["w"].slots["rank"][0]) == 1


def test_projection_larger_than_its_elements_stays_finite() -> None:
    """A projection is limited to float32's range."""
    net = trained(3, lam=0.5)
    ones = np.sign(np.tile(basis(net)[:, 0], 3)).astype(np.float32) * np.float32(1e38)
    given = [matrices.stored_order(ones, SPEC, reference).reshape(SHAPE)] * 3
    assert np.isfinite(net.allreduce(given, "w")[0]).all()


def test_huge_gradients_in_the_span_come_back() -> None:
    """Sums of 8 projections of 768 elements of 2e37 exceed float32; the gradients they represent do not."""
    shape = (16, 16, 3, 3)
    net = trained(8, shape, slice_elements=768, matrix_rank=2)
    direction = basis(net)[:, 0].astype(np.float64)
    given = np.tile(direction / np.abs(direction).max() * 2e37, 3).astype(np.float32)
    given = matrices.stored_order(given, TensorSpec("w", shape), reference).reshape(shape)
    np.testing.assert_allclose(net.allreduce([given] * 8, "w")[0], given, atol=1e33)


@pytest.mark.parametrize("d", [0, 4, 2**31 + 5])
def test_broadcast_with_a_wrong_number_of_components_is_refused(d: int) -> None:
    method = hvdcompress.get_method("gradiveq", **PAPER)
    ctx = Context(0, 1, 3, SPEC, phase=1)
    fitting = method.fit_basis(numbers((96,), 1), ctx, Workspace(reference))  # type: ignore[attr-defined]
    bad = next(fitting).make().copy()
    bad[:4] = np.frombuffer(d.to_bytes(4, "little"), np.uint8)
    with pytest.raises(WireError, match=r"tensor 'w'.*components"):
        fitting.send(bad)
