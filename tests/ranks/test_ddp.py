"""Tests of the DDP driver alone: DDP's buckets and options, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.ddp import shared_memory
from hvdcompress.engine.fallback import Verdict
from hvdcompress.local_steps import LocalSteps
from hvdcompress.loopback import Loopback
from hvdcompress.plan import IN_ORDER
from tests.ranks.breaking import Two
from tests.ranks.checks import EXACT, FOLDER, assert_close, assert_same_state, heavy_tailed, logged, summed
from tests.ranks.drivers.ddp import DdpDriver, DdpHandle, Net
from tests.ranks.promises.test_together import check_all_features
from tests.ranks.torch_ranks import assert_same_on_all_ranks, must_raise, rank, world_size

pytestmark = pytest.mark.drivers("ddp")

SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}


def everyone(step: int, shapes: Mapping = SHAPES) -> list[dict]:
    """Return the gradients of all ranks."""
    return [heavy_tailed(shapes, step, number) for number in range(world_size())]


def gradients(step: int, shapes: Mapping = SHAPES) -> dict:
    """Return the gradients of this rank."""
    return heavy_tailed(shapes, step, rank())


def backward(model: DistributedDataParallel, given: dict) -> dict[str, np.ndarray]:
    """Run a backward pass with these gradients; return the reduced ones, complex numbers as pairs."""
    model.zero_grad()
    model(given).backward()
    found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    return {name: (torch.view_as_real(g) if g.is_complex() else g).numpy().copy() for name, g in found.items()}


def assert_equals_loopback(
    model: DistributedDataParallel,
    method: str = "topk",
    shapes: Mapping = SHAPES,
    dtypes: Mapping = {},
    tolerances: Mapping = {},
    **settings: Any,
) -> ddp.Compressor:
    """Check that DDP and the loopback reduce the same gradients to the same numbers, in three steps.

    Args:
        model: a model that takes gradients of these shapes.
        method: a method's id.
        shapes: shapes by name.
        dtypes: those that are not float32, by name.
        tolerances: those of tensors that are not as exact as a sum can be, by name.
        **settings: hyper-parameters and plan keys.
    """
    compressor = ddp.attach(model, method, **settings)
    net = Loopback(method, world_size=world_size(), **settings)
    for step in range(3):
        given = [
            {name: array.astype(dtypes.get(name, np.float32)) for name, array in one.items()}
            for one in everyone(step, shapes)
        ]
        got, want = backward(model, given[rank()]), net.allreduce_many(given)[0]
        assert got.keys() == want.keys()
        for name, array in want.items():
            tolerance = tolerances.get(name, summed(world_size()))
            assert_close({name: got[name]}, {name: array}, tolerance, f"{method}, step {step}")
        assert_same_on_all_ranks(got, method)
    compressor.close()
    return compressor


def compressed(net: torch.nn.Module, by_hook: bool) -> tuple[DistributedDataParallel, ddp.Compressor]:
    """Wrap a net, with top-k attached to DDP, or registered as the hook that a framework would register."""
    if not by_hook:
        model = DistributedDataParallel(net)
        return model, ddp.attach(model, "topk", density=0.05)
    compressor, hook = ddp.hook(net, "topk", density=0.05)
    model = DistributedDataParallel(net)
    model.register_comm_hook(compressor, hook)
    return model, compressor


# -- buckets, dtypes and names ---------------------------------------------------------------------


def test_buckets_and_options_of_ddp_change_nothing() -> None:
    """A bucket for each parameter, some or one; DDP forms them again at the second step. Gradients as views of them."""
    for options in (
        {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.004, "find_unused_parameters": True},
        {"bucket_cap_mb": 25, "static_graph": True},
    ):
        assert_equals_loopback(DistributedDataParallel(Net(SHAPES), **options), "scalecom", density=0.02)


def test_parameters_that_no_rank_uses_keep_their_residuals() -> None:
    """Alone and in a bucket with others. A parameter that some rank uses takes part."""
    for settings in ({}, {"bucket_elements": 0}):
        model = DistributedDataParallel(Net(SHAPES), find_unused_parameters=True)
        compressor = ddp.attach(model, "topk", density=0.05, min_elements=1, **settings)
        for step in range(4):
            unused = "c" if step == 2 else "a" if step == 3 and rank() else ""
            before = {name: compressor.residual(name) for name in "abc"}
            got = backward(model, {name: array for name, array in gradients(step).items() if name != unused})
            changed = [name for name in "abc" if not torch.equal(before[name], compressor.residual(name))]
            assert changed == [name for name in "abc" if name != "c" or step != 2], step
            assert ("c" in got) == (step != 2)
        compressor.close()


def test_several_dtypes_and_frozen_parameters() -> None:
    net = Net(SHAPES)
    for name, dtype in (("a", torch.float16), ("c", torch.float64)):
        net.get_parameter(name).data = torch.zeros(SHAPES[name], dtype=dtype)
    net.frozen = torch.nn.Parameter(torch.ones(9, 9), requires_grad=False)
    dtypes, half = {"a": np.float16, "c": np.float64}, {"a": (2e-3, 1e-3)}  # the loopback adds float16 as such
    compressor = assert_equals_loopback(DistributedDataParallel(net), dtypes=dtypes, tolerances=half, density=0.05)
    assert sorted(compressor.parameters) == sorted(SHAPES)


def test_layouts_of_parameters() -> None:
    """A convolution in channels_last, and a transposed matrix."""
    shapes = {"w": (16, 12, 3, 3), "t": (40, 50)}
    net = Net(shapes)
    net.w.data = net.w.data.to(memory_format=torch.channels_last)
    net.t.data = torch.zeros(50, 40).T
    assert_equals_loopback(DistributedDataParallel(net), "powersgd", shapes, min_elements=1)


class Complex(torch.nn.Module):
    """Complex parameters and a real one, of which a backward pass makes the gradients that are asked for."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.a, self.c = (torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((40, 41), (8, 3, 5, 5)))
        self.c.data = self.c.data.to(memory_format=torch.channels_last)
        self.b = torch.nn.Parameter(torch.zeros(40, 43))

    def forward(self, given: dict) -> torch.Tensor:
        real = {name: torch.view_as_real(p) if p.is_complex() else p for name, p in self.named_parameters()}
        return sum((real[name] * torch.from_numpy(gradient)).sum() for name, gradient in given.items())


