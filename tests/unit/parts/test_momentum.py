"""The equations of ``parts/momentum.py`` in float64, against optimizers without momentum, and ``without_momentum``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Sparse
from hvdcompress.optimizers import SGD, without_beta1
from hvdcompress.parts.momentum import MAX_WAIT, Filter, Momentum, adapts, cancelling_filter, shares
from tests.installed import needs

STEPS, SIZE = 30, 40
TOPK = hvdcompress.get("topk", optimizer_momentum="cancel")


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
    method = TOPK
    filters = [
        cancelling_filter(method, Momentum(factor, rate, 1.0 if step == 0 else rate, options.get("nesterov", False)))
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
    filters = [cancelling_filter(TOPK, Momentum(factor, rate, rate, nesterov)) for rate in rates]
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

    method = TOPK
    reduced = drawn(2)
    parameter = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
    moved, decay = np.ones(SIZE), np.zeros(SIZE)
    for s, u in zip(reduced, filtered(reduced, [cancelling_filter(method, Momentum(0.9))] * STEPS), strict=True):
        parameter.grad = torch.from_numpy(u.copy())
        sgd.step()
        decay = 0.9 * decay + 0.01 * moved
        moved = moved - 0.1 * (s / (1.0 - 0.9) + decay)
        np.testing.assert_allclose(parameter.detach().numpy(), moved, rtol=1e-11, atol=1e-13)


def test_a_methods_own_momentum_is_not_counted_twice() -> None:
    """DGC and feedback "momentum" have grown their sums by 1/(1 − m) already."""
    for method in (hvdcompress.get("dgc", momentum=0.9), hvdcompress.get("topk", feedback="momentum", momentum=0.9)):
        assert cancelling_filter(method, Momentum(0.9)).gain == pytest.approx(1.0)
        assert cancelling_filter(method, Momentum(0.5)).gain == pytest.approx(0.2)
    assert cancelling_filter(TOPK, Momentum(0.5)).gain == pytest.approx(2.0)


def test_sparse_methods_keep_no_dense_vector() -> None:
    """What is kept for a sparse method has as many elements as the result has, and of PowerSGD the two factors."""
    gradients = [np.random.default_rng(rank).standard_normal((100, 100)).astype(np.float32) for rank in range(2)]
    nets = {id: Loopback(id, world_size=2, optimizer=SGD(0.9)) for id in ("topk", "scalecom", "gtopk", "powersgd")}
    for net in nets.values():
        for _ in range(2):
            net.allreduce(gradients, name="w")
    for id in ("topk", "scalecom", "gtopk"):
        (piece,) = nets[id].ranks[0].states["w"].momentum.content
        assert isinstance(piece, Sparse) and len(piece.values) <= 200, id
    (piece,) = nets["powersgd"].ranks[0].states["w"].momentum.content
    assert piece.left.size == piece.right.size == 200


def shares_of(waits: list[int], factor: float, spread: float) -> list[float]:
    """The module's formula, by its sum."""
    found = []
    for wait in waits:
        w = min(wait * spread, 1.0 / (1.0 - factor))
        found.append(max(0.0, 1.0 - (1.0 - factor**w) / (w * (1.0 - factor))))
    return found


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.99])
def test_shares_by_waits(factor: float) -> None:
    """Nothing of what arrives in every step, more with each step of waiting, never more than after 1/(1 − μ) steps."""
    found = shares(factor, 1.0)
    direct = [1.0 - sum(factor**a for a in range(w)) / w for w in range(1, len(found) + 1)]
    np.testing.assert_allclose(found, direct, atol=1e-6)
    assert found[0] == 0.0 and (np.diff(found) > 0).all() and len(found) == round(1 / (1 - factor))
    np.testing.assert_allclose(shares(factor, 1.75), shares_of(range(1, len(found) + 1), factor, 1.75), atol=1e-6)


