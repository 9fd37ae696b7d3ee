"""The equations of ``parts/momentum.py`` in float64, against optimizers without momentum, and ``without_momentum``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD, without_beta1
from hvdcompress.parts.momentum import MAX_WAIT, Filter, Momentum, adapts, cancelling_filter, shares

STEPS, SIZE = 30, 40
TOPK = hvdcompress.get("topk", optimizer_momentum="cancel")


def filtered(reduced: list[np.ndarray], filters: list[Filter]) -> list[np.ndarray]:
    """Return the gradients that the optimizer receives, by the recursion of the module's docstring in float64."""
    buffer, found = np.zeros(SIZE), []
    for s, one in zip(reduced, filters, strict=True):
        new = one.gain * s + one.decay * buffer
        found.append((new - one.factor * buffer) / one.entry)
        buffer = new
    return found


@pytest.fixture
def reduced() -> list[np.ndarray]:
    """Sparse reduced gradients."""
    random = np.random.default_rng(0)
    return [random.standard_normal(SIZE) * (random.random(SIZE) < 0.2) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.3}, {"momentum": 0.99, "nesterov": True}],
    ids=str,
)
def test_pytorch_sgd_moves_as_without_momentum(options: dict, reduced: list[np.ndarray]) -> None:
    """Heavy ball, dampening with its first step, and Nesterov, under a rate that changes between steps."""
    torch = pytest.importorskip("torch")
    factor, rate = options["momentum"], 1.0 - options.get("dampening", 0.0)
    filters = [
        cancelling_filter(TOPK, Momentum(factor, rate, 1.0 if step == 0 else rate, options.get("nesterov", False)))
        for step in range(STEPS)
    ]
    with_momentum, without = (torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64)) for _ in range(2))
    sgd = torch.optim.SGD([with_momentum], lr=0.1, **options)
    plain = torch.optim.SGD([without], lr=0.1 * rate / (1.0 - factor))
    for step, (s, u) in enumerate(zip(reduced, filtered(reduced, filters), strict=True)):
        sgd.param_groups[0]["lr"] = 0.1 / (1 + step % 3)
        plain.param_groups[0]["lr"] = 0.1 / (1 + step % 3) * rate / (1.0 - factor)
        with_momentum.grad, without.grad = torch.from_numpy(u.copy()), torch.from_numpy(s.copy())
        sgd.step()
        plain.step()
        np.testing.assert_allclose(with_momentum.detach().numpy(), without.detach().numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
def test_keras_sgd_moves_as_without_momentum(nesterov: bool, reduced: list[np.ndarray]) -> None:
    """The buffer contains the learning rate, which a schedule changes, to 0 in one step."""
    factor = 0.9
    rates = [0.1 * 0.9**step if step != 7 else 0.0 for step in range(STEPS)]
    filters = [cancelling_filter(TOPK, Momentum(factor, rate, rate, nesterov)) for rate in rates]
    moved, buffer, plain = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for s, u, rate in zip(reduced, filtered(reduced, filters), rates, strict=True):
        if rate == 0.0:  # the gradient has no effect: the buffer is applied once more
            plain += factor * factor * buffer if nesterov else factor * buffer
        buffer = factor * buffer + rate * u
        moved += rate * u + factor * buffer if nesterov else buffer
        plain += rate / (1.0 - factor) * s
        np.testing.assert_allclose(moved, plain, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("id,options", [("dgc", {}), ("topk", {"feedback": "momentum"})])
def test_momentum_of_the_method_is_not_counted_twice(id: str, options: dict) -> None:
    """DGC and feedback "momentum" have grown their sums by 1/(1 − m) already."""
    method = hvdcompress.get(id, momentum=0.9, **options)
    assert cancelling_filter(method, Momentum(0.9)).gain == pytest.approx(1.0)
    found = cancelling_filter(method, Momentum(0.5))
    assert found.gain == pytest.approx(0.2) and found.share == 1.0
    assert cancelling_filter(TOPK, Momentum(0.5)).gain == pytest.approx(2.0)


@pytest.mark.parametrize("id,sizes", [("topk", [200]), ("scalecom", [100]), ("gtopk", [100]), ("powersgd", [200, 200])])
def test_buffer_of_a_sparse_or_low_rank_result_is_small(id: str, sizes: list[int]) -> None:
    """It has at most as many elements as the result has, and of PowerSGD the two factors."""
    gradients = [np.random.default_rng(rank).standard_normal((100, 100)).astype(np.float32) for rank in range(2)]
    net = Loopback(id, world_size=2, optimizer=SGD(0.9))
    for _ in range(2):
        net.allreduce(gradients, name="w")
    (piece,) = net.ranks[0].states["w"].momentum.content
    found = [piece.left.size, piece.right.size] if id == "powersgd" else [len(piece.values)]
    assert all(size <= most for size, most in zip(found, sizes, strict=True))


def expected_share(wait: int, factor: float, spread: float) -> float:
    """Return the share of an element that was sent ``wait`` steps ago, by the module's formula."""
    w = min(wait * spread, 1.0 / (1.0 - factor))
    return max(0.0, 1.0 - (1.0 - factor**w) / (w * (1.0 - factor)))


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.99])
def test_shares_grow_with_the_wait(factor: float) -> None:
    """From 0 for an element that arrives in every step, up to the wait of 1/(1 − μ) steps."""
    found = shares(factor, 1.0)
    direct = [1.0 - sum(factor**a for a in range(w)) / w for w in range(1, len(found) + 1)]
    np.testing.assert_allclose(found, direct, atol=1e-6)
    assert found[0] == 0.0 and (np.diff(found) > 0).all() and len(found) == round(1 / (1 - factor))
    expected = [expected_share(w, factor, 1.75) for w in range(1, len(found) + 1)]
    np.testing.assert_allclose(shares(factor, 1.75), expected, atol=1e-6)


