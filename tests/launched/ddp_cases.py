"""Cases of the DDP driver alone: DDP's buckets and options, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import multiprocessing
import os
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcompress
from hvdcompress import ddp
from hvdcompress.ddp import shared_memory
from hvdcompress.engine.fallback import Verdict
from hvdcompress.engine.pieces import by_tensor
from hvdcompress.local_steps import LocalSteps
from hvdcompress.loopback import Loopback
from hvdcompress.plan import IN_ORDER
from tests.harness import (
    EXACT,
    OUT,
    Skip,
    assert_close,
    assert_same_on_all_ranks,
    case,
    heavy_tailed,
    logged,
    must_raise,
    summed,
)
from tests.launched.breaking import Two
from tests.promises.drivers.ddp import DdpDriver, DdpHandle, Net, reduced
from tests.promises.interactions import all_features_at_once

SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}


def gather(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def everyone(step: int, shapes: dict = SHAPES) -> list[dict]:
    return [heavy_tailed(shapes, step, rank) for rank in range(dist.get_world_size())]


def compressed(net: torch.nn.Module, by_hook: bool) -> tuple[DistributedDataParallel, ddp.Compressor]:
    """Wrap a net, with top-k attached to DDP, or registered as the hook that a framework would register."""
    if not by_hook:
        model = DistributedDataParallel(net)
        return model, ddp.attach(model, "topk", density=0.05)
    compressor, hook = ddp.hook(net, "topk", density=0.05)
    model = DistributedDataParallel(net)
    model.register_comm_hook(compressor, hook)
    return model, compressor


def against_loopback(
    model: DistributedDataParallel, method: str, steps: int, shapes: dict = SHAPES, **settings
) -> None:
    """Reduce the same gradients by DDP and by loopback."""
    compressor = ddp.attach(model, method, **settings)
    net = Loopback(method, world_size=dist.get_world_size(), **settings)
    for step in range(steps):
        given = everyone(step, shapes)
        got = reduced(model, given[dist.get_rank()])
        assert_close(got, net.allreduce_many(given)[0], summed(dist.get_world_size()), f"{method}, step {step}")
    compressor.close()


@case
def buckets_and_views_of_ddp_do_not_matter() -> None:
    """One bucket in the first step, others from the second on; a parameter each, or all; gradients as views of them."""
    results = []
    for cap in (1e-5, 0.004, 25):
        for view in (False, True):
            model = DistributedDataParallel(Net(SHAPES), bucket_cap_mb=cap, gradient_as_bucket_view=view)
            indices = []
            compressor = ddp.attach(model, "scalecom", density=0.02)
            receive = compressor.receive
            compressor.receive = lambda bucket, r=receive, i=indices: (i.append(bucket.index()), r(bucket))[1]
            steps = [reduced(model, everyone(step)[dist.get_rank()]) for step in range(4)]
            steps.append({name: compressor.residual(name).numpy() for name in SHAPES})
            compressor.close()
            results.append(steps)
            later = range({25: 1, 0.004: 3, 1e-5: 4}[cap])
            assert indices == [0, *later, *later, *later], "one bucket, and rebuilt at the second step"
    for other in results[1:]:
        for step, (got, want) in enumerate(zip(other, results[0], strict=True)):
            assert_close(got, want, EXACT, f"step {step}")


@case
def no_sync_accumulates() -> None:
    model = DistributedDataParallel(Net(SHAPES))
    compressor = ddp.attach(model, "topk", density=0.05)
    net = Loopback("topk", world_size=dist.get_world_size(), density=0.05)
    for step in range(3):
        sums = [{name: a + b for (name, a), b in zip(one.items(), two.values(), strict=True)}
                for one, two in zip(everyone(2 * step), everyone(2 * step + 1), strict=True)]  # fmt: skip
        model.zero_grad()
        with model.no_sync():
            model(everyone(2 * step)[dist.get_rank()]).backward()
        sent = compressor.ledger.bytes_sent()
        model(everyone(2 * step + 1)[dist.get_rank()]).backward()
        assert compressor.ledger.bytes_sent() > sent
        got = {name: parameter.grad.numpy() for name, parameter in model.module.named_parameters()}
        assert_close(got, net.allreduce_many(sums)[0], summed(dist.get_world_size()), f"step {step}")
    assert compressor.ledger.steps == 3


@case
def parameters_that_no_rank_uses_keep_their_residuals() -> None:
    """By themselves and in a bucket with others; one that some rank uses takes part."""
    for settings in ({"min_elements": 1}, {"min_elements": 1, "bucket_elements": 0}):
        for method in ("topk", "scalecom", "dgc"):
            model = DistributedDataParallel(Net(SHAPES), find_unused_parameters=True)
            compressor = ddp.attach(model, method, density=0.05, **settings)
            for step in range(6):
                given = everyone(step)[dist.get_rank()]
                without = "c" if step in (2, 3) else "a" if step == 4 and dist.get_rank() else ""
                kept = {name: compressor.residual(name) for name in SHAPES}
                model.zero_grad()
                model({name: gradient for name, gradient in given.items() if name != without}).backward()
                changed = [name for name in "abc" if not torch.equal(kept[name], compressor.residual(name))]
                assert changed == [name for name in "abc" if name != "c" or without != "c"], (method, step, changed)
                if without == "c":
                    assert model.module.c.grad is None
            compressor.close()


@case
def without_unused_parameters_looking_for_them_changes_nothing() -> None:
    against_loopback(DistributedDataParallel(Net(SHAPES), find_unused_parameters=True), "topk", 3, density=0.05)
    against_loopback(DistributedDataParallel(Net(SHAPES), static_graph=True), "topk", 3, density=0.05)


@case
def several_dtypes_and_frozen_parameters() -> None:
    module = torch.nn.Module()
    module.small, module.wide = Net({"w": (40, 41)}, "float16"), Net({"w": (40, 43)}, "float64")
    module.single, module.frozen = Net({"w": (40, 47)}), torch.nn.Parameter(torch.ones(9, 9), requires_grad=False)
    names = ("small", "wide", "single")
    module.forward = lambda given: sum(getattr(module, n)({"w": given[f"{n}.w"]}) for n in names)
    shapes = {f"{n}.w": tuple(getattr(module, n).w.shape) for n in names}
    model = DistributedDataParallel(module)
    compressor = ddp.attach(model, "topk", density=0.05)
    assert sorted(compressor.parameters) == sorted(shapes)
    net = Loopback("topk", world_size=dist.get_world_size(), density=0.05)
    for step in range(3):
        given = everyone(step, shapes)
        model.zero_grad()
        model(given[dist.get_rank()]).backward()
        dtypes = {name: p.grad.numpy().dtype for name, p in compressor.parameters.items()}
        want = net.allreduce_many([{n: a.astype(dtypes[n]) for n, a in one.items()} for one in given])[0]
        got = {name: p.grad.numpy() for name, p in compressor.parameters.items()}
        for name, array in want.items():  # loopback adds float16 as such, the driver in float32
            close = (2e-3, 1e-3) if array.dtype == np.float16 else summed(dist.get_world_size())
            assert_close({name: got[name]}, {name: array}, close, f"step {step}")


@case
def layouts_of_parameters() -> None:
    """A convolution in channels_last, and a transposed matrix."""
    net = Net({"w": (16, 12, 3, 3), "t": (40, 50)})
    net.w.data = net.w.data.to(memory_format=torch.channels_last)
    net.t.data = torch.zeros(50, 40).T
    against_loopback(DistributedDataParallel(net), "powersgd", 3, {"w": (16, 12, 3, 3), "t": (40, 50)}, min_elements=1)


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


@case
def complex_parameters_are_pairs_of_real_numbers() -> None:
    """In one bucket of DDP's and in several, also in channels_last; a complex number of 16 bits is float16 in pairs."""
    shapes = {"a": (40, 41, 2), "b": (40, 43), "c": (8, 3, 5, 5, 2)}
    for dtype, real in ((torch.complex64, np.float32), (torch.complex128, np.float64)):
        for method, settings in (("none", {}), ("topk", {"density": 0.05}), ("powersgd", {})):
            model = DistributedDataParallel(Complex(dtype), bucket_cap_mb=25 if method == "topk" else 0.001)
            compressor = ddp.attach(model, method, **settings)
            net = Loopback(method, world_size=dist.get_world_size(), **settings)
            for step in range(3):
                given = [
                    {name: array.astype(np.float32 if name == "b" else real) for name, array in one.items()}
                    for one in everyone(step, shapes)
                ]
                model.zero_grad()
                model(given[dist.get_rank()]).backward()
                grads = {name: p.grad for name, p in model.module.named_parameters()}
                got = {
                    n: (torch.view_as_real(g) if g.is_complex() else g).contiguous().numpy() for n, g in grads.items()
                }
                want = net.allreduce_many(given)[0]
                exact = method != "powersgd" or dist.get_world_size() <= 2
                close = summed(dist.get_world_size()) if exact else (1e-3, 1e-3)
                assert_close(got, want, close, f"{dtype} {method}, step {step}")
                assert_same_on_all_ranks(got, gather, f"{dtype} {method}")
            assert compressor.residual("a").shape == (40, 41, 2)
            compressor.close()


