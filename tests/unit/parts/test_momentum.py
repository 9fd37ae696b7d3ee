"""Adapted and cancelled momentum, compared with the equations of ``parts/momentum.py``, and ``without_momentum``.

``test_cancelled_momentum_trains_as_an_optimizer_without_momentum`` in ``tests/ranks`` compares PyTorch's and Keras'
optimizers: heavy ball, dampening, Nesterov, changing learning rates, ``clip_norm`` and skipped steps.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD, without_beta1
from hvdcompress.parts.momentum import MAX_WAIT, Filter, Momentum, adapts, cancelling_filter, shares

TOPK = hvdcompress.get("topk", optimizer_momentum="cancel")


def test_buffer_decays_in_a_step_with_a_learning_rate_of_zero() -> None:
    """The buffer of Keras' SGD contains the learning rate, so it takes up nothing of the gradient."""
    assert cancelling_filter(TOPK, Momentum(0.9, 0.0, 0.0)) == Filter(gain=0.0, decay=0.9, factor=0.9, entry=1.0)


@pytest.mark.parametrize("id,options", [("dgc", {}), ("topk", {"feedback": "momentum"})])
def test_momentum_of_the_method_is_not_counted_twice(id: str, options: dict) -> None:
    """DGC and feedback "momentum" have grown their sums by 1/(1 − m) already."""
    found = cancelling_filter(hvdcompress.get(id, momentum=0.9, **options), Momentum(0.5))
    assert found.gain == pytest.approx(0.2) and found.share == 1.0


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


def test_wrong_clip_norm_and_a_norm_that_is_unknown_are_errors() -> None:
    with pytest.raises(RuntimeError, match="clip_norm"):
        Loopback("topk", world_size=2).gradient_norm()
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