def test_complex_parameters_are_pairs_of_real_numbers() -> None:
    """In one DDP bucket and in several, also in channels_last; a complex number of 16 bytes is a pair of float64."""
    shapes = {"a": (40, 41, 2), "b": (40, 43), "c": (8, 3, 5, 5, 2)}
    products = dict.fromkeys(shapes, (1e-3, 1e-3)) if world_size() > 2 else {}
    for dtype, real, cap, method in (
        (torch.complex64, np.float32, 25, "topk"),
        (torch.complex128, np.float64, 0.001, "none"),
        (torch.complex64, np.float32, 0.001, "powersgd"),
    ):
        model = DistributedDataParallel(Complex(dtype), bucket_cap_mb=cap)
        tolerances = products if method == "powersgd" else {}
        compressor = assert_equals_loopback(model, method, shapes, {"a": real, "c": real}, tolerances)
        assert compressor.residual("a").shape == (40, 41, 2)


def test_names_are_those_without_wrappers() -> None:
    """torch.compile and activation checkpointing add to names: rules match without it."""
    net = Net(SHAPES)
    wrapper = torch.nn.ModuleDict({"_orig_mod": net})
    wrapper.forward = net.forward
    model = DistributedDataParallel(wrapper)
    compressor = ddp.attach(model, "topk", density=0.05, rules=[{"match": {"name": "a"}, "method": "none"}])
    assert sorted(compressor.parameters) == sorted(SHAPES)
    backward(model, gradients(0))
    assert not compressor.residual("a").any() and compressor.residual("b").any()


def test_rules_that_apply_to_no_parameter_are_logged() -> None:
    """When the model is attached to; also a rule whose parameters an earlier rule has."""
    matches = [{"name": "a*"}, {"name": "A*", "ndim": 2}, {"name": "a"}]
    rules = [{"match": match, "method": "none"} for match in matches]
    with logged() as lines:
        ddp.attach(DistributedDataParallel(Net(SHAPES)), "topk", rules=rules).close()
    found = [line for line in lines if "applies to no tensor" in line]
    words = ["match {name: A*, ndim: 2}", "match {name: a}"] if rank() == 0 else []
    assert len(found) == len(words) and all(w in line for w, line in zip(words, found, strict=True)), lines