@case
def a_dtype_that_cannot_be_reduced_is_refused_by_name() -> None:
    model = torch.nn.Module()
    model.ok, model.wrong = (torch.nn.Parameter(torch.zeros(4, 4).to(d)) for d in (torch.float32, torch.float8_e4m3fn))
    must_raise(ValueError, ["'wrong'", "float8_e4m3fn"], lambda: ddp.hook(model, "topk"), gather)


@case
def a_parameter_that_is_trained_later_is_refused_by_name() -> None:
    """Unfrozen, added or replaced after DDP was made: DDP does not reduce its gradients. In evaluation it may be."""

    def unfreeze(net: torch.nn.Module) -> None:
        net.frozen.requires_grad_(True)

    def replace(net: torch.nn.Module) -> None:
        net.a = torch.nn.Parameter(torch.zeros(37, 41))

    def add(net: torch.nn.Module) -> None:
        net.new = torch.nn.Parameter(torch.zeros(3))

    for change, name in ((unfreeze, "frozen"), (replace, "a"), (add, "new")):
        for by_hook in (False, True):
            net = Net(SHAPES)
            net.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
            model, compressor = compressed(net, by_hook)
            given = everyone(0)[dist.get_rank()]
            model(given).backward()
            change(net)
            with torch.no_grad():
                model(given)
            must_raise(RuntimeError, [repr(name), "will not reduce"], lambda m=model, g=given: m(g), gather)
            compressor.close()


