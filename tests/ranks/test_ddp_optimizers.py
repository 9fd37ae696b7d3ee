"""Tests of the DDP driver with optimizers: their momentum, GradScaler, and Adam under ``auto``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.engine.fallback import Verdict
from tests.ranks.checks import assert_close, assert_same_on_all_ranks
from tests.ranks.ddp_model import SHAPES
from tests.ranks.drivers.ddp import Net
from tests.ranks.torch_nets import CANCELLED, assert_momentum_buffer

pytestmark = pytest.mark.drivers("ddp")


def train_with_grad_scaler(driver, groups):
    """Train a small net with other options for each parameter; return the weights.

    One rank overflows in step 5. The optimizer is not called in steps 3 and 7. Gradients are clipped.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    model = DistributedDataParallel(net)
    options = [{"params": [p], **group} for p, group in zip(model.parameters(), groups, strict=True)]
    optimizer = torch.optim.SGD(options, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel", "clip_norm": 0.3}
    compressor = ddp.attach(model, "topk", optimizer=optimizer, loss_scale=scaler.get_scale, **settings)
    norms, generator = [], torch.Generator().manual_seed(driver.rank)
    for step in range(10):
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        overflows = step == 5 and driver.rank == driver.world_size - 1
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        if step != 5 and "momentum" not in groups[0]:
            norms.append(compressor.gradient_norm())
            clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) / scaler.get_scale()
            assert abs(clipped - min(0.3, norms[-1])) < 1e-4, step
        if step not in (3, 7):
            scaler.step(optimizer)
            scaler.update()
    assert compressor.ledger.steps == 9, "the step with an overflow is undone"
    assert not norms or max(norms) > 0.3
    weights = {name: p.detach().numpy() for name, p in net.named_parameters()}
    assert_same_on_all_ranks(weights, driver.gather, "weights")
    return weights


def test_cancelled_momentum_trains_as_an_optimizer_without_momentum(driver):
    """Heavy ball, dampening, Nesterov and another factor, with ``clip_norm`` under a GradScaler and skipped steps."""
    options = [
        {"momentum": 0.9, "lr": 0.05},
        {"momentum": 0.9, "dampening": 0.5, "lr": 0.1},
        {"momentum": 0.9, "nesterov": True, "lr": 0.05},
        {"momentum": 0.5, "lr": 0.25},
    ]
    got, want = (train_with_grad_scaler(driver, groups) for groups in (options, [{"lr": 0.5}] * 4))
    assert_close(got, want, (1e-5, 1e-5), "weights")


def train(model, optimizer, gradient):
    """Do a step of a linear layer in which all elements of the gradient are equal."""
    optimizer.zero_grad()
    (model(torch.ones(1, 64)) * gradient).sum().backward()
    optimizer.step()


class OwnSGD(torch.optim.SGD):
    """An optimizer of the user's, with its own ``step``."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("is_own_class", [False, True])
def test_momentum_buffer_is_followed_through_unusual_steps(driver, is_own_class):
    """Optimizer steps without a gradient or with zeros, backward passes without an optimizer step, and pauses."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    weight = model.module.weight
    optimizer = (OwnSGD if is_own_class else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    compressor = ddp.attach(model, "topk", optimizer=optimizer, **CANCELLED)
    for step in range(8):
        if step in (2, 6):
            optimizer.zero_grad()
            optimizer.step()
        if step == 4:
            weight.grad.zero_()
            optimizer.step()
        if step in (3, 7):
            model(torch.ones(1, 64)).sum().backward()  # as a GradScaler that skips a step
        if step in (5, 6):
            with compressor.paused():
                train(model, optimizer, 0.0)
        train(model, optimizer, step + 1.0)
        assert_momentum_buffer(optimizer, weight, 10.0 * (step + 1), f"step {step}")
    compressor.close()


def test_optimizer_is_found_at_its_first_step(driver):
    """Without ``optimizer=``, the buffer keeps its first gradient. A new optimizer replaces the old one."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    ddp.attach(model, "topk", **CANCELLED)
    for number in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            train(model, optimizer, step + 1.0)
            want = 10.0 * (step + 1) + 0.9**step if step else 1.0
            assert_momentum_buffer(optimizer, model.module.weight, want, f"optimizer {number}, step {step}")


def test_momentum_of_a_parameter_that_is_frozen_for_some_steps(driver):
    """All elements are sent, so the weights are as without compression."""
    finals = []
    for attached in (False, True):
        net = Net({"a": (40, 40), "b": (40, 40)})
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if attached:
            ddp.attach(model, "topk", density=1.0, min_elements=1, optimizer=optimizer)
        for step in range(8):
            net.b.requires_grad_(step < 2 or step >= 6)
            optimizer.zero_grad()
            model(dict.fromkeys("ab", np.ones((40, 40)))).backward()
            optimizer.step()
        finals.append({name: parameter.detach().numpy() for name, parameter in net.named_parameters()})
    assert_close(*finals, (1e-4, 1e-4), "as without compression")


@pytest.mark.parametrize(
    "optimizer_class,method,betas",
    [("SGD", "auto", None), ("AdamW", "auto", (0.0, 0.999)), ("Adam", "powersgd", (0.9, 0.999))],
)
def test_auto_sets_beta1_of_adam_to_zero(driver, optimizer_class, method, betas):
    """Not with a method that the user has chosen. Other settings of the plan stay."""
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = getattr(torch.optim, optimizer_class)(model.parameters(), lr=0.1)
    compressor = ddp.attach(model, {"method": method, "min_elements": 7}, optimizer=optimizer, fallback=False)
    assert (compressor.plan.min_elements, compressor.plan.fallback) == (7, False)
    assert optimizer.param_groups[0].get("betas") == betas


def test_beta1_of_adam_is_restored_when_compression_ends(driver):
    """Also when such a state is loaded, before or after the optimizer is given."""
    handle = driver.make("auto", {"min_elements": 7}, SHAPES)
    optimizer = torch.optim.Adam(handle.model.parameters(), betas=(0.8, 0.99))
    handle.use_optimizer(optimizer)
    handle.reduce(driver.gradients(0, SHAPES))
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.99)
    fallback = handle.local.fallback
    fallback.verdict, fallback.num_flushed = Verdict.FLUSH, 99  # as after comparing the first steps, before the end
    handle.reduce(driver.gradients(0, SHAPES))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    for given_before in (True, False):
        model = DistributedDataParallel(Net(SHAPES))
        optimizer = torch.optim.Adam(model.parameters())
        other = ddp.attach(model, "auto", optimizer=optimizer if given_before else None, min_elements=7)
        other.load_state_dict(handle.state_dict())
        other.use_optimizer(optimizer)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
