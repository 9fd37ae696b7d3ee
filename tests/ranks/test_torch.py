"""Tests of Horovod for PyTorch alone: options of the stock optimizer, kinds of parameters, momentum, process sets."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvdcompress
from hvdcompress.horovod.torch import Compressor, DistributedOptimizer
from hvdcompress.loopback import Loopback
from tests.ranks.checks import FOLDER, REORDERED, assert_close, assert_same_on_all_ranks, state_of
from tests.ranks.drivers.torch import PAIR, TorchDriver, TorchHandle, backward
from tests.ranks.promises.test_together import check_all_features
from tests.ranks.reduced import assert_reduced
from tests.ranks.torch_model import SHAPES, assert_equals_loopback, optimizer, parameters, reduce_once
from tests.ranks.torch_nets import CANCELLED, assert_momentum_buffer, gradients_of_nested
from tests.unit.house.pages import run_blocks

pytestmark = pytest.mark.drivers("torch")


def test_blocks_of_the_guide(driver):
    model = torch.nn.Linear(64, 64)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names |= {"compressor": Compressor("auto", model.named_parameters())}
    run_blocks("docs/guides/pytorch.md", names)
    model(torch.ones(4, 64)).sum().backward()
    names["optimizer"].step()
    assert names["optimizer"].compressor.ledger.steps == 1


# -- options of the stock optimizer, kinds of parameters -------------------------------------------


@pytest.mark.parametrize("method", ["none", "topk"])  # Horovod reduces tensors of method none itself
@pytest.mark.parametrize("options", [{"gradient_predivide_factor": 2.0}, {"groups": 2}, {"groups": "lists"}])
def test_options_of_the_stock_optimizer_do_not_change_results(driver, method, options):
    params, tolerance = parameters(), REORDERED
    if options == {"groups": "lists"}:
        options, tolerance = {"groups": [list(params.values())[:3]]}, None
    assert_equals_loopback(driver, params, method, tolerance=tolerance, options=options)


def test_attach_to_an_optimizer(driver):
    """In one call. The default method is "auto"."""
    params = parameters()
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    opt = DistributedOptimizer(sgd, params.items(), "topk", op=hvd.Sum, density=0.1)
    everyone = driver.everyone(0, SHAPES)
    net = Loopback("topk", world_size=driver.world_size, density=0.1)
    assert_reduced(driver, reduce_once(opt, params, everyone[driver.rank]), net, everyone, "sum", REORDERED, op="sum")
    assert opt.compressor.ledger.steps == 1
    assert DistributedOptimizer(sgd, params.items()).compressor.plan.fallback


@pytest.mark.parametrize("method", ["auto", "topk"])
def test_adam_is_adapted_and_its_parameter_groups_are_not_changed(driver, method):
    """All elements are sent, so nothing stays in the average of gradients."""
    params = parameters()
    adam = torch.optim.AdamW(params.values(), lr=0.01)
    before = [{key: each for key, each in group.items() if key != "params"} for group in adam.param_groups]
    opt = DistributedOptimizer(adam, params.items(), method, density=1.0, min_elements=1)
    for step in range(3):
        reduce_once(opt, params, driver.gradients(step, SHAPES))
        with opt.skip_synchronize():
            opt.step()
        for name, parameter in params.items():
            largest = float(parameter.grad.abs().max())
            assert float(opt.state[parameter]["exp_avg"].abs().max()) <= 1e-5 * largest, (name, step)
    assert [{key: each for key, each in group.items() if key != "params"} for group in opt.param_groups] == before


def test_parameters_without_a_gradient_and_frozen_ones(driver):
    """On each rank, another parameter has no gradient. Frozen parameters, of any dtype, have no state."""
    params, names = parameters(), list(SHAPES)
    for dtype in (torch.float32, torch.uint8):
        params[str(dtype)] = torch.nn.Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
    unused = lambda step, rank: [names[(rank + step) % len(names)]]  # noqa: E731
    comp = assert_equals_loopback(driver, params, unused=unused, density=0.1)
    assert sorted(comp.parameters) == sorted(state_of(comp)["steps"]) == sorted(names)
    assert all(params[name].grad is None and bool((params[name] == 1).all()) for name in params.keys() - {*names})


def test_bucket_with_a_parameter_that_no_rank_uses(driver):
    params = parameters({f"s{number}": (20, 7) for number in range(6)})
    settings = {"density": 0.1, "bucket_elements": 10_000, "min_elements": 1}
    assert_equals_loopback(driver, params, "scalecom", lambda step, rank: ["s3"], **settings)


def test_parameter_that_is_frozen_for_some_steps(driver):
    """It gets zeros, also if it still has an old gradient, and keeps its residual."""
    params = parameters()
    comp = Compressor("topk", params.items(), density=0.1)
    net = Loopback("topk", world_size=driver.world_size, density=0.1)
    opt, changing = optimizer(params, comp), params["a"]
    for step in range(5):
        is_frozen = step in (2, 3)
        changing.requires_grad_(not is_frozen)
        trained = {name: shape for name, shape in SHAPES.items() if name != "a" or not is_frozen}
        everyone, before = driver.everyone(step, trained), comp.residual("a")
        opt.zero_grad()
        if step == 3:  # as after zero_grad(set_to_none=False)
            changing.grad = torch.full_like(changing, 7.0)
        backward(params, everyone[driver.rank], list(trained))
        opt.synchronize()
        assert_reduced(driver, {name: params[name].grad for name in trained}, net, everyone, f"step {step}")
        if is_frozen:
            assert before.any() and torch.equal(comp.residual("a"), before) and not changing.grad.any()


@pytest.mark.parametrize("has_two", [True, False])
def test_two_optimizers_of_one_model(driver, has_two):
    """Each with its own Compressor, which gets all names but exchanges only the optimizer's parameters. Or with one
    Compressor, if both are synchronized first."""
    params = parameters()
    halves = [dict(list(params.items())[part::2]) for part in range(2)]
    comps = [Compressor("topk", params.items(), density=0.1) for _ in range(2)]
    comps = comps if has_two else comps[:1] * 2
    opts = [
        hvd.DistributedOptimizer(torch.optim.SGD(half.values(), lr=0.1), params.items(), comp)
        for half, comp in zip(halves, comps, strict=True)
    ]
    net = Loopback("topk", world_size=driver.world_size, density=0.1)
    for step in range(3):
        everyone = driver.everyone(step, SHAPES)
        assert_reduced(driver, reduce_once(opts, params, everyone[driver.rank]), net, everyone, f"step {step}")
        for opt in opts:
            with opt.skip_synchronize():
                opt.step()
    for half, comp in zip(halves, comps, strict=True) if has_two else ():
        assert state_of(comp)["steps"].keys() == half.keys() == comp.ledger.tensors().keys() & params.keys()


@pytest.mark.parametrize("kind,levels", [("checkpoint", "0110"), ("checkpoint", "2112"), ("function", "1001")])
def test_backward_passes_inside_of_a_backward_pass(driver, kind, levels):
    def compress(net):
        params = dict(net.named_parameters())
        opt = optimizer(params, Compressor("topk", params.items(), density=0.05))
        return net, lambda: [opt.synchronize(), *(parameter.grad for parameter in params.values())][1:]

    found, expected = (gradients_of_nested(driver.rank, kind, each, compress) for each in (levels, "0000"))
    torch.testing.assert_close(found, expected)


def test_channels_last(driver):
    params = parameters({"w": (32, 16, 3, 3)})
    params["w"].data = params["w"].data.to(memory_format=torch.channels_last)
    assert_equals_loopback(driver, params, density=0.02)
    assert params["w"].grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("method,dtype", [("none", "bfloat16"), ("topk", "float64")])
def test_default_dtype_does_not_change_results(driver, method, dtype):
    """Parameters are float32. New tensors have the default dtype."""
    params = parameters()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        assert_equals_loopback(driver, params, method)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "method,settings",
    [
        ("topk", {"density": 0.05, "values": "qsgd4"}),
        ("scalecom", {"density": 0.02, "values": "bf16"}),
        ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
        ("oktopk", {"density": 0.02}),
        ("signsgd", {}),
        ("powersgd", {}),
    ],
)
def test_torch_ops_equal_numpy_ops(driver, method, settings):
    """With a method for each collective."""
    exact = hvdcompress.get_method(method).exact  # each library rounds matrix products in its own way
    numpy, own = (driver.make(method, {"backend": ops, **settings}, SHAPES) for ops in ("auto", "torch"))
    for step in range(2):
        want, got = (handle.reduce(driver.gradients(step, SHAPES)) for handle in (numpy, own))
        assert_close(got, want, (1e-6, 1e-6) if exact else (1e-3, 2e-4), f"step {step}")


# -- momentum, GradScaler, clipping ----------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_an_overflow_on_one_rank(driver, fused):
    """The step is undone on all ranks. ``synchronize()`` comes before ``unscale_``, or a fused step unscales."""
    weight = torch.nn.Parameter(torch.zeros(40, 40))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    comp = Compressor("topk", [("scaled", weight)], loss_scale=scaler.get_scale, **CANCELLED)
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
    opt = hvd.DistributedOptimizer(sgd, [(f"scaled{fused}", weight)], comp)
    for step in range(6):
        opt.zero_grad()
        overflows = step == 3 and driver.rank == driver.world_size - 1
        scaler.scale((weight * (float("inf") if overflows else step + 1.0)).sum()).backward()
        opt.synchronize()
        if not fused:
            scaler.unscale_(opt)
        with opt.skip_synchronize():
            scaler.step(opt)
        scaler.update()
        done = sum(each + 1 for each in range(step + 1) if each != 3)  # each at 10 times the rate, and nothing is left
        np.testing.assert_allclose(weight.detach(), -1.0 * done, rtol=1e-5)
        assert_momentum_buffer(opt, weight, 0.0, f"step {step}")
    assert comp.ledger.steps == 5
    assert_same_on_all_ranks({"weight": weight.detach().numpy()}, driver.gather, "weight")


def test_momentum_through_unusual_steps(driver):
    """With two backward passes per step. The gradients of a pause and those without an exchange keep their momentum."""
    params = parameters({"a": (40, 40), "b": (40, 40)})
    comp = Compressor("topk", params.items(), **CANCELLED)
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    opt = hvd.DistributedOptimizer(sgd, params.items(), compression=comp, backward_passes_per_step=2)

    def train(gradient):
        opt.zero_grad()
        for _ in range(2):
            (sum(params.values()) * gradient / 2).sum().backward()
        opt.step()

    buffers = dict.fromkeys(params, 0.0)
    for step in range(9):
        params["b"].requires_grad_(step not in (3, 4))
        if step == 6:
            with comp.paused():
                train(2.0)
            buffers = {name: 0.9 * buffer + 2.0 for name, buffer in buffers.items()}
        if step == 7:
            opt.zero_grad()
            torch.optim.SGD.step(opt)
        if step == 8:
            for parameter in params.values():
                parameter.grad.fill_(3.0)
            torch.optim.SGD.step(opt)
            buffers = {name: 0.9 * buffer + 3.0 for name, buffer in buffers.items()}
        before = {name: parameter.detach().clone() for name, parameter in params.items()}
        train(step + 1.0)
        for name, parameter in params.items():
            gradient = (step + 1.0) if parameter.requires_grad else 0.0
            buffers[name] = 0.9 * buffers[name]
            moved = (before[name] - parameter.detach()).numpy()
            np.testing.assert_allclose(
                moved, 0.1 * (10.0 * gradient + buffers[name]), rtol=1e-4, err_msg=f"{name}, {step}"
            )
            assert_momentum_buffer(opt, parameter, buffers[name], f"{name}, step {step}")


# -- several backward passes, process sets, pauses --------------------------------------------------


class Part(TorchDriver):
    """The ranks of a process set. A step has two backward passes."""

    num_nodes = 0  # one level

    def __init__(self, process_set, folder):
        self.process_set, self.folder = process_set, FOLDER / folder
        self.rank, self.world_size = process_set.rank(), process_set.size()

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0):
        return TorchHandle(method, settings, shapes, dtype, op, loss_scale, self.process_set, passes=2)

    def meet(self):
        hvd.barrier(self.process_set)


def test_several_backward_passes_with_all_other_features(driver):
    check_all_features(Part(hvd.global_process_set, "passes"))


@pytest.mark.only("three ranks")
def test_process_set_with_all_other_features(driver):
    if PAIR.included():
        check_all_features(Part(PAIR, "set"))


def test_pause_and_discard_before_synchronize_are_refused(driver):
    params = parameters()
    comp = Compressor("topk", params.items(), density=0.1)
    opt = optimizer(params, comp)
    reduce_once(opt, params, driver.gradients(0, SHAPES))
    for leave in (comp.paused, comp.discard):
        backward(params, driver.gradients(1, SHAPES))
        with pytest.raises(RuntimeError, match=r"(?s)a step is in progress.*synchronize\(\)"), leave():
            pass
        opt.synchronize()
    comp.discard()