def test_the_ddp_module_is_found_inside_other_modules() -> None:
    """As in Fabric's wrappers; names are those of the module that DDP wraps."""
    net = Net(SHAPES)
    inner = torch.nn.ModuleDict({"module": net})
    inner.forward = net.forward
    model = DistributedDataParallel(inner)
    compressor = ddp.attach(torch.nn.ModuleDict({"module": model}), "topk", density=0.05)
    assert list(compressor.parameters) == [f"module.{name}" for name in SHAPES]
    backward(model, gradients(0))
    assert compressor.ledger.steps == 1 and "topk" in compressor.describe()
    must_raise(ValueError, ["no DistributedDataParallel", "wrap it first"], lambda: ddp.attach(net, "topk"))
    two = torch.nn.ModuleList(DistributedDataParallel(Net(SHAPES)) for _ in range(2))
    must_raise(ValueError, ["2 DistributedDataParallel modules"], lambda: ddp.attach(two, "topk"))


def test_copies_of_a_model_are_not_compressed() -> None:
    """DDP averages the gradients of copies, and the model's own steps are as without them."""
    exact, (alone, _) = Loopback("none", world_size=world_size()), compressed(Net(SHAPES), False)
    models = [compressed(Net(SHAPES), by_hook)[0] for by_hook in (False, True)]
    for step in range(2):
        want, mean = backward(alone, gradients(step)), exact.allreduce_many(everyone(step))[0]
        for model, original in zip(models, (models[0], models[1].module), strict=True):  # DDP cannot copy such a hook
            assert_close(backward(model, gradients(step)), want, EXACT, f"step {step}")
            copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
            for copied in (*copies, torch.optim.swa_utils.AveragedModel(original).module):
                other = copied if isinstance(copied, DistributedDataParallel) else DistributedDataParallel(copied)
                assert_close(backward(other, gradients(step)), mean, summed(world_size()), f"copy at {step}")
    ddp.attach(copy.deepcopy(models[0]), "topk").close()


# -- optimizers and loss scales --------------------------------------------------------------------


def trained(groups: list[dict]) -> dict[str, np.ndarray]:
    """Train a small net with a GradScaler, with options for each parameter; return the weights.

    In step 5 one rank overflows. In steps 3 and 7 the optimizer is not called. Gradients are clipped.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    model = DistributedDataParallel(net)
    options = [{"params": [p], **group} for p, group in zip(model.parameters(), groups, strict=True)]
    optimizer = torch.optim.SGD(options, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel", "clip_norm": 0.3}
    compressor = ddp.attach(model, "topk", optimizer=optimizer, loss_scale=scaler.get_scale, **settings)
    norms, generator = [], torch.Generator().manual_seed(rank())
    for step in range(10):
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        overflows = step == 5 and rank() == world_size() - 1
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
    assert_same_on_all_ranks(weights, "weights")
    return weights


def test_a_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """Heavy ball, dampening, Nesterov and another momentum; with ``clip_norm``, whatever the loss scale is, and steps
    that are skipped, by the GradScaler, too."""
    options = [
        {"momentum": 0.9, "lr": 0.05},
        {"momentum": 0.9, "dampening": 0.5, "lr": 0.1},
        {"momentum": 0.9, "nesterov": True, "lr": 0.05},
        {"momentum": 0.5, "lr": 0.25},
    ]
    assert_close(trained(options), trained([{"lr": 0.5}] * 4), (1e-5, 1e-5), "weights")


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    """Train a linear layer for a step in which all elements of the gradient are equal."""
    optimizer.zero_grad()
    (model(torch.ones(1, 64)) * gradient).sum().backward()
    optimizer.step()


def assert_momentum_buffer(optimizer: torch.optim.Optimizer, want: float, what: str) -> None:
    (state,) = optimizer.state.values()
    np.testing.assert_allclose(state["momentum_buffer"], want, rtol=1e-4, err_msg=what)


CANCELLED = {"density": 1.0, "min_elements": 1, "optimizer_momentum": "cancel"}


class OwnSGD(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_the_momentum_buffer_is_known_whatever_the_optimizer_does() -> None:
    """All is sent and momentum cancelled, so the buffer is ten times the last gradient: with the user's own optimizer,
    steps without a gradient or with zeros, steps that are left out, and pauses."""
    for optimizer_class in (torch.optim.SGD, OwnSGD):
        net = torch.nn.Linear(64, 64, bias=False)
        model = DistributedDataParallel(net)
        optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
        compressor = ddp.attach(model, "topk", optimizer=optimizer, **CANCELLED)
        for step in range(8):
            if step in (2, 6):
                optimizer.zero_grad()
                optimizer.step()
            if step == 4:
                net.weight.grad.zero_()
                optimizer.step()
            if step in (3, 7):
                model(torch.ones(1, 64)).sum().backward()  # as a GradScaler that skips a step
            if step in (5, 6):
                with compressor.paused():
                    train(model, optimizer, 0.0)
            train(model, optimizer, step + 1.0)
            assert_momentum_buffer(optimizer, 10.0 * (step + 1), f"{optimizer_class}, step {step}")
        compressor.close()


def test_an_optimizer_is_found_at_its_first_step() -> None:
    """Without ``optimizer=``, the momentum of its first gradient is kept; also where it takes another one's place."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    compressor = ddp.attach(model, "topk", **CANCELLED)
    for number in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            train(model, optimizer, step + 1.0)
            want = 10.0 * (step + 1) + 0.9**step if step else 1.0
            assert_momentum_buffer(optimizer, want, f"optimizer {number}, step {step}")
    compressor.close()


