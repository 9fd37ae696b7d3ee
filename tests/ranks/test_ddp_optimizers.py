"""Tests of the DDP driver with optimizers: their momentum is adapted, and nothing else of them changes."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from tests.ranks.checks import assert_close, assert_same_on_all_ranks, logged
from tests.ranks.drivers.ddp import Net
from tests.ranks.torch_nets import CANCELLED, assert_momentum_buffer

pytestmark = pytest.mark.drivers("ddp")
SPARSE = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel"}


def new_model():
    torch.manual_seed(0)
    return DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    )


def losses(driver, model, count, scale=1.0):
    """Yield the losses of some steps. ``scale``: of the weights' gradients, by step."""
    generator = torch.Generator().manual_seed(driver.rank)
    for _ in range(count):
        x = torch.randn(16, 64, generator=generator)
        yield torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)) * scale


def weights_of(driver, model):
    weights = {name: p.detach().numpy().copy() for name, p in model.module.named_parameters()}
    assert_same_on_all_ranks(weights, driver.gather, "weights")
    return weights


def train_with_grad_scaler(driver, groups, fused):
    """Train a small net with other options for each parameter; return the weights.

    One rank overflows in step 5. The optimizer is not called in steps 3 and 7. Gradients are clipped.
    """
    model = new_model()
    options = [{"params": [p], **group} for p, group in zip(model.parameters(), groups, strict=True)]
    optimizer = torch.optim.SGD(options, lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    compressor = ddp.attach(model, "topk", loss_scale=scaler.get_scale, **SPARSE)
    norms = []
    for step, loss in enumerate(losses(driver, model, 10)):
        optimizer.zero_grad()
        overflows = step == 5 and driver.rank == driver.world_size - 1
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        if not fused:
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        if step not in (3, 7):
            scaler.step(optimizer)
        if not fused or step not in (3, 7):
            scaler.update()
    assert compressor.ledger.steps == 9, "the step with an overflow is undone"
    assert fused or len(set(driver.gather([float(each) for each in norms])[0])) > 1
    return weights_of(driver, model)


@pytest.mark.parametrize("fused", [False, True])
def test_cancelled_momentum_trains_as_an_optimizer_without_momentum(driver, fused):
    """Heavy ball, Nesterov, dampening and another factor, clipped under a GradScaler, with skipped steps. A fused step
    unscales the gradients itself, and is skipped inside."""
    options = [
        {"momentum": 0.9, "lr": 0.05},
        {"momentum": 0.9, "dampening": 0.0 if fused else 0.5, "lr": 0.05 if fused else 0.1},
        {"momentum": 0.9, "nesterov": True, "lr": 0.05},
        {"momentum": 0.5, "lr": 0.25},
    ]
    got, want = (train_with_grad_scaler(driver, groups, fused) for groups in (options, [{"lr": 0.5}] * 4))
    assert_close(got, want, (1e-5, 1e-5), "weights")


class OwnSGD(torch.optim.SGD):
    """A subclass without a step of its own."""


class OwnStep(torch.optim.SGD):
    """A subclass with a step of its own, which calls that of SGD."""

    def step(self, closure=None):
        return super().step(closure)


def with_closure(optimizer, loss_of):
    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def as_usual(optimizer, loss_of):
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def after_a_failure(optimizer, loss_of):
    """Take a step that fails, and then another one."""
    optimizer.zero_grad()
    loss_of().backward()
    kept = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = "wrong"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = kept
    optimizer.step()


STEPS = {
    "plain": (partial(torch.optim.SGD, momentum=0.9), as_usual),
    "closure": (partial(torch.optim.SGD, momentum=0.9), with_closure),
    "failure": (partial(torch.optim.SGD, momentum=0.9, foreach=False), after_a_failure),
    "foreach, Nesterov": (partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True), as_usual),
    "subclass": (partial(OwnSGD, momentum=0.9), with_closure),
    "ZeRO": (partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, momentum=0.9), as_usual),
}


