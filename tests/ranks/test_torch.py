"""Tests of the PyTorch driver alone: the stock optimizer's options, and behaviour of the framework.

Tests must not share parameter names: one that makes ranks fail leaves collectives of those names behind.
"""

from __future__ import annotations

import re

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvdcompress
from hvdcompress.horovod.torch import Compressor, attach
from hvdcompress.loopback import Loopback
from tests.ranks.checks import FOLDER, REORDERED, assert_close, assert_same_state, summed
from tests.ranks.drivers.torch import PAIR, TorchDriver, TorchHandle, backward
from tests.ranks.promises.test_together import check_all_features
from tests.ranks.timeline import check_names
from tests.ranks.torch_model import (
    assert_equals_loopback,
    gradients,
    optimizer,
    parameters,
    reduce_once,
)
from tests.ranks.torch_ranks import assert_same_on_all_ranks

pytestmark = pytest.mark.drivers("torch")


def test_options_of_the_stock_optimizer_change_nothing() -> None:
    """Also with method none, whose tensors Horovod reduces itself."""
    for method in ("none", "topk"):
        for name, options in (("divided", {"gradient_predivide_factor": 2.0}), ("groups", {"groups": 2})):
            params = parameters(f"{name}.{method}")
            assert_equals_loopback(params, method, tolerance=REORDERED, options=options)
        params = parameters(f"lists.{method}")
        assert_equals_loopback(params, method, options={"groups": [list(params.values())[:3]]})


def test_one_call_attaches_to_an_optimizer() -> None:
    params = parameters("attach")
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    opt = attach(sgd, params.items(), "topk", op=hvd.Sum, density=0.1)
    everyone = [gradients(params, 0, rank) for rank in range(hvd.size())]
    want = Loopback("topk", world_size=hvd.size(), density=0.1).allreduce_many(everyone, op="sum")[0]
    assert_close(reduce_once(opt, params, everyone[hvd.rank()]), want, REORDERED, "a sum")
    assert opt.compressor.ledger.steps == 1
    assert attach(sgd, params.items()).compressor.plan.fallback, "auto is the default"
    for method, beta1 in ((["auto"], 0.0), ([], 0.0), (["topk"], 0.9)):
        adam = torch.optim.Adam(params.values())
        opt = attach(adam, params.items(), *method)
        assert opt.param_groups[0]["betas"][0] == adam.param_groups[0]["betas"][0] == beta1


def test_parameters_without_gradient_and_frozen_ones() -> None:
    """Some have no gradient on one rank, and one in a bucket on all ranks. Frozen ones, of any dtype, have no state."""
    params = parameters("unused")
    names = list(params)
    for dtype in (torch.float32, torch.uint8):
        params[f"unused.{dtype}"] = torch.nn.Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
    comp = assert_equals_loopback(params, unused=lambda step, rank: [names[(rank + step) % len(names)]], density=0.1)
    assert sorted(comp.parameters) == sorted(comp.state_dict()["steps"]) == sorted(names)
    assert all(params[name].grad is None and bool((params[name] == 1).all()) for name in params.keys() - {*names})
    shapes = {f"s{number}": (20, 7) for number in range(6)}
    settings = {"density": 0.1, "bucket_elements": 10_000, "min_elements": 1}
    assert_equals_loopback(parameters("bucket", shapes), "scalecom", lambda step, rank: ["bucket.s3"], **settings)


def test_a_parameter_that_is_frozen_in_the_middle_of_a_training() -> None:
    """It gets zeros, also where its old gradient is still there, and keeps its residual until it is trained again."""
    params = parameters("thaw")
    comp, net = Compressor("topk", params.items(), density=0.1), Loopback("topk", world_size=hvd.size(), density=0.1)
    opt, changing = optimizer(params, comp), params["thaw.a"]
    for step in range(5):
        is_frozen = step in (2, 3)
        changing.requires_grad_(not is_frozen)
        trained = [name for name in params if name != "thaw.a" or not is_frozen]
        everyone = [gradients(params, step, rank) for rank in range(hvd.size())]
        before = comp.residual("thaw.a")
        for parameter in params.values():
            parameter.grad = None
        if step == 3:  # as after zero_grad(set_to_none=False)
            changing.grad = torch.full_like(changing, 7.0)
        backward(params, everyone[hvd.rank()], trained)
        opt.synchronize()
        want = dict(net.allreduce_many([{name: one[name] for name in trained} for one in everyone])[0])
        if is_frozen:
            want["thaw.a"] = np.zeros((37, 41), np.float32)
            assert before.any() and torch.equal(comp.residual("thaw.a"), before)
        got = {name: parameter.grad.numpy() for name, parameter in params.items()}
        assert_close(got, want, summed(hvd.size()), f"step {step}")