def test_a_parameter_without_a_gradient_does_not_wait() -> None:
    """All is sent, so momentum is as the optimizer has it, also when a parameter was frozen for some steps."""
    finals = []
    for attached in (False, True):
        net = Net({"a": (40, 40), "b": (40, 40)})
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if attached:
            compressor = ddp.attach(model, "topk", density=1.0, min_elements=1, optimizer=optimizer)
        for step in range(8):
            net.b.requires_grad_(step < 2 or step >= 6)
            optimizer.zero_grad()
            model(dict.fromkeys("ab", np.ones((40, 40)))).backward()
            optimizer.step()
        finals.append({name: parameter.detach().numpy() for name, parameter in net.named_parameters()})
    compressor.close()
    assert_close(*finals, (1e-4, 1e-4), "as without compression")


def test_auto_takes_beta1_out_of_adam() -> None:
    """Other settings of the plan stay, and so does the optimizer where the user has chosen a method."""
    for kind, method, betas in (
        (torch.optim.SGD, "auto", None),
        (torch.optim.AdamW, "auto", (0.0, 0.999)),
        (torch.optim.Adam, "powersgd", (0.9, 0.999)),
    ):
        model = DistributedDataParallel(torch.nn.Linear(64, 10))
        optimizer = kind(model.parameters(), lr=0.1)
        compressor = ddp.attach(model, {"method": method, "min_elements": 7}, optimizer=optimizer, fallback=False)
        assert (compressor.plan.min_elements, compressor.plan.fallback) == (7, False)
        assert optimizer.param_groups[0].get("betas") == betas
        compressor.close()


def test_adam_has_its_beta1_again_where_compression_is_given_up() -> None:
    """Also in a training that goes on from there, whether its optimizer is given before or after the state."""
    model = DistributedDataParallel(Net(SHAPES))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.99))
    compressor = ddp.attach(model, "auto", optimizer=optimizer, min_elements=7)
    backward(model, gradients(0))
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.99)
    compressor.local.fallback.verdict = Verdict.FLUSH  # as after comparing the first steps
    backward(model, gradients(0))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    for given_before in (True, False):
        model = DistributedDataParallel(Net(SHAPES))
        optimizer = torch.optim.Adam(model.parameters())
        other = ddp.attach(model, "auto", optimizer=optimizer if given_before else None, min_elements=7)
        other.load_state_dict(compressor.state_dict())
        other.use_optimizer(optimizer)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


# -- what is refused -------------------------------------------------------------------------------