@pytest.mark.parametrize("kind", ["plain", "closure", "failure", "foreach, Nesterov", "subclass", "ZeRO"])
def test_every_way_of_taking_a_step_is_adapted(driver, kind):
    """A step contains the reduced gradient at the effective rate, as without momentum."""
    results = []
    for make, step in (STEPS[kind], (torch.optim.SGD, as_usual)):
        model = new_model()
        optimizer = make(model.parameters(), lr=0.5 if make is torch.optim.SGD else 0.05)
        ddp.attach(model, "topk", **SPARSE)
        generated = losses(driver, model, 4)
        for _ in range(4):
            step(optimizer, lambda generated=generated: next(generated))
        results.append(weights_of(driver, model))
    assert_close(*results, (1e-4, 1e-5), kind)


def test_compiled_steps_equal_eager_ones(driver):
    results = []
    for compiles in (False, True):
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ddp.attach(model, "topk", **SPARSE)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for loss in losses(driver, model, 4):
            optimizer.zero_grad()
            loss.backward()
            step()
        results.append(weights_of(driver, model))
    assert_close(*results, (1e-4, 1e-5), "compiled")


def schedules(optimizer):
    """Do what programs do to optimizers while they train; yield before each step."""
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8)  # it cycles beta1, too
    yield
    rates.step()
    yield
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield
    late = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [late]})
    yield