@pytest.mark.parametrize("form", ["sparse", "dense", "mixed"])
def test_momentum_is_adapted_to_how_long_elements_waited(form: str) -> None:
    """By hand: the share of each element without momentum, the others' with it; in a bucket of two tensors. "dense": an
    optimizer with Nesterov's momentum, for which a dense vector is kept; "mixed": tensors of different momentum."""
    random = np.random.default_rng(0)
    size, steps, nesterov = 400, 40, form == "dense"
    factors = {"a": 0.9, "b": 0.5 if form == "mixed" else 0.9}
    settings = {"density": 0.05, "min_elements": 1, "bucket_elements": 1000}
    net, plain = Loopback("topk", world_size=3, **settings), Loopback("topk", world_size=3, **settings)
    for rank in net.ranks:
        rank.optimizer = lambda name: Momentum(factors[name], nesterov=nesterov)
    arrived = {name: np.zeros(size, int) for name in "ab"}
    buffer = {name: np.zeros(size) for name in "ab"}
    scales = np.geomspace(0.05, 1.0, size)
    for step in range(1, steps + 1):
        given = [{name: (random.standard_normal(size) * scales).astype(np.float32) for name in "ab"} for _ in range(3)]
        got, reduced = net.allreduce_many(given)[0], plain.allreduce_many(given)[0]
        sent = sum(int(round(0.05 * size)) for _ in range(6))
        spread = max(1.0, round(8 * 3 * sum(np.count_nonzero(reduced[name]) for name in "ab") / sent) / 8)
        for name, factor in factors.items():
            s = reduced[name].astype(np.float64)
            share = np.array(shares_of(list(step - arrived[name]), factor, spread))
            gain, decay = 1.0 / (1.0 - factor), 0.0
            if nesterov:
                gain, decay = gain / (1.0 + factor), factor / (1.0 + factor)
            new = gain * share * s + decay * buffer[name]
            want = (1.0 - share) * s + new - factor * buffer[name]
            np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5, err_msg=f"step {step}, {name}")
            buffer[name] = new
            arrived[name][s != 0] = step


def test_what_is_not_sparse_waits_as_its_method_says() -> None:
    """PowerSGD and signSGD have a share of their own; what sends nearly all keeps its momentum, as does what is told
    to. A method's own momentum is a matter of "cancel"."""
    known = shares(0.9, 1.0)
    for id in ("powersgd", "signsgd"):
        method = hvdcompress.get(id)
        assert adapts(method) and cancelling_filter(method, Momentum(0.9)).share == pytest.approx(
            known[method.delay - 1]
        )
    for id in ("fft", "qsgd"):
        assert not adapts(hvdcompress.get(id, feedback="plain"))
        assert adapts(hvdcompress.get(id, feedback="plain", optimizer_momentum="cancel"))
    assert not adapts(hvdcompress.get("topk", optimizer_momentum="keep"))
    assert cancelling_filter(hvdcompress.get("dgc"), Momentum(0.9)).share == 1.0


def test_steps_are_told_apart_for_ever() -> None:
    """Stamps of steps repeat after 256: an element that has waited longer is still one that has waited long."""
    net = Loopback("topk", world_size=1, optimizer=SGD(0.9), density=0.5, min_elements=1)
    for step in range(1, 600):
        net.allreduce([np.array([1.0, 0.0], np.float32)], name="w")  # the second element never arrives
        state = net.ranks[0].states["w"]
        assert min(step, MAX_WAIT) <= (state.step - state.momentum.arrived.astype(int))[1] % 256 < 128


def test_clip_norm_is_that_of_the_gradients_themselves() -> None:
    """The norm of all tensors together is clipped before momentum is cancelled; ``gradient_norm`` is the one before."""
    random = np.random.default_rng(0)
    steps = [
        [{name: random.standard_normal(2000).astype(np.float32) for name in "ab"} for _ in range(2)] for _ in range(5)
    ]
    settings = {"density": 0.1, "optimizer_momentum": "cancel", "rules": [{"match": {"name": "b"}, "method": "none"}]}
    clipped, plain = (
        Loopback("topk", world_size=2, optimizer=SGD(0.9), **settings, **clip) for clip in ({"clip_norm": 2.0}, {})
    )
    kept = Loopback("topk", world_size=2, **settings)
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
        Loopback("topk", world_size=2, clip_norm=0)


def test_without_beta1() -> None:
    """Of Adam and its relatives in PyTorch and Keras, once; SGD and what describes it are left as they are."""
    needs("torch")
    import torch

    weight = torch.nn.Parameter(torch.zeros(3))
    adam = torch.optim.AdamW([weight], betas=(0.9, 0.95))
    assert without_beta1(adam).startswith("AdamW with beta1 = 0.9: beta1 is 0 from now on")
    assert adam.param_groups[0]["betas"] == (0.0, 0.95) and without_beta1(adam) == ""
    inner = SimpleNamespace(beta_1=0.8)  # as Keras' LossScaleOptimizer has one
    assert without_beta1(SimpleNamespace(inner_optimizer=inner)) and inner.beta_1 == 0.0
    for other in (None, SGD(0.9), torch.optim.SGD([weight], lr=0.1, momentum=0.9)):
        assert without_beta1(other) == ""
    assert other.param_groups[0]["momentum"] == 0.9


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