@case
def verify_looks_at_frozen_parameters_too() -> None:
    """Where ranks differ in one; but not in those that DDP is told to ignore."""
    for ignored in (False, True):
        net = Net(SHAPES)
        net.frozen = torch.nn.Parameter(torch.full((5,), float(dist.get_rank())), requires_grad=False)
        model = DistributedDataParallel(net)
        if ignored:
            net._ddp_params_and_buffers_to_ignore = ["frozen"]
        net.frozen.data.fill_(dist.get_rank())  # DDP has made them equal
        compressor = ddp.attach(model, "topk", density=0.05, verify_every=1)
        given = everyone(0)[dist.get_rank()]
        if ignored:
            model(given).backward()
        else:
            must_raise(ddp.PeerError, ["frozen"], lambda m=model, g=given: m(g).backward(), gather)
        compressor.close()


@case
def names_are_those_without_wrappers() -> None:
    """torch.compile and activation checkpointing add to names: rules match without it, and a state goes over."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self._orig_mod = inner

        def forward(self, given: dict) -> torch.Tensor:
            return self._orig_mod(given)

    states = []
    for wrap in (Wrapped, lambda net: net):
        model = DistributedDataParallel(wrap(Net(SHAPES)))
        compressor = ddp.attach(model, "topk", density=0.05, rules=[{"match": {"name": "a"}, "method": "none"}])
        assert sorted(compressor.parameters) == sorted(SHAPES)
        for saved in states:
            compressor.load_state_dict(saved)
        reduced(model, everyone(0)[dist.get_rank()])
        assert not compressor.residual("a").any() and compressor.residual("b").any()
        states.append(compressor.state_dict())
        compressor.close()


@case
def a_rule_without_a_tensor_is_warned_of() -> None:
    rules = [
        {"match": {"name": "a*"}, "method": "none"},
        {"match": {"name": "A*", "ndim": 2}, "method": "none"},
        {"match": {"name": "a"}, "method": "topk"},  # the first has it
    ]
    with logged() as lines:
        ddp.attach(DistributedDataParallel(Net(SHAPES)), "topk", rules=rules).close()
    wanted = [
        f"the plan's rule with match {{{words}}} applies to no tensor" for words in ("name: A*, ndim: 2", "name: a")
    ]
    found = [line for line in lines if "applies to no tensor" in line]
    assert len(found) == (2 if dist.get_rank() == 0 else 0), lines
    assert all(words in line for words, line in zip(wanted, found, strict=False)), found


@case
def copies_of_a_model_are_not_compressed() -> None:
    """A deep copy, an average of weights and a pickled model: their gradients are averaged by DDP, in the midst of the
    model's own steps, which are as without them."""
    given = [everyone(step)[dist.get_rank()] for step in range(4)]
    exact = Loopback("none", world_size=dist.get_world_size())
    alone = DistributedDataParallel(Net(SHAPES))
    ddp.attach(alone, "topk", density=0.05)
    want = [reduced(alone, gradients) for gradients in given]
    for by_hook in (False, True):
        net = Net(SHAPES)
        model, compressor = compressed(net, by_hook)
        for step, gradients in enumerate(given):
            got = reduced(model, gradients)
            assert_close(got, want[step], EXACT, f"step {step}")
            buffer = io.BytesIO()
            if by_hook:  # DDP itself keeps such a hook with a model, and cannot copy it: the wrapped module can be
                other = DistributedDataParallel(copy.deepcopy(net))
                torch.save(net, buffer)
            else:
                other = copy.deepcopy(model) if step % 2 else torch.optim.swa_utils.AveragedModel(model).module
                torch.save(model, buffer)
            buffer.seek(0)
            for copied in (other, torch.load(buffer, weights_only=False)):
                if isinstance(copied, DistributedDataParallel):
                    mean = exact.allreduce_many(everyone(step))[0]
                    assert_close(reduced(copied, gradients), mean, summed(dist.get_world_size()), f"copy at {step}")
        if not by_hook:
            ddp.attach(copied, "topk").close()
        compressor.close()