def test_a_dtype_that_cannot_be_reduced_is_refused_by_name() -> None:
    model = torch.nn.ParameterDict({"ok": torch.zeros(4, 4), "wrong": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    must_raise(ValueError, ["'wrong'", "float8_e4m3fn"], lambda: ddp.hook(model, "topk"))


def test_a_parameter_that_is_trained_later_is_refused_by_name() -> None:
    """Unfrozen, replaced or added after DDP was made: DDP does not reduce its gradients. In evaluation it may be."""
    new = torch.nn.Parameter(torch.zeros(37, 41))
    for name, by_hook, change in (
        ("frozen", True, lambda net: net.frozen.requires_grad_(True)),
        ("a", False, lambda net: net.register_parameter("a", new)),
        ("new", False, lambda net: net.register_parameter("new", new)),
    ):
        net = Net(SHAPES)
        net.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        model, compressor = compressed(net, by_hook)
        backward(model, gradients(0))
        change(net)
        with torch.no_grad():
            model(gradients(0))
        must_raise(RuntimeError, [repr(name), "will not reduce"], lambda m=model: m(gradients(0)))
        compressor.close()


def test_verify_looks_at_frozen_parameters_too() -> None:
    """Not at those that DDP is told to ignore."""
    for ignored in ([], ["frozen"]):
        net = Net(SHAPES)
        net.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        model = DistributedDataParallel(net)
        net._ddp_params_and_buffers_to_ignore = ignored
        net.frozen.data.fill_(rank())  # after DDP has made them equal
        compressor = ddp.attach(model, "topk", density=0.05, verify_every=1)
        if ignored:
            backward(model, gradients(0))
        else:
            must_raise(ddp.PeerError, ["frozen"], lambda m=model: backward(m, gradients(0)))
        compressor.close()


def test_a_second_hook_is_refused() -> None:
    model, stock = (DistributedDataParallel(Net(SHAPES)) for _ in range(2))
    first = ddp.attach(model, "topk")
    must_raise(ValueError, ["communication hook", "DDP takes one"], lambda: ddp.attach(model, "fp16"))
    must_raise(ValueError, ["cannot be attached"], lambda: ddp.attach(stock, first))
    stock._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    must_raise(ValueError, ["built-in communication hook", "DDP takes one"], lambda: ddp.attach(stock, "topk"))


def test_optimizers_inside_the_backward_pass_are_refused() -> None:
    words = ["_apply_optimizer_in_backward", "its own hook"]
    before, later, fused = (Net(SHAPES) for _ in range(3))
    _apply_optimizer_in_backward(torch.optim.SGD, before.parameters(), {"lr": 0.1})
    must_raise(ValueError, words, lambda: ddp.attach(DistributedDataParallel(before), "topk"))
    model = DistributedDataParallel(later)
    ddp.attach(model, "topk")
    _apply_optimizer_in_backward(torch.optim.SGD, later.parameters(), {"lr": 0.1})
    must_raise(ValueError, words, lambda: model(gradients(0)))
    other = DistributedDataParallel(fused)
    other._register_fused_optim(torch.optim.SGD, 0.1)
    must_raise(ValueError, ["_register_fused_optim", "DDP takes one"], lambda: ddp.attach(other, "topk"))


def test_options_that_go_past_the_hook_are_refused() -> None:
    module = Net(SHAPES)
    delayed = {"delay_all_reduce_named_params": [("a", module.a)], "param_to_hook_all_reduce": module.b}
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    mixed = DistributedDataParallel(module)
    mixed.mixed_precision = object()  # DDP wants a GPU for it
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        python = DistributedDataParallel(Net(SHAPES))
    for words, model in (
        (["delay_all_reduce_named_params"], DistributedDataParallel(module, **delayed)),
        (["skip_all_reduce_unused_params"], DistributedDataParallel(module, **skipping)),
        (["mixed_precision=", "torch.autocast"], mixed),
        (["python_reducer"], python),
    ):
        must_raise(ValueError, words, lambda m=model: ddp.attach(m, "topk"))


def test_join_and_a_static_graph_with_no_sync_are_refused() -> None:
    static, joined = (DistributedDataParallel(Net(SHAPES), static_graph=static) for static in (True, False))
    for model in (static, joined):
        ddp.attach(model, "topk")
    with static.no_sync():
        must_raise(RuntimeError, ["static_graph", "no_sync"], lambda: static(gradients(0)))
    backward(static, gradients(0))

    def join() -> None:
        with joined.join():
            joined(gradients(0))

    must_raise(RuntimeError, ["join()"], join)


def test_sparse_gradients_are_refused_on_all_ranks() -> None:
    model = DistributedDataParallel(torch.nn.Embedding(500, 10, sparse=True))
    ddp.attach(model, "topk")
    loss = model(torch.tensor([1, 2])).sum()
    must_raise(Exception, ["sparse gradients", "weight"], loss.backward, same=False)


# -- steps that fail, are thrown away or paused ----------------------------------------------------


def test_a_backward_pass_that_ends_in_the_middle() -> None:
    """The rank has its own error, and the others, who wait for its gradients, are told, though it does nothing more."""
    model = DistributedDataParallel(Two(), bucket_cap_mb=1e-5)
    compressor = ddp.attach(model, "topk", density=0.05)
    x, odd = torch.ones(3, 40), rank() == 1
    model(x).backward()
    loss, began = model(x, MemoryError("made by the test") if odd else None), time.monotonic()
    if odd:
        with pytest.raises(MemoryError):
            loss.backward()
        with pytest.raises(RuntimeError, match="Expected to have finished"):  # DDP itself does not go on
            model(x)
    else:
        with pytest.raises(ddp.PeerError, match="rank 1: a backward pass ended before"):
            loss.backward()
    assert time.monotonic() - began < 10
    assert compressor.ledger.steps == 1


def test_a_smaller_batch_after_a_backward_pass_that_failed() -> None:
    """Programs that catch an error, and begin again with another model, as find_executable_batch_size does: the open
    step is over, for the watchdog, too, and its Compressor can be closed."""
    failed = []
    for breaks in (True, True, False):
        model = DistributedDataParallel(Two(), bucket_cap_mb=1e-5)
        compressor = ddp.attach(model, "topk", density=0.05, end_after=3)
        model(torch.ones(3, 40)).backward()
        if breaks:
            loss = model(torch.ones(3, 40), MemoryError("made by the test"))
            with pytest.raises(MemoryError):
                loss.backward()
            failed.append(compressor)
    for _ in range(16):  # longer than end_after
        model(torch.ones(3, 40)).backward()
        time.sleep(0.25)
    began = time.monotonic()
    for one in failed:
        one.close()
    assert time.monotonic() - began < 5


def test_many_models_in_one_process_leave_nothing_behind() -> None:
    """Without close(), as in a search of hyper-parameters: neither file descriptors nor threads."""
    found = []
    for _ in range(6):
        model = DistributedDataParallel(Two())
        ddp.attach(model, "topk", density=0.05)
        for _ in range(2):
            model(torch.ones(3, 40)).backward()
        del model
        gc.collect()
        found.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
    for before, after in zip(found[1], found[-1], strict=True):  # what the process has once is there by then
        assert after < before + 10, found  # each left five file descriptors and three threads


def test_a_fork_may_collect_what_was_dropped() -> None:
    """As a DataLoader's worker does, at any moment: the process group of a model that is no more is the parent's."""
    gc.collect()
    gc.disable()
    try:
        model = DistributedDataParallel(Two())
        ddp.attach(model, "topk", density=0.05)
        model(torch.ones(3, 40)).backward()
        del model
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(20)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0, child.exitcode
    finally:
        gc.enable()


class Part(DdpDriver):
    """Some ranks, whose gradients are those of two backward passes, the first of them without exchanges."""

    num_nodes = 0  # one level

    def __init__(self, group: Any, folder: str):
        self.group, self.folder = group, FOLDER / folder
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> DdpHandle:
        return DdpHandle(method, settings, shapes, dtype, op, loss_scale, self.group, passes=2)

    def meet(self) -> None:
        dist.barrier(self.group)


def test_no_sync_with_all_other_features() -> None:
    check_all_features(Part(dist.group.WORLD, "no_sync"))


@pytest.mark.only("three ranks")
def test_a_process_group_with_all_other_features() -> None:
    pair = dist.new_group([0, 2])
    if rank() in (0, 2):
        check_all_features(Part(pair, "group"))


def test_two_models_in_one_backward_pass() -> None:
    """As a generator's loss goes through a discriminator, whose gradients are thrown away."""
    generator, judge = (DistributedDataParallel(torch.nn.Linear(40, 40)) for _ in range(2))
    own, discarded = (ddp.attach(model, "topk", density=0.05, min_elements=0) for model in (generator, judge))
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(rank()))
    for step in range(3):
        judge(x).square().mean().backward()
        before = discarded.state_dict()
        judge(generator(x)).square().mean().backward()
        discarded.discard()
        assert_same_state(discarded.state_dict(), before, f"step {step}")
        with pytest.raises(RuntimeError, match="no step to discard"):
            discarded.discard()
    assert own.ledger.steps == 3
    for compressor in (own, discarded):
        compressor.close()


def test_a_pause_needs_all_ranks_and_whole_steps() -> None:
    model, compressor = compressed(Two(), by_hook=False)
    model(torch.ones(3, 40)).backward()
    with compressor.paused() if rank() == 0 else contextlib.nullcontext():
        must_raise(RuntimeError, ["ranks disagree", "'paused'"], model(torch.ones(3, 40)).backward)
    before = compressor.state_dict()
    with compressor.paused():
        model(torch.ones(3, 40)).backward()
    assert_same_state(compressor.state_dict(), before, "after a pause")
    compressor.close()


def test_a_state_goes_on_when_more_parameters_are_trained() -> None:
    """As with gradual unfreezing: what was saved is there, and what is new begins at zero, in groups of their own."""
    x, compressors = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank())), []
    for frozen in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        net[0].requires_grad_(not frozen)
        model = DistributedDataParallel(net)
        compressors.append(ddp.attach(model, "topk", density=0.05, min_elements=1))
        if not frozen:
            with logged() as lines:
                compressors[1].load_state_dict(compressors[0].state_dict())
            assert len([line for line in lines if "'0.bias', '0.weight'" in line]) == (rank() == 0), lines
            for name in ("1.weight", "1.bias"):
                saved, loaded = (compressor.residual(name) for compressor in compressors)
                assert saved.any() and torch.equal(saved, loaded), name
        for _ in range(2):
            model(x).square().mean().backward()
    assert compressors[1].state_dict()["steps"] == {"0.weight": 2, "0.bias": 2, "1.weight": 4, "1.bias": 4}
    assert_same_on_all_ranks({n: p.grad.numpy() for n, p in net.named_parameters()}, "gradients")


