"""The equations of ``parts/momentum.py`` in float64, against optimizers without momentum, and ``without_momentum``."""

from __future__ import annotations

import numpy as np
import pytest
from installed import needs

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Sparse
from hvdcompress.optimizers import SGD
from hvdcompress.parts.momentum import Filter, Momentum, cancelling

STEPS, SIZE = 30, 40


def filtered(reduced: list[np.ndarray], filters: list[Filter]) -> list[np.ndarray]:
    """What an optimizer is handed, by the recursion of the module's docstring in float64."""
    buffer, found = np.zeros(SIZE), []
    for s, one in zip(reduced, filters, strict=True):
        new = one.gain * s + one.decay * buffer
        found.append((new - one.factor * buffer) / one.entry)
        buffer = new
    return found


def drawn(seed: int = 0) -> list[np.ndarray]:
    """Sparse reduced gradients."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(SIZE) * (random.random(SIZE) < 0.2) for _ in range(STEPS)]


@pytest.mark.parametrize("fused", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.5},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.99, "nesterov": True},
    ],
    ids=str,
)
def test_pytorchs_sgd_moves_as_without_momentum(options: dict, fused: dict) -> None:
    """Heavy ball, dampening with its first step, and Nesterov, under a rate that changes between steps."""
    needs("torch")
    import torch

    factor, dampening = options["momentum"], options.get("dampening", 0.0)
    rate = 1.0 - dampening
    method = hvdcompress.get("topk")
    filters = [
        cancelling(method, Momentum(factor, rate, 1.0 if step == 0 else rate, options.get("nesterov", False)))
        for step in range(STEPS)
    ]
    reduced = drawn()
    with_it, without = (torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64)) for _ in range(2))
    sgd = torch.optim.SGD([with_it], lr=0.1, **options, **fused)
    plain = torch.optim.SGD([without], lr=0.1 * rate / (1.0 - factor))
    for step, (s, u) in enumerate(zip(reduced, filtered(reduced, filters), strict=True)):
        sgd.param_groups[0]["lr"] = 0.1 / (1 + step % 3)
        plain.param_groups[0]["lr"] = 0.1 / (1 + step % 3) * rate / (1.0 - factor)
        with_it.grad, without.grad = torch.from_numpy(u.copy()), torch.from_numpy(s.copy())
        sgd.step()
        plain.step()
        np.testing.assert_allclose(with_it.detach().numpy(), without.detach().numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
def test_kerass_sgd_moves_as_without_momentum(nesterov: bool) -> None:
    """The buffer contains the learning rate, which a schedule changes, to 0 in one step."""
    reduced, factor = drawn(1), 0.9
    rates = [0.1 * 0.9**step if step != 7 else 0.0 for step in range(STEPS)]
    filters = [cancelling(hvdcompress.get("topk"), Momentum(factor, rate, rate, nesterov)) for rate in rates]
    moved, buffer, plain, excess = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for s, u, rate in zip(reduced, filtered(reduced, filters), rates, strict=True):
        if rate == 0.0:  # nothing that is handed over has an effect: the buffer is applied once more
            excess = factor * factor * buffer if nesterov else factor * buffer
        buffer = factor * buffer + rate * u
        moved += rate * u + factor * buffer if nesterov else buffer
        plain += rate / (1.0 - factor) * s
        if rate == 0.0:
            plain += excess
        np.testing.assert_allclose(moved, plain, rtol=1e-11, atol=1e-13)


def test_weight_decay_keeps_its_momentum() -> None:
    """The optimizer adds weight decay to what it is handed: that part of the buffer decays as ever."""
    needs("torch")
    import torch

    method = hvdcompress.get("topk")
    reduced = drawn(2)
    parameter = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
    moved, decay = np.ones(SIZE), np.zeros(SIZE)
    for s, u in zip(reduced, filtered(reduced, [cancelling(method, Momentum(0.9))] * STEPS), strict=True):
        parameter.grad = torch.from_numpy(u.copy())
        sgd.step()
        decay = 0.9 * decay + 0.01 * moved
        moved = moved - 0.1 * (s / (1.0 - 0.9) + decay)
        np.testing.assert_allclose(parameter.detach().numpy(), moved, rtol=1e-11, atol=1e-13)


def test_a_methods_own_momentum_is_not_counted_twice() -> None:
    """DGC and feedback "momentum" have grown their sums by 1/(1 − m) already."""
    for method in (hvdcompress.get("dgc"), hvdcompress.get("topk", feedback="momentum", momentum=0.9)):
        assert cancelling(method, Momentum(0.9)).gain == pytest.approx(1.0)
        assert cancelling(method, Momentum(0.5)).gain == pytest.approx(0.2)
    assert cancelling(hvdcompress.get("topk"), Momentum(0.5)).gain == pytest.approx(2.0)


def test_sparse_methods_keep_no_dense_vector() -> None:
    """What is kept for a sparse method has as many elements as the result has, and of PowerSGD the two factors."""
    gradients = [np.random.default_rng(rank).standard_normal((100, 100)).astype(np.float32) for rank in range(2)]
    nets = {id: Loopback(id, world=2, optimizer=SGD(0.9)) for id in ("topk", "scalecom", "gtopk", "powersgd")}
    for net in nets.values():
        for _ in range(2):
            net.allreduce(gradients, name="w")
    for id in ("topk", "scalecom", "gtopk"):
        (piece,) = nets[id].ranks[0].states["w"].momentum
        assert isinstance(piece, Sparse) and len(piece.values) <= 200, id
    (piece,) = nets["powersgd"].ranks[0].states["w"].momentum
    assert piece.left.size == piece.right.size == 200


def test_clip_norm_is_that_of_the_gradients_themselves() -> None:
    """The norm of all tensors together is clipped before momentum is cancelled; ``gradient_norm`` is the one before."""
    random = np.random.default_rng(0)
    steps = [
        [{name: random.standard_normal(2000).astype(np.float32) for name in "ab"} for _ in range(2)] for _ in range(5)
    ]
    settings = {"density": 0.1, "rules": [{"match": {"name": "b"}, "method": "none"}]}
    clipped, plain = (
        Loopback("topk", world=2, optimizer=SGD(0.9), **settings, **clip) for clip in ({"clip_norm": 2.0}, {})
    )
    kept = Loopback("topk", world=2, **settings)
    buffer = {name: np.zeros(2000) for name in "ab"}
    for given in steps:
        u, s = clipped.allreduce_many(given)[0], kept.allreduce_many(given)[0]
        norm = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in s.values()))
        assert clipped.gradient_norm() == pytest.approx(norm, rel=1e-5) and norm > 2.0
        buffer = {name: 0.9 * buffer[name] + u[name] for name in "ab"}
        np.testing.assert_allclose(buffer["a"], 10.0 * s["a"] * 2.0 / norm, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(u["b"], s["b"] * 2.0 / norm, rtol=1e-5)
    with pytest.raises(RuntimeError, match="clip_norm"):
        plain.gradient_norm()
    with pytest.raises(ValueError, match="clip_norm"):
        Loopback("topk", world=2, clip_norm=0)


def test_without_momentum() -> None:
    """SGD at the same effective rate, Adam with beta1 = 0; refused after a scheduler, and for other optimizers."""
    needs("torch")
    import torch

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