def test_two_optimizers_of_one_model() -> None:
    """Each with a Compressor to which all names are given, and which exchanges the optimizer's own alone; or with one
    Compressor, if both are synchronized first."""
    for prefix in ("two", "one"):
        params = parameters(prefix)
        halves = [dict(list(params.items())[part::2]) for part in range(2)]
        first, second = (Compressor("topk", params.items(), density=0.1) for _ in range(2))
        comps = [first, second if prefix == "two" else first]
        opts = [
            hvd.DistributedOptimizer(torch.optim.SGD(half.values(), lr=0.1), params.items(), comp)
            for half, comp in zip(halves, comps, strict=True)
        ]
        net = Loopback("topk", world_size=hvd.size(), density=0.1)
        for step in range(3):
            everyone = [gradients(params, step, rank) for rank in range(hvd.size())]
            got = reduce_once(opts, params, everyone[hvd.rank()])
            assert_close(got, net.allreduce_many(everyone)[0], summed(hvd.size()), f"{prefix}, step {step}")
            for opt in opts:
                with opt.skip_synchronize():
                    opt.step()
        for half, comp in zip(halves, comps, strict=True) if prefix == "two" else ():
            assert comp.state_dict()["steps"].keys() == half.keys() == comp.ledger.tensors().keys() & params.keys()


def test_channels_last() -> None:
    params = parameters("layout", {"w": (32, 16, 3, 3)})
    weight = params["layout.w"]
    weight.data = weight.data.to(memory_format=torch.channels_last)
    assert_equals_loopback(params, "topk", density=0.02)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)


def assert_momentum_buffer(opt: torch.optim.Optimizer, parameter: torch.nn.Parameter, want: float, what: str) -> None:
    np.testing.assert_allclose(opt.state[parameter]["momentum_buffer"].numpy(), want, rtol=1e-4, err_msg=what)


CANCELLED = {"density": 1.0, "min_elements": 1, "optimizer_momentum": "cancel"}


def test_a_gradscaler_that_overflows() -> None:
    """All is sent and momentum cancelled, so the buffer is ten times the last gradient, but for the step in which one
    rank overflows. It is undone on all ranks. ``synchronize()`` comes first, as gradients are unscaled."""
    params = parameters("scaler", {"a": (40, 40)})
    weight = params["scaler.a"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    comp = Compressor("topk", params.items(), loss_scale=scaler.get_scale, **CANCELLED)
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    opt = hvd.DistributedOptimizer(sgd, params.items(), compression=comp)
    comp.use_optimizer(opt)  # it is found by its first step, which comes after the exchange here
    for step in range(6):
        opt.zero_grad()
        overflows = step == 3 and hvd.rank() == hvd.size() - 1
        scaler.scale((weight * (float("inf") if overflows else step + 1.0)).sum()).backward()
        opt.synchronize()
        scaler.unscale_(opt)
        with opt.skip_synchronize():
            scaler.step(opt)
        scaler.update()
        assert_momentum_buffer(opt, weight, 30.0 if step == 3 else 10.0 * (step + 1), f"step {step}")
    assert comp.ledger.steps == 5
    assert_same_on_all_ranks({"weight": weight.detach().numpy()}, "weight")


def test_clip_norm_with_tensors_that_horovod_reduces() -> None:
    """The norm is that of all tensors together, those that go through Horovod's own all-reduce among them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    named = [(f"clipped.{name}", parameter) for name, parameter in model.named_parameters()]
    rules = [{"match": {"name": name}, "method": "none"} for name in ("*.2.*", "*.bias")]
    comp = Compressor("topk", named, density=0.05, min_elements=1, clip_norm=0.2, rules=rules)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), named, compression=comp)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        opt.zero_grad()
        x = torch.randn(16, 64, generator=generator)
        torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        opt.step()
        assert comp.gradient_norm() > 0.2
        assert abs(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) - 0.2) < 1e-4


def test_torch_ops_give_the_same_as_numpy_ones() -> None:
    """With a method for each collective."""
    for method, settings in (
        ("topk", {"density": 0.05, "values": "qsgd4"}),
        ("scalecom", {"density": 0.02, "values": "bf16"}),
        ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
        ("oktopk", {"density": 0.02}),
        ("signsgd", {}),
        ("powersgd", {}),
    ):
        both = [parameters(f"collectives.{method}") for _ in range(2)]  # random numbers go by name
        opts = [
            optimizer(params, Compressor(method, params.items(), ops=ops, **settings))
            for params, ops in zip(both, ("auto", "torch"), strict=True)
        ]
        exact = hvdcompress.get(method).exact  # matrix libraries round each in their own way
        for step in range(2):
            want, got = (
                reduce_once(opt, params, gradients(params, step)) for opt, params in zip(opts, both, strict=True)
            )
            assert_close(got, want, (1e-6, 1e-6) if exact else (1e-3, 2e-4), f"{method}, step {step}")


class Part(TorchDriver):
    """Some ranks, whose gradients are those of two backward passes."""

    num_nodes = 0  # one level

    def __init__(self, process_set: hvd.ProcessSet, folder: str):
        self.process_set, self.folder = process_set, FOLDER / folder
        self.rank, self.world_size = process_set.rank(), process_set.size()

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> TorchHandle:
        return TorchHandle(method, settings, shapes, dtype, op, loss_scale, self.process_set, passes=2)

    def meet(self) -> None:
        hvd.barrier(self.process_set)


def test_several_backward_passes_with_all_other_features() -> None:
    check_all_features(Part(hvd.global_process_set, "passes"))


@pytest.mark.only("three ranks")
def test_a_process_set() -> None:
    """With several backward passes and all other features."""
    if PAIR.included():
        check_all_features(Part(PAIR, "set"))


def test_names_in_horovods_timeline() -> None:
    params = parameters("timeline", {"weight": (37, 41), "bias": (37,)})
    comp = Compressor("scalecom", params.items(), density=0.05)
    opt = optimizer(params, comp)
    assert re.fullmatch(r"hvdcompress\.set0\.compressor\d+", comp.prefix)

    def steps() -> None:
        for step in range(2):
            reduce_once(opt, params, gradients(params, step))

    # the first is a broadcast, sent as a sum
    names = ("timeline.weight.round0", "timeline.weight.round1", "status.round0")
    check_names(hvd, steps, {f"allreduce.{comp.prefix}.{name}" for name in names})


def test_two_models_in_one_backward_pass() -> None:
    """As a generator's loss goes through a discriminator, whose gradients are thrown away."""
    generator, judge = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
    opts = []
    for prefix, net in (("generator", generator), ("judge", judge)):
        named = [(f"{prefix}.{name}", parameter) for name, parameter in net.named_parameters()]
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        opts.append(attach(sgd, named, "topk", density=0.05, min_elements=0))
    discarded = opts[1].compressor
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(hvd.rank()))
    for step in range(3):
        opts[1].zero_grad()
        judge(x).square().mean().backward()
        opts[1].step()
        before = discarded.state_dict()
        for opt in opts:
            opt.zero_grad()
        judge(generator(x)).square().mean().backward()
        opts[0].step()
        opts[1].synchronize()
        discarded.discard()
        assert_same_state(discarded.state_dict(), before, f"step {step}")
    assert opts[0].compressor.ledger.steps == 3