@pytest.mark.parametrize(
    "factors,nesterov",
    [({"a": 0.9, "b": 0.9}, False), ({"a": 0.9, "b": 0.9}, True), ({"a": 0.9, "b": 0.5}, False)],
)
def test_momentum_is_adapted_to_how_long_elements_waited(factors: dict[str, float], nesterov: bool) -> None:
    """In a bucket of two tensors. With Nesterov's momentum, a dense vector is kept."""
    random = np.random.default_rng(0)
    size = 400
    settings = {"density": 0.05, "min_elements": 1, "bucket_elements": 1000}
    net, plain = Loopback("topk", world_size=3, **settings), Loopback("topk", world_size=3, **settings)
    for rank in net.ranks:
        rank.optimizer = lambda name: Momentum(factors[name], nesterov=nesterov)
    arrived = {name: np.zeros(size, int) for name in factors}
    buffer = {name: np.zeros(size) for name in factors}
    scales = np.geomspace(0.05, 1.0, size)
    for step in range(1, 26):
        given = [
            {name: (random.standard_normal(size) * scales).astype(np.float32) for name in factors} for _ in range(3)
        ]
        got, reduced = net.allreduce_many(given)[0], plain.allreduce_many(given)[0]
        sent = 6 * round(0.05 * size)
        spread = max(1.0, round(8 * 3 * sum(np.count_nonzero(s) for s in reduced.values()) / sent) / 8)
        for name, factor in factors.items():
            s = reduced[name].astype(np.float64)
            share = np.array([expected_share(wait, factor, spread) for wait in step - arrived[name]])
            gain, decay = 1.0 / (1.0 - factor), 0.0
            if nesterov:
                gain, decay = gain / (1.0 + factor), factor / (1.0 + factor)
            new = gain * share * s + decay * buffer[name]
            want = (1.0 - share) * s + new - factor * buffer[name]
            np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5, err_msg=f"step {step}, {name}")
            buffer[name] = new
            arrived[name][s != 0] = step


@pytest.mark.parametrize("id", ["powersgd", "signsgd"])
def test_methods_that_send_all_elements_have_one_share(id: str) -> None:
    method = hvdcompress.get(id)
    assert cancelling_filter(method, Momentum(0.9)).share == pytest.approx(shares(0.9, 1.0)[method.delay - 1])