@pytest.mark.parametrize("name,method", [("AdamW", "auto"), ("SGD", "topk"), ("RAdam", "powersgd")])
def test_no_parameter_group_is_changed(driver, name, method):
    """After each step they are those of a training without compression."""
    results = []
    for compresses in (True, False):
        model = new_model()
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        if compresses:
            ddp.attach(model, {"method": method, "min_elements": 1})
        groups = []
        for _, loss in zip(schedules(optimizer), losses(driver, model, 4), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            groups.append(copy.deepcopy(optimizer.state_dict()["param_groups"]))
        results.append(groups)
    assert results[0] == results[1]


def test_adam_keeps_its_momentum_for_uncompressed_tensors_alone(driver):
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp.attach(model, "topk", density=0.05, min_elements=500)  # the biases are sent uncompressed
    for loss in losses(driver, model, 3):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, parameter in model.module.named_parameters():
        average = optimizer.state[parameter]["exp_avg"]
        scale = parameter.grad.abs().max()
        assert (average.abs().max() > 0.01 * scale) == name.endswith("bias"), name


def train(model, optimizer, gradient):
    """Do a step of a linear layer in which all elements of the gradient are equal."""
    optimizer.zero_grad()
    (model(torch.ones(1, 64)) * gradient).sum().backward()
    optimizer.step()


def test_momentum_through_unusual_steps(driver):
    """Optimizer steps with a program's own gradients, backward passes without an optimizer step, and pauses.

    Only a gradient that was exchanged and compressed is applied at once.
    """
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    weight = model.module.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compressor = ddp.attach(model, "topk", **CANCELLED)
    buffer = 0.0
    for step in range(8):
        if step in (2, 6):
            optimizer.zero_grad()
            optimizer.step()
        if step == 4:
            weight.grad.fill_(2.0)
            optimizer.step()
            buffer = 0.9 * buffer + 2.0
        if step in (3, 7):
            model(torch.ones(1, 64)).sum().backward()  # as a GradScaler that skips a step
        if step in (5, 6):
            with compressor.paused():
                train(model, optimizer, 1.0)
            buffer = 0.9 * buffer + 1.0
        before = weight.detach().clone()
        train(model, optimizer, step + 1.0)
        buffer *= 0.9
        moved = (before - weight.detach()).numpy()
        np.testing.assert_allclose(moved, 0.1 * (10.0 * (step + 1) + buffer), rtol=1e-4, err_msg=f"step {step}")
        assert_momentum_buffer(optimizer, weight, buffer, f"step {step}")
    compressor.close()


def test_new_optimizers_and_inner_optimizers(driver):
    """A new SGD for each task while the old ones are kept; and an inner SGD on the same parameters without exchange."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    ddp.attach(model, "topk", **CANCELLED)
    weight = model.module.weight
    kept = []
    for number in range(3):
        kept.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            with model.no_sync():
                train(model, inner, 1.0)
            before = weight.detach().clone()
            train(model, kept[-1], step + 1.0)
            moved = (before - weight.detach()).numpy()
            np.testing.assert_allclose(moved, step + 1.0, rtol=1e-4, err_msg=f"optimizer {number}, step {step}")
        assert_momentum_buffer(inner, weight, 1.0 + 0.9 + 0.81, "the inner optimizer is not adapted")


def test_averaged_weights_are_no_gradients(driver):
    """Federated averaging with an inner SGD: its momentum is its own."""
    model = torch.nn.Linear(64, 64, bias=False)
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    compressor = ddp.Compressor("topk", [("w", weight)], **CANCELLED)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    buffer = 0.0
    for step in range(4):
        weight.grad = torch.full((64, 64), step + 1.0)
        optimizer.step()
        buffer = 0.9 * buffer + step + 1.0
        compressor.allreduce({"w": weight.data}, out={"w": weight.data})
        assert_momentum_buffer(optimizer, weight, buffer, f"step {step}")
    weight.grad = torch.ones(64, 64)
    compressor.allreduce({"w": weight.grad}, out={"w": weight.grad})  # this is one
    optimizer.step()
    assert_momentum_buffer(optimizer, weight, 0.9 * buffer, "a gradient")
    del model


@pytest.mark.parametrize("layout", ["channels_last", "complex", "bfloat16", "float64"])
def test_layouts_and_dtypes_of_parameters(driver, layout):
    """All elements are applied at once, at ten times the rate, and nothing stays in the buffer."""
    dtypes = {"complex": torch.complex64, "bfloat16": torch.bfloat16, "float64": torch.float64}
    dtype = dtypes.get(layout, torch.float32)
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.zeros(8, 6, 3, 3, dtype=dtype))
    if layout == "channels_last":
        net.weight = torch.nn.Parameter(net.weight.detach().contiguous(memory_format=torch.channels_last))
    drawn = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    net.forward = lambda: (net.weight * drawn.to(dtype)).real.sum()
    model = DistributedDataParallel(net)
    ddp.attach(model, "topk", density=0.3, min_elements=1, optimizer_momentum="cancel")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        model().backward()
        reduced = net.weight.grad.clone()
        optimizer.step()
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if layout == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(before - net.weight.detach(), reduced, msg=f"step {step}", **tolerance)


def test_momentum_of_a_parameter_that_is_frozen_for_some_steps(driver):
    """All elements are sent, so the weights are as without compression."""
    finals = []
    for attached in (False, True):
        net = Net({"a": (40, 40), "b": (40, 40)})
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if attached:
            ddp.attach(model, "topk", density=1.0, min_elements=1)
        for step in range(8):
            net.b.requires_grad_(step < 2 or step >= 6)
            optimizer.zero_grad()
            model(dict.fromkeys("ab", np.ones((40, 40)))).backward()
            optimizer.step()
        finals.append({name: parameter.detach().numpy() for name, parameter in net.named_parameters()})
    assert_close(*finals, (1e-4, 1e-4), "as without compression")


@pytest.mark.parametrize(
    "name,momentum,words",
    [
        ("SGD", 0.9, "SGD with momentum = 0.9: adapted"),
        ("AdamW", None, "AdamW with beta1 = 0.9: adapted"),
        ("OwnStep", 0.9, "OwnStep with momentum = 0.9: momentum on top of residuals"),
        ("NAdam", None, "NAdam with beta1 = 0.9: momentum on top of residuals"),
        ("Adagrad", None, None),
        ("SGD", 0.0, None),
        ("RMSprop", 0.0, None),
        ("none", None, "the momentum of your optimizer is not adapted"),
    ],
)
def test_rank_0_logs_once_what_is_done(driver, name, momentum, words):
    model = new_model()
    ddp.attach(model, "topk", density=0.05)
    options = {} if momentum is None else {"momentum": momentum}
    make = OwnStep if name == "OwnStep" else getattr(torch.optim, name, None)
    optimizer = make(model.parameters(), lr=0.01, **options) if make else None
    with logged() as lines:
        for loss in losses(driver, model, 3):
            model.zero_grad()
            loss.backward()
            if optimizer:
                optimizer.step()
    found = [line for line in lines if "momentum" in line or "beta1" in line]
    assert len(found) == (driver.rank == 0 and words is not None), found
    assert not found or words in found[0]