# -- nodes -----------------------------------------------------------------------------------------

GET = shared_memory.SharedMemory.get


def refuse(memory: shared_memory.SharedMemory, note: shared_memory.Note) -> np.ndarray:
    """Open no memory of other ranks, on the first rank of each node, as in a container of its own."""
    if rank() % 2 == 0 and note.pid != os.getpid():
        raise PermissionError(note.pid)
    return GET(memory, note)


@pytest.mark.only("two levels")
def test_two_levels_through_shared_memory_and_without_it() -> None:
    shapes = {"a": (300, 400), "b": (7,), "c": (200, 500), "d": (90, 80)}
    settings = {"density": 0.1, "nodes": int(os.environ["NODES"])}
    for get in (GET, refuse):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("SMALL", 1000), ("FIRST", 4096)):
                patch.setattr(shared_memory, name, value)
            patch.setattr(shared_memory.SharedMemory, "get", get)
            model = DistributedDataParallel(Net(shapes))
            compressor = ddp.attach(model, "topk", optimizer_momentum="keep", **settings)
            net = Loopback("topk", world_size(), grouping=IN_ORDER, **settings)
            for step in range(3):
                want = net.allreduce_many(everyone(step, shapes))[rank()]
                assert_close(backward(model, gradients(step, shapes)), want, EXACT, f"{get}, step {step}")
            assert (compressor._memory is not None) == (get is GET)
            compressor.close()


@pytest.mark.only("two levels")
def test_ddp_inside_nodes_and_local_steps_between_them() -> None:
    ranks = np.arange(world_size()).reshape(int(os.environ["NODES"]), -1)
    here, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    shapes = {"a": (30, 40), "b": (7,)}
    net = Net(shapes)
    model = DistributedDataParallel(net, process_group=here)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(net, optimizer, every=3, outer=None, process_group=across) as local:
        for step in range(3):
            backward(model, gradients(step, shapes))
            optimizer.step()
            local.step()
    found = {name: each.detach().numpy() for name, each in net.named_parameters()}
    for name, array in found.items():  # averaging over a node in every step, then over nodes, averages over all ranks
        means = [np.mean([one[name] for one in everyone(step, shapes)], axis=0) for step in range(3)]
        np.testing.assert_allclose(array, -0.1 * sum(means), rtol=1e-4, atol=1e-5)
    assert_same_on_all_ranks(found, "local steps between nodes")