@pytest.mark.parametrize(
    "id,options,expected",
    [
        ("powersgd", {}, True),
        ("topk", {"optimizer_momentum": "keep"}, False),
        ("fft", {"feedback": "plain"}, False),  # it sends nearly all elements
        ("qsgd", {"feedback": "plain"}, False),
        ("qsgd", {"feedback": "plain", "optimizer_momentum": "cancel"}, True),
    ],
)
def test_methods_whose_momentum_is_adapted(id: str, options: dict, expected: bool) -> None:
    assert adapts(hvdcompress.get(id, **options)) == expected


def test_long_waits_do_not_wrap_around() -> None:
    """Stamps of steps repeat after 256: an element that has waited longer is still one that has waited long."""
    net = Loopback("topk", world_size=1, optimizer=SGD(0.9), density=0.5, min_elements=1)
    for step in range(1, 400):
        net.allreduce([np.array([1.0, 0.0], np.float32)], name="w")  # the second element never arrives
        state = net.ranks[0].states["w"]
        assert min(step, MAX_WAIT) <= (state.step - state.momentum.arrived.astype(int))[1] % 256 < 128


def test_clip_norm_is_applied_before_momentum_is_cancelled() -> None:
    """The norm is that of all tensors together; ``gradient_norm`` returns the norm before clipping."""
    random = np.random.default_rng(0)
    settings = {"density": 0.1, "optimizer_momentum": "cancel", "rules": [{"match": {"name": "b"}, "method": "none"}]}
    clipped = Loopback("topk", world_size=2, optimizer=SGD(0.9), clip_norm=2.0, **settings)
    kept = Loopback("topk", world_size=2, **settings)
    buffer = np.zeros(2000)
    for _ in range(3):
        given = [{name: random.standard_normal(2000).astype(np.float32) for name in "ab"} for _ in range(2)]
        u, s = clipped.allreduce_many(given)[0], kept.allreduce_many(given)[0]
        norm = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in s.values()))
        assert clipped.gradient_norm() == pytest.approx(norm, rel=1e-5) and norm > 2.0
        buffer = 0.9 * buffer + u["a"]
        np.testing.assert_allclose(buffer, 10.0 * s["a"] * 2.0 / norm, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(u["b"], s["b"] * 2.0 / norm, rtol=1e-5)
    with pytest.raises(RuntimeError, match="clip_norm"):
        kept.gradient_norm()
    with pytest.raises(ValueError, match="clip_norm"):
        Loopback("topk", world_size=2, clip_norm=0)


# -- optimizers.py ---------------------------------------------------------------------------------


def test_without_beta1() -> None:
    """It changes Adam and its relatives in PyTorch and Keras, once, and no other optimizer."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(3))
    adam = torch.optim.AdamW([weight], betas=(0.9, 0.95))
    assert without_beta1(adam).startswith("AdamW with beta1 = 0.9: beta1 is 0 from now on")
    assert adam.param_groups[0]["betas"] == (0.0, 0.95) and without_beta1(adam) == ""
    inner = SimpleNamespace(beta_1=0.8)  # as Keras' LossScaleOptimizer has one
    assert without_beta1(SimpleNamespace(inner_optimizer=inner)) and inner.beta_1 == 0.0
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    assert [without_beta1(other) for other in (None, SGD(0.9), sgd)] == ["", "", ""]
    assert sgd.param_groups[0]["momentum"] == 0.9


def test_without_momentum() -> None:
    """SGD at the same effective rate, Adam with beta1 = 0; refused after a scheduler, and for other optimizers."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(3))
    sgd = hvdcompress.without_momentum(torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5))
    group = sgd.param_groups[0]
    assert group["lr"] == pytest.approx(0.5) and not (group["momentum"] or group["dampening"] or group["nesterov"])
    adam = hvdcompress.without_momentum(torch.optim.AdamW([weight], betas=(0.9, 0.95)))
    assert adam.param_groups[0]["betas"] == (0.0, 0.95)
    late = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(late, 1)
    with pytest.raises(ValueError, match="scheduler"):
        hvdcompress.without_momentum(late)
    with pytest.raises(TypeError, match="neither momentum nor betas"):
        hvdcompress.without_momentum(torch.optim.Adagrad([weight]))
    with pytest.raises(ValueError, match="less than 1"):
        SGD(1.0)
