"""``_torch/optimizers.py``, in float64: each step, compared with an optimizer that gets late gradients at once.

The reference applies the share c of a gradient with its whole weight in one step, and gives the rest to a plain
optimizer. Drivers are tested in ``tests/ranks``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from hvdcompress import get_method
from hvdcompress.engine.late import Late
from hvdcompress.method import TensorSpec
from hvdcompress.plan import plan_of

torch = pytest.importorskip("torch")
pytest.importorskip("hvdcompress._torch.optimizers")
from hvdcompress._torch import optimizers  # noqa: E402

SHAPE = (6, 4)
SPEC = TensorSpec("w", SHAPE, "float64")
MOMENTUM = {"feedback": "momentum", "momentum": 0.6}
SPARSE = get_method("topk", density=0.5)
DENSE = get_method("powersgd")
OWN = get_method("topk", density=0.5, **MOMENTUM)


def late_of(method: Any, step: int) -> tuple[Late, np.ndarray]:
    """Return what an exchange has sent in a step, and the share c of each element for momentum 0.9 or beta1 0.9."""
    (bucket,) = plan_of(method, min_elements=1).buckets([SPEC])
    if not method.sparse:
        return Late(bucket, method), np.ones(SHAPE)
    random = np.random.default_rng(step)
    index = np.sort(random.permutation(24)[:10])
    ages = random.integers(1, 12, 24).astype(np.int8)
    sent = np.zeros(24)
    sent[index] = 1.0
    return Late(bucket, method, [index], [ages[index]], spread=1.375), sent.reshape(SHAPE)


class Training:
    """A parameter, an optimizer and the gradients of some steps."""

    def __init__(self, make: Any):
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(SHAPE, dtype=torch.float64))
        self.optimizer = make([self.weight])

    def step(self, gradient: Any, late: Late | None) -> None:
        self.weight.grad = torch.tensor(gradient)
        waiting = {} if late is None else {id(self.weight): optimizers.Waiting(late, 0, 0, 24)}
        with optimizers.adapted(self.optimizer, waiting):
            self.optimizer.step()


def share_of(late: Late, sent: np.ndarray, moment: Any) -> np.ndarray:
    """Return c as a dense array."""
    index, ages = late.part(0)
    values, share = late.values(np.ones(24), index, ages, moment)
    dense = np.zeros(24)
    dense[slice(None) if index is None else index] = share * values
    return dense.reshape(SHAPE)


def gradients(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.standard_normal(SHAPE) for _ in range(count)]


def test_hooks_are_registered_once() -> None:
    module = import_module("torch.optim.optimizer")
    training = Training(torch.optim.SGD)
    counts = []
    for gradient in gradients(3):
        training.step(gradient, None)
        counts.append(len(module._global_optimizer_pre_hooks))
    assert counts[0] == counts[2] >= 1


SGD_OPTIONS = [
    {},
    {"dampening": 0.3},
    {"nesterov": True},
    {"weight_decay": 0.1},
    {"dampening": 0.3, "weight_decay": 0.1},
    {"dampening": 0.3, "weight_decay": 0.1, "maximize": True},
    {"nesterov": True, "foreach": True},
    {"fused": True, "nesterov": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("method", [SPARSE, DENSE, OWN], ids=["sparse", "dense", "own momentum"])
@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_applies_late_gradients_at_once(options: dict[str, Any], method: Any) -> None:
    """Also while a schedule changes rate and momentum, and in steps without anything late."""
    ours = Training(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, **options))
    plain = Training(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, **options))
    own = 0.4 if method is OWN else 1.0
    for step, gradient in enumerate(gradients(8)):
        momentum, rate = (0.9, 0.1) if step % 3 else (0.7, 0.05)
        for each in (ours, plain):
            each.optimizer.param_groups[0].update(momentum=momentum, lr=rate)
        late, sent = late_of(method, step)
        late = None if step == 4 else late
        share = share_of(late, sent, optimizers._sgd(ours.optimizer.param_groups[0], {})) if late else np.zeros(SHAPE)
        ours.step(gradient, late)
        plain.step((1.0 - share) * gradient, None)
        weight = (1.0 - options.get("dampening", 0.0)) / (1.0 - momentum)
        sign = -1.0 if options.get("maximize") else 1.0
        with torch.no_grad():
            plain.weight -= rate * sign * own * weight * torch.tensor(share * gradient)
        np.testing.assert_allclose(ours.weight.detach(), plain.weight.detach(), rtol=1e-12, atol=1e-13)
        buffers = [each.optimizer.state[each.weight]["momentum_buffer"] for each in (ours, plain)]
        np.testing.assert_allclose(*buffers, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RAdam", "Adamax"])
@pytest.mark.parametrize("method", [SPARSE, DENSE, OWN], ids=["sparse", "dense", "own momentum"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"foreach": True}], ids=str)
def test_adam_and_relatives_apply_late_gradients_at_once(name: str, method: Any, options: dict[str, Any]) -> None:
    """A step equals that of a plain optimizer whose average has the other gradients, and the late ones at once.

    Its own first step makes the average, so there a method's own momentum is not taken into account.
    """
    ours = Training(lambda p: getattr(torch.optim, name)(p, lr=0.1, **options))
    own = 0.4 if method is OWN else 1.0
    sign = -1.0 if "maximize" in options else 1.0
    average = np.zeros(SHAPE)  # of the gradients that are not late
    for step, gradient in enumerate(gradients(6), 1):
        beta1 = 0.9 if step % 2 else 0.6
        late, sent = late_of(method, step)
        late = None if step == 4 else late
        at_once = sign * gradient * (sent if late else 0.0)
        decay = 0.1 * ours.weight.detach().numpy() if "weight_decay" in options and name != "AdamW" else 0.0
        correction = 1.0 - beta1**step
        average = beta1 * average + (1.0 - beta1) * (sign * gradient + decay - at_once)
        used = average + own * correction * at_once
        plain = Training(lambda p: getattr(torch.optim, name)(p, lr=0.1, **options))
        with torch.no_grad():
            plain.weight.copy_(ours.weight)
        if step > 1:
            plain.optimizer.state[plain.weight] = {k: v.clone() for k, v in ours.optimizer.state[ours.weight].items()}
            before = (used - (1.0 - beta1) * (sign * gradient + decay)) / beta1
            plain.optimizer.state[plain.weight]["exp_avg"] = torch.tensor(before)
        for each in (ours, plain):
            each.optimizer.param_groups[0]["betas"] = (beta1, 0.99)
        ours.step(gradient, late)
        plain.step(gradient, None)
        np.testing.assert_allclose(ours.weight.detach(), plain.weight.detach(), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(ours.optimizer.state[ours.weight]["exp_avg"], average, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", [SPARSE, DENSE, OWN], ids=["sparse", "dense", "own momentum"])
def test_muon_applies_late_gradients_at_once(method: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives to its Newton-Schulz iteration, which works in bfloat16."""
    module = pytest.importorskip("torch.optim._muon")
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", lambda update, *_: update)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.0}
    ours, plain = (Training(lambda p: torch.optim.Muon(p, **options)) for _ in range(2))
    own = 0.4 if method is OWN else 1.0
    for step, gradient in enumerate(gradients(6)):
        late, sent = late_of(method, step)
        share = share_of(late, sent, optimizers._muon(ours.optimizer.param_groups[0], {}))
        ours.step(gradient, late)
        before = plain.weight.detach().clone()
        plain.step((1.0 - share) * gradient, None)
        with torch.no_grad():  # the rate that Muon has used
            rate = 0.1 * max(1.0, SHAPE[0] / SHAPE[1]) ** 0.5
            plain.weight -= rate * own * torch.tensor(share * gradient)
        assert not torch.equal(before, plain.weight)
        np.testing.assert_allclose(ours.weight.detach(), plain.weight.detach(), rtol=1e-11, atol=1e-12)