@case
def every_method_trains_with_batch_norm_and_clipping() -> None:
    for method in hvdcompress.available():
        torch.manual_seed(7)
        layers = (torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Tanh(), torch.nn.Linear(96, 10))
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        compressor = ddp.attach(model, method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(16):
            x = torch.randn(16, 64, generator=generator)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert np.mean(losses[-5:]) < np.mean(losses[:5]), (method, losses)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        assert len(set(gather(weights))) == 1, f"{method}: ranks differ"
        compressor.close()


@case
def a_gradscaler_that_overflows() -> None:
    model = DistributedDataParallel(torch.nn.Linear(64, 32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
    compressor = ddp.attach(model, "topk", density=0.1, loss_scale=scaler.get_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = 0
    for step in range(8):
        before = model.module.weight.detach().clone()
        optimizer.zero_grad()
        overflows = step % 3 == 0 and dist.get_rank() == dist.get_world_size() - 1
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.full((4, 64), 0.5))
        loss = out.float().pow(2).mean() * (float("inf") if overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changes += not torch.equal(before, model.module.weight)
    assert compressor.ledger.steps == changes == 5, "steps with an overflow are undone"
    assert bool(torch.isfinite(model.module.weight).all())
    assert len(set(gather((model.module.weight.detach().numpy().tobytes(), scaler.get_scale())))) == 1


def trained(
    options: dict, skipped: tuple[int, ...] = (), known: bool = True, scaler: object = None, **settings
) -> dict:
    """Train a small net, all tensors compressed by top-k; ``skipped``: steps that the optimizer does not take."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    first, *others = (module.parameters() for module in (layers[0], layers[2]))
    groups = [{"params": list(first), **options}, {"params": [p for some in others for p in some], **options}]
    groups[1] |= options.get("second", {})
    for group in groups:
        group.pop("second", None)
    optimizer = torch.optim.SGD(groups, lr=0.1)
    given = {"optimizer": optimizer} if known else {}
    scale = {"loss_scale": scaler.get_scale} if scaler else {}
    settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel", **settings}
    compressor = ddp.attach(model, "topk", **given, **scale, **settings)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(12):
        x, y = torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if scaler:
            scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            continue
        loss.backward()
        if step not in skipped:
            optimizer.step()
    compressor.close()
    return {name: p.detach().numpy().copy() for name, p in model.module.named_parameters()}


@case
def a_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """Heavy ball, dampening, Nesterov, groups of different momentum, steps that are skipped, and a GradScaler that
    skips one."""
    for options, plain in (
        ({"momentum": 0.9, "lr": 0.05}, {"lr": 0.5}),
        ({"momentum": 0.9, "dampening": 0.5, "lr": 0.1}, {"lr": 0.5}),
        ({"momentum": 0.9, "nesterov": True, "lr": 0.05}, {"lr": 0.5}),
        ({"momentum": 0.9, "lr": 0.05, "second": {"momentum": 0.5, "lr": 0.25}}, {"lr": 0.5}),
    ):
        for skipped in ((), (3, 4, 8)):
            got, want = trained(options, skipped), trained(plain, skipped)
            assert_close(got, want, (1e-5, 1e-5), f"{options}, without steps {skipped}")
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    got, want = trained({"momentum": 0.9, "lr": 0.05}, scaler=scalers[0]), trained({"lr": 0.5}, scaler=scalers[1])
    assert_close(got, want, (1e-5, 1e-5), "GradScaler")


@case
def an_optimizer_is_found_at_its_first_step() -> None:
    """Without ``optimizer=`` all but the first exchange are handed over without momentum, and one that takes the place
    of another starts with an empty buffer."""
    options = {"momentum": 0.9, "lr": 0.05}
    got, known = trained(options, known=False), trained(options)
    kept = trained(options, known=False, optimizer_momentum="keep")
    distance = {name: np.abs(got[name] - known[name]).max() / np.abs(known[name] - kept[name]).max() for name in got}
    assert max(distance.values()) > 0 and not all(np.array_equal(got[name], kept[name]) for name in got)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    compressor = ddp.attach(model, "topk", density=0.1, min_elements=1, optimizer_momentum="cancel")
    for lr in (0.1, 0.2):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
        buffer = optimizer.state[model.module.weight]["momentum_buffer"].numpy().reshape(-1)
        state, _ = compressor.local.find("weight")
        (piece,) = by_tensor(state.momentum.content, state.bucket)[-1:]
        assert np.count_nonzero(np.abs(buffer) > 1e-4 * np.abs(buffer).max()) <= len(piece.values) * (3 if lr else 1)
    compressor.close()


@case
def auto_takes_beta1_out_of_adam() -> None:
    """What a plan says besides stays, and so does the optimizer where the user has chosen a method."""
    for kind, betas in ((torch.optim.SGD, None), (torch.optim.AdamW, (0.0, 0.999))):
        model = DistributedDataParallel(torch.nn.Linear(64, 10))
        optimizer = kind(model.parameters(), lr=0.1)
        compressor = ddp.attach(model, {"method": "auto", "min_elements": 7}, optimizer=optimizer, fallback=False)
        assert (compressor.plan.min_elements, compressor.plan.fallback) == (7, False)
        assert optimizer.param_groups[0].get("betas") == betas
        compressor.close()
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters())
    compressor = ddp.attach(model, "powersgd", optimizer=optimizer)
    assert optimizer.param_groups[0]["betas"][0] == 0.9
    compressor.close()


@case
def adam_has_its_beta1_again_where_compression_is_given_up() -> None:
    """Also in a training that goes on from there, whether its optimizer is given before or after the state."""
    gradients = everyone(0)[dist.get_rank()]
    model = DistributedDataParallel(Net(SHAPES))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.99))
    compressor = ddp.attach(model, "auto", optimizer=optimizer, min_elements=7)
    reduced(model, gradients)
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.99)
    compressor.local.fallback.verdict = Verdict.FLUSH  # as after comparing the first steps
    reduced(model, gradients)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    saved = compressor.state_dict()
    for given_before in (True, False):
        model = DistributedDataParallel(Net(SHAPES))
        optimizer = torch.optim.Adam(model.parameters())
        compressor = ddp.attach(model, "auto", optimizer=optimizer if given_before else None, min_elements=7)
        compressor.load_state_dict(saved)
        compressor.use_optimizer(optimizer)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@case
def clip_norm_with_a_gradscaler_and_accumulation() -> None:
    """The recipe: ``clip_norm`` clips the averaged gradient itself, whatever the loss scale and momentum are."""
    results = []
    for momentum, lr in ((0.9, 0.05), (0.0, 0.5)):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.Linear(50, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        settings = {"density": 0.1, "min_elements": 1, "clip_norm": 0.3, "optimizer_momentum": "cancel"}
        compressor = ddp.attach(model, "topk", optimizer=optimizer, loss_scale=scaler.get_scale, **settings)
        generator, norms = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(8):
            optimizer.zero_grad()
            for last in (False, True):
                x, y = torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)
                with contextlib.nullcontext() if last else model.no_sync():
                    scaler.scale(torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
            norms.append(compressor.gradient_norm())
            if not momentum:
                scaler.unscale_(optimizer)
                handed = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
                assert abs(float(handed) - min(0.3, norms[-1])) < 1e-4
            scaler.step(optimizer)
            scaler.update()
        assert max(norms) > 0.3
        results.append({name: p.detach().numpy().copy() for name, p in model.module.named_parameters()})
        compressor.close()
    assert_close(*results, (1e-5, 1e-5), "clipped")


@case
def training_goes_on_from_saved_state_to_the_bit() -> None:
    """In a new DDP, whose buckets are those of a first step again."""

    def steps(model: DistributedDataParallel, first: int, last: int) -> list[dict]:
        return [reduced(model, everyone(step)[dist.get_rank()]) for step in range(first, last)]

    for method in ("scalecom", "powersgd", "dgc"):
        model = DistributedDataParallel(Net(SHAPES), bucket_cap_mb=0.004)
        compressor = ddp.attach(model, method)
        steps(model, 0, 3)
        saved, want = compressor.state_dict(), steps(model, 3, 6)
        again = DistributedDataParallel(Net(SHAPES))
        ddp.attach(again, method).load_state_dict(saved)
        for got, expected in zip(steps(again, 3, 6), want, strict=True):
            assert_close(got, expected, EXACT, method)


@case
def the_model_is_found_in_others() -> None:
    class Wrapper(torch.nn.Module):  # as Fabric's: the DDP module is inside
        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self.module = inner

        def forward(self, *given):
            return self.module(*given)

    inside = Wrapper(DistributedDataParallel(Wrapper(Net(SHAPES))))
    compressor = ddp.attach(inside, "topk", density=0.05)
    assert list(compressor.parameters) == [f"module.{name}" for name in SHAPES], "the wrapped module's own names"
    inside(everyone(0)[dist.get_rank()]).backward()
    assert compressor.ledger.steps == 1 and "topk" in compressor.describe()
    must_raise(
        ValueError, ["no DistributedDataParallel", "wrap it first"], lambda: ddp.attach(Net(SHAPES), "topk"), gather
    )
    two = torch.nn.ModuleList([DistributedDataParallel(Net(SHAPES)), DistributedDataParallel(Net(SHAPES))])
    must_raise(ValueError, ["2 DistributedDataParallel modules"], lambda: ddp.attach(two, "topk"), gather)


@case
def two_arguments_for_register_comm_hook() -> None:
    module = Net(SHAPES)
    state, hook = ddp.hook(module, "topk", density=0.05)
    model = DistributedDataParallel(module)
    model.register_comm_hook(state, hook)
    net = Loopback("topk", world_size=dist.get_world_size(), density=0.05)
    for step in range(3):
        given = everyone(step)
        got = reduced(model, given[dist.get_rank()])
        assert_close(got, net.allreduce_many(given)[0], summed(dist.get_world_size()), f"step {step}")


@case
def a_second_hook_is_refused() -> None:
    model = DistributedDataParallel(Net(SHAPES))
    first = ddp.attach(model, "topk")
    must_raise(ValueError, ["communication hook", "DDP takes one"], lambda: ddp.attach(model, "fp16"), gather)
    must_raise(
        ValueError, ["cannot be attached"], lambda: ddp.attach(DistributedDataParallel(Net(SHAPES)), first), gather
    )
    stock = DistributedDataParallel(Net(SHAPES))
    stock._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    must_raise(ValueError, ["built-in communication hook", "DDP takes one"], lambda: ddp.attach(stock, "topk"), gather)


@case
def optimizers_inside_the_backward_pass_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def stepping(net: Net) -> Net:
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        return net

    words = ["_apply_optimizer_in_backward", "its own hook"]
    model = DistributedDataParallel(stepping(Net(SHAPES)))
    must_raise(ValueError, words, lambda: ddp.attach(model, "topk"), gather)
    model = DistributedDataParallel(Net(SHAPES))
    ddp.attach(model, "topk")
    stepping(model.module)
    must_raise(ValueError, words, lambda: model(everyone(0)[dist.get_rank()]), gather)
    fused = DistributedDataParallel(Net(SHAPES))
    fused._register_fused_optim(torch.optim.SGD, 0.1)
    must_raise(ValueError, ["_register_fused_optim", "DDP takes one"], lambda: ddp.attach(fused, "topk"), gather)


@case
def options_that_go_past_the_hook_are_refused() -> None:
    module = Net(SHAPES)
    delayed = {"delay_all_reduce_named_params": [("a", module.a)], "param_to_hook_all_reduce": module.b}
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    for word, options in (("delay_all_reduce_named_params", delayed), ("skip_all_reduce_unused_params", skipping)):
        model = DistributedDataParallel(module, **options)
        must_raise(ValueError, [word], lambda m=model: ddp.attach(m, "topk"), gather)
    model = DistributedDataParallel(Net(SHAPES))
    model.mixed_precision = object()  # DDP wants a GPU for it
    must_raise(ValueError, ["mixed_precision=", "torch.autocast"], lambda: ddp.attach(model, "topk"), gather)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(Net(SHAPES))
    must_raise(ValueError, ["python_reducer"], lambda: ddp.attach(model, "topk"), gather)


@case
def join_and_a_static_graph_with_no_sync_are_refused() -> None:
    model = DistributedDataParallel(Net(SHAPES), static_graph=True)
    ddp.attach(model, "topk")
    given = everyone(0)[dist.get_rank()]
    with model.no_sync():
        must_raise(RuntimeError, ["static_graph", "no_sync"], lambda: model(given), gather)
    model(given).backward()
    other = DistributedDataParallel(Net(SHAPES))
    ddp.attach(other, "topk")

    def joined() -> None:
        with other.join():
            other(given)

    must_raise(RuntimeError, ["join()"], joined, gather)


@case
def sparse_gradients_are_refused_on_all_ranks() -> None:
    model = DistributedDataParallel(torch.nn.Embedding(500, 10, sparse=True))
    ddp.attach(model, "topk")
    must_raise(
        Exception, ["sparse gradients", "weight"], lambda: model(torch.tensor([1, 2])).sum().backward(), gather, False
    )


@case
def an_error_comes_within_seconds_and_training_goes_on() -> None:
    """Ranks that wait for one that has failed are freed; what has failed is undone."""
    if dist.get_world_size() > 2:
        raise Skip("two ranks tell")
    model = DistributedDataParallel(Net(SHAPES), bucket_cap_mb=1e-5)
    compressor = ddp.attach(model, "topk", density=0.05)
    given = everyone(0)[dist.get_rank()]
    vector = compressor.framework.vector

    def fails(*rest):
        raise MemoryError("made by the test")

    for _ in range(3):
        reduced(model, given)
        compressor.framework.vector = fails if dist.get_rank() == 1 else vector
        began = time.monotonic()
        must_raise(Exception, ["made by the test"], lambda: reduced(model, given), gather, False)
        assert time.monotonic() - began < 5
        compressor.framework.vector = vector
    assert compressor.ledger.steps == 3
    assert sum(thread.name.startswith("hvdcompress") for thread in threading.enumerate())


def error_of(run) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("no error")


@case
def a_backward_pass_that_ends_in_the_middle() -> None:
    """The rank has its own error, and the others, who wait for its gradients, are told, though it does nothing more."""
    model = DistributedDataParallel(Two(), bucket_cap_mb=1e-5)
    compressor = ddp.attach(model, "topk", density=0.05)
    x, odd = torch.ones(3, 40), dist.get_rank() == 1
    for _ in range(2):
        model(x).backward()
    loss, began = model(x, MemoryError("made by the test") if odd else None), time.monotonic()
    error = error_of(loss.backward)
    if odd:
        assert isinstance(error, MemoryError)
        assert "Expected to have finished" in str(error_of(lambda: model(x))), "DDP itself does not go on"
    else:
        assert isinstance(error, ddp.PeerError) and "rank 1: a backward pass ended before" in str(error)
    assert time.monotonic() - began < 10
    assert compressor.ledger.steps == 2


@case
def a_smaller_batch_after_a_backward_pass_that_failed() -> None:
    """Programs that catch an error, and begin anew with another model, as find_executable_batch_size does: what was
    left in the middle is over, for the watchdog, too, and can be closed."""
    failed = []
    for breaks in (True, True, False):
        model = DistributedDataParallel(Two(), bucket_cap_mb=1e-5)
        compressor = ddp.attach(model, "topk", density=0.05, end_after=4)
        model(torch.ones(3, 40)).backward()
        loss = model(torch.ones(3, 40), MemoryError("made by the test") if breaks else None)
        if breaks:
            assert isinstance(error_of(loss.backward), MemoryError)
            failed.append(compressor)
        else:
            loss.backward()
    began = time.monotonic()
    while time.monotonic() - began < 5:  # longer than that
        model(torch.ones(3, 40)).backward()
        time.sleep(0.2)
    for one in failed:
        one.close()
    assert time.monotonic() - began < 10


@case
def many_models_in_one_process_leave_nothing_behind() -> None:
    """Without close(), as in a search of hyper-parameters: neither file descriptors nor threads."""

    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    found = []
    for number in range(10):
        model = DistributedDataParallel(Two())
        ddp.attach(model, "topk", density=0.05)
        for _ in range(2):
            model(torch.ones(3, 40)).backward()
        del model
        if number >= 2:  # what there is once for the process is there by then
            found.append(left())
    for before, after in zip(found[0], found[-1], strict=True):
        assert after < before + 10, found  # each left five file descriptors and three threads


class Part(DdpDriver):
    """Some ranks, whose gradients are those of two backward passes, the first of them without exchanges."""

    def __init__(self, group, folder: str):
        self.group, self.folder = group, OUT / folder
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> DdpHandle:
        return DdpHandle(method, settings, shapes, dtype, op, loss_scale, self.group, passes=2)

    def meet(self) -> None:
        dist.barrier(self.group)


@case
def no_sync_with_all_other_features() -> None:
    all_features_at_once(Part(dist.group.WORLD, "no_sync"))


@case
def a_process_group_with_all_other_features() -> None:
    if dist.get_world_size() < 3:
        raise Skip("needs 3 ranks")
    pair = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        all_features_at_once(Part(pair, "group"))


@case
def the_two_networks_of_a_gan() -> None:
    """The generator's loss goes through the discriminator, whose gradients of it are thrown away."""
    torch.manual_seed(0)
    judge, twin, generator = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30), torch.nn.Linear(20, 40)
    twin.load_state_dict(judge.state_dict())
    models = [DistributedDataParallel(net) for net in (judge, twin, generator)]
    compressors = [ddp.attach(model, "topk", density=0.05, min_elements=0) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        real, z = torch.randn(16, 40, generator=noise), torch.randn(16, 20, generator=noise)
        fake = models[2](z)
        for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
            optimizer.zero_grad()
            (model(fake.detach()).sigmoid().mean() - model(real).sigmoid().mean()).backward()
            optimizer.step()
        optimizers[2].zero_grad()
        (-models[0](fake).sigmoid().mean()).backward()
        optimizers[2].step()
        compressors[0].discard()
        assert error_of(compressors[0].discard) is not None
        assert_close(
            {n: p.detach().numpy() for n, p in judge.named_parameters()},
            {n: p.detach().numpy() for n, p in twin.named_parameters()},
            EXACT,
            "the discriminator, and one that never saw the generator's loss",
        )
    for compressor in compressors:
        compressor.close()


@case
def a_pause_needs_all_ranks_and_whole_steps() -> None:
    model, compressor = compressed(Two(), by_hook=False)
    model(torch.ones(3, 40)).backward()
    if dist.get_rank() == 0:
        with compressor.paused():
            must_raise(RuntimeError, ["ranks disagree", "'paused'"], model(torch.ones(3, 40)).backward, gather)
    else:
        must_raise(RuntimeError, ["ranks disagree", "'paused'"], model(torch.ones(3, 40)).backward, gather)
    kept = compressor.state_dict()["steps"]
    with compressor.paused():
        model(torch.ones(3, 40)).backward()
    assert compressor.state_dict()["steps"] == kept
    compressor.close()


@case
def the_momentum_buffer_is_known_whatever_the_optimizer_does() -> None:
    """Everything is sent and all momentum cancelled, so the buffer is the last gradient, ten times: with an optimizer
    of the user's own, steps without a gradient or with zeros, steps that are left out, and pauses."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    for optimizer_class in (torch.optim.SGD, Own):
        net = torch.nn.Linear(64, 64, bias=False)
        model = DistributedDataParallel(net)
        optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"density": 1.0, "min_elements": 1, "optimizer_momentum": "cancel", "optimizer": optimizer}
        compressor = ddp.attach(model, "topk", **settings)

        def train(gradient: float, model=model, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            (model(torch.ones(1, 64)) * gradient).sum().backward()
            optimizer.step()

        for step in range(12):
            if step in (2, 5):
                optimizer.zero_grad()
                optimizer.step()
            if step == 7:
                net.weight.grad.zero_()
                optimizer.step()
            if step in (3, 8):
                model(torch.ones(1, 64)).sum().backward()  # as a GradScaler that skips a step
            if step in (4, 5, 9):
                with compressor.paused():
                    train(0.0)
            train(step + 1.0)
            buffer = optimizer.state[net.weight]["momentum_buffer"]
            want = torch.full_like(buffer, 10.0 * (step + 1))
            assert torch.allclose(buffer, want, rtol=1e-4), (optimizer_class, step, float(buffer[0, 0]))
        compressor.close()


@case
def a_parameter_without_a_gradient_does_not_wait() -> None:
    """Everything is sent, so momentum is as the optimizer has it, also when a parameter was frozen for some steps."""

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.zeros(40, 40)) for _ in range(2))

        def forward(self) -> torch.Tensor:
            return (self.a + self.b).sum()

    finals = []
    for attached in (False, True):
        net = Sum()
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if attached:
            compressor = ddp.attach(model, "topk", density=1.0, min_elements=1, optimizer=optimizer)
        for step in range(16):
            net.b.requires_grad_(step < 2 or step >= 12)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        finals.append({name: parameter.detach().numpy().copy() for name, parameter in net.named_parameters()})
    compressor.close()
    assert_close(finals[1], finals[0], (1e-4, 1e-4), "as without compression")


@case
def a_fork_may_collect_what_was_dropped() -> None:
    """As a DataLoader's worker does, at any moment: the process group of a model that is no more is the parent's."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
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


@case
def a_state_goes_on_when_more_parameters_are_trained() -> None:
    """As with gradual unfreezing: what was saved is there, and what is new begins at zero, in groups of their own."""

    def attached(frozen: bool) -> tuple[torch.nn.Module, DistributedDataParallel, ddp.Compressor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        net[0].requires_grad_(not frozen)
        model = DistributedDataParallel(net)
        return net, model, ddp.attach(model, "topk", density=0.05, min_elements=1)

    _, model, first = attached(frozen=True)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model(x).square().mean().backward()
    saved = first.state_dict()
    net, model, second = attached(frozen=False)
    with logged() as lines:
        second.load_state_dict(saved)
    assert len([line for line in lines if "'0.bias', '0.weight'" in line]) == (dist.get_rank() == 0), lines
    for name in ("1.weight", "1.bias"):
        assert torch.equal(second.residual(name), first.residual(name)) and second.residual(name).any(), name
    for _ in range(2):
        model(x).square().mean().backward()
    assert second.state_dict()["steps"] == {"0.weight": 2, "0.bias": 2, "1.weight": 5, "1.bias": 5}
    again = attached(frozen=False)[2]
    again.load_state_dict(second.state_dict())
    assert torch.equal(again.residual("0.weight"), second.residual("0.weight"))
    assert_same_on_all_ranks({n: p.grad.numpy() for n, p in net.named_parameters()}, gather, "gradients")
    for one in (first, second, again):
        one.close()


GET = shared_memory.SharedMemory.get


def refuse(memory: shared_memory.SharedMemory, note: shared_memory.Note) -> np.ndarray:
    """Open no memory of other ranks, on the first rank of each node."""
    if dist.get_rank() % 2 == 0 and note.pid != os.getpid():
        raise PermissionError(note.pid)
    return GET(memory, note)


@case
def two_levels_through_shared_memory_and_without_it() -> None:
    if "NODES" not in os.environ:
        raise Skip("needs nodes")
    nodes = int(os.environ["NODES"])
    shapes = {"a": (300, 400), "b": (7,), "c": (200, 500), "d": (90, 80)}
    before = shared_memory.SMALL, shared_memory.FIRST
    for is_shared in (True, False):
        shared_memory.SMALL, shared_memory.FIRST = 1000, 4096
        if not is_shared:  # as in a container of its own: the other ranks cannot open this rank's memory
            shared_memory.SharedMemory.get = refuse  # type: ignore[method-assign]
        try:
            model = DistributedDataParallel(Net(shapes))
            compressor = ddp.attach(model, "topk", density=0.1, nodes=nodes, optimizer_momentum="keep")
            net = Loopback("topk", dist.get_world_size(), density=0.1, nodes=nodes, grouping=IN_ORDER)
            for step in range(3):
                given = everyone(step, shapes)
                want = net.allreduce_many(given)[dist.get_rank()]
                assert_close(reduced(model, given[dist.get_rank()]), want, EXACT, f"shared {is_shared}, step {step}")
            assert (compressor._memory is not None) == is_shared
            compressor.close()
        finally:
            shared_memory.SMALL, shared_memory.FIRST = before
            shared_memory.SharedMemory.get = GET  # type: ignore[method-assign]


@case
def ddp_inside_nodes_and_local_steps_between_them() -> None:
    if "NODES" not in os.environ:
        raise Skip("needs nodes")
    nodes = int(os.environ["NODES"])
    rank, inside = dist.get_rank(), dist.get_world_size() // nodes
    here, _ = dist.new_subgroups_by_enumeration([[n * inside + i for i in range(inside)] for n in range(nodes)])
    across, _ = dist.new_subgroups_by_enumeration([[n * inside + i for n in range(nodes)] for i in range(inside)])
    shapes = {"a": (30, 40), "b": (7,)}
    net = Net(shapes)
    model = DistributedDataParallel(net, process_group=here)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(net, optimizer, every=3, outer=None, process_group=across) as local:
        means = []
        for step in range(3):
            given = everyone(step, shapes)
            reduced(model, given[rank])
            optimizer.step()
            local.step()
            means.append({name: np.mean([one[name] for one in given], axis=0) for name in shapes})
    found = {name: each.detach().numpy() for name, each in net.named_parameters()}
    for name, array in found.items():  # averaging over a node in every step, then over nodes, averages over all ranks
        np.testing.assert_allclose(array, -0.1 * sum(mean[name] for mean in means), rtol=1e-4, atol=1e-5)
    assert_same_on_all_ranks(found, gather, "local steps between nodes")