def test_a_pause_is_left_after_synchronize() -> None:
    params = parameters("pause")
    comp = Compressor("topk", params.items(), density=0.1)
    opt = optimizer(params, comp)
    reduce_once(opt, params, gradients(params, 0))
    for leave in (comp.paused, comp.discard):
        backward(params, gradients(params, 1))
        with pytest.raises(RuntimeError, match=r"(?s)a step is in progress.*synchronize\(\)"), leave():
            pass
        opt.synchronize()
    comp.discard()


def test_the_momentum_buffer_is_known_whatever_the_optimizer_does() -> None:
    """All is sent and momentum cancelled, so the buffer is ten times the last gradient, which two backward passes give.
    A frozen parameter gets zeros; gradients of a pause are added as they are; a step without gradients changes
    nothing."""
    params = parameters("buffer", {"a": (40, 40), "b": (40, 40)})
    comp = Compressor("topk", params.items(), **CANCELLED)
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    opt = hvd.DistributedOptimizer(sgd, params.items(), compression=comp, backward_passes_per_step=2)

    def train(gradient: float) -> None:
        opt.zero_grad()
        for _ in range(2):
            (sum(params.values()) * gradient / 2).sum().backward()
        opt.step()

    for step in range(9):
        params["buffer.b"].requires_grad_(step not in (3, 4))
        if step == 6:
            with comp.paused():
                train(0.0)
        if step == 7:
            opt.zero_grad()
            torch.optim.SGD.step(opt)
        if step == 8:
            for parameter in params.values():
                parameter.grad.zero_()
            torch.optim.SGD.step(opt)
        train(step + 1.0)
        for name, parameter in params.items():
            want = 10.0 * (step + 1) if parameter.requires_grad else 30.0 * 0.9 ** (step - 2)
            assert_momentum_buffer(opt, parameter, want, f"{name}, step {step}")


def test_default_dtype_of_the_program_does_not_matter() -> None:
    """Parameters are float32, whatever new tensors are."""
    for method in ("none", "topk"):
        for dtype in (torch.bfloat16, torch.float64):
            params = parameters(f"default.{method}.{dtype}")
            torch.set_default_dtype(dtype)
            try:
                assert_equals_loopback(params, method)
            finally:
                torch.set_default_dtype(torch.float32)
