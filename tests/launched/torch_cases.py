"""Cases of the torch driver alone: the stock optimizer's options, and what is the framework's own.

Cases must not share parameter names, as a case that makes ranks fail leaves collectives of those names behind.
"""

from __future__ import annotations

import re

import horovod.torch as hvd
import numpy as np
import torch

import hvdcompress
from hvdcompress.horovod.torch import Compressor, attach
from hvdcompress.loopback import Loopback
from tests.harness import EXACT, OUT, REORDERED, Skip, assert_close, case, summed
from tests.launched.timeline import check_names
from tests.launched.torch_model import (
    against_loopback,
    assert_same_on_all_ranks,
    gradients,
    optimizer,
    parameters,
    reduce_once,
)
from tests.promises.drivers.torch import PAIR, TorchDriver, TorchHandle, backward
from tests.promises.interactions import all_features_at_once
from tests.promises.variants import METHODS, ROUTES


@case
def equals_loopback_with_predivide() -> None:
    for method in ("none", "topk", "scalecom"):
        against_loopback(f"pre.{method}", method, 3, gradient_predivide_factor=2.0)


@case
def one_call_attaches_to_an_optimizer() -> None:
    params = parameters("attach")
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    opt = attach(sgd, params.items(), "topk", op=hvd.Sum, density=0.1)
    net = Loopback("topk", world_size=hvd.size(), density=0.1)
    for step in range(3):
        everyone = [gradients(params, step, rank) for rank in range(hvd.size())]
        got = reduce_once(opt, params, everyone[hvd.rank()])
        assert_close(got, net.allreduce_many(everyone, op="sum")[0], REORDERED, f"step {step}")
    assert opt.compressor.ledger.steps == 3
    assert attach(sgd, params.items()).compressor.plan.fallback, "auto is the default"
    for method, beta1 in (("auto", 0.0), ("topk", 0.9)):
        adam = attach(torch.optim.Adam(params.values()), params.items(), method)
        assert adam.param_groups[0]["betas"][0] == beta1
    adam = torch.optim.Adam(params.values())
    attach(adam, params.items())
    assert adam.param_groups[0]["betas"][0] == 0.0


@case
def parameters_without_gradient_and_frozen_ones() -> None:
    params = parameters("none_grad")
    frozen = torch.nn.Parameter(torch.ones(64, 64), requires_grad=False)
    params_all = {**params, "none_grad.frozen": frozen}
    comp = Compressor("topk", params_all.items(), density=0.1)
    opt = optimizer(params_all, comp)
    net = Loopback("topk", world_size=hvd.size(), density=0.1)
    for step in range(4):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        for r, grads in enumerate(everyone):  # rank r has no gradient for parameter number r
            grads[list(params)[(r + step) % len(params)]][...] = 0
        missing = list(params)[(hvd.rank() + step) % len(params)]
        got = reduce_once(opt, params, everyone[hvd.rank()], [n for n in params if n != missing])
        assert_close(got, net.allreduce_many(everyone)[0], summed(hvd.size()), f"step {step}")
    assert frozen.grad is None and bool((frozen == 1).all())


@case
def a_parameter_that_is_frozen_in_the_middle_of_a_training() -> None:
    """It gets zeros, also where its old gradient is still there, and keeps its residual until it is trained again."""
    params = parameters("thaw")
    comp = Compressor("topk", params.items(), density=0.1)
    opt = optimizer(params, comp)
    net = Loopback("topk", world_size=hvd.size(), density=0.1)
    name = "thaw.a"
    for step in range(8):
        params[name].requires_grad_(not 2 <= step < 5)
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        if params[name].requires_grad:
            want = net.allreduce_many(everyone)[0]
            got = reduce_once(opt, params, everyone[hvd.rank()])
            assert_close(got, want, summed(hvd.size()), f"step {step}")
            continue
        kept, old = comp.residual(name), params[name].grad.clone()
        assert kept.any()
        rest = [n for n in params if n != name]
        if step == 3:  # zero_grad(set_to_none=False) and a program that forgets it
            for other in rest:
                params[other].grad = None
            params[name].grad = old.fill_(7.0)
            backward(params, everyone[hvd.rank()], rest)
            opt.synchronize()
            got = {n: p.grad.detach().numpy().copy() for n, p in params.items()}
        else:
            got = reduce_once(opt, params, everyone[hvd.rank()], rest)
        assert not got[name].any(), f"step {step}: it moves"
        assert torch.equal(comp.residual(name), kept)
        want = net.allreduce_many([{n: one[n] for n in rest} for one in everyone])[0]
        assert_close({n: got[n] for n in rest}, want, summed(hvd.size()), f"step {step}")


@case
def frozen_parameters_are_not_exchanged() -> None:
    """As of an adapter on a frozen model, whose names are all given: neither bytes nor state, also of other dtypes."""
    sent, sizes = [], []
    for number in range(2):
        params = parameters(f"lora{number}")
        frozen = {
            f"lora{number}.{n}": torch.nn.Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
            for n, dtype in (("f", torch.float32), ("q", torch.uint8))
        }
        comp = Compressor("topk", {**params, **(frozen if number else {})}.items(), density=0.1)
        opt = optimizer(params, comp)
        for step in range(3):
            reduce_once(opt, params, gradients(params, step, hvd.rank()))
        sent.append(comp.ledger.bytes_sent())
        sizes.append(sum(a.numel() for slots in comp.state_dict()["state"].values() for a in slots.values()))
    assert sent[0] == sent[1] and sizes[0] == sizes[1]


@case
def optimizers_that_share_all_names() -> None:
    """Two optimizers of one model, to whose Compressors all of its names are given: each exchanges its own alone."""
    sent, finals = [], []
    for number in range(2):
        params = parameters(f"shared{number}")
        halves = [dict(list(params.items())[part::2]) for part in range(2)]
        settings = {"density": 0.1, "optimizer_momentum": "keep"}  # adapted momentum sees whole groups
        comps = [Compressor("topk", (params if number else half).items(), **settings) for half in halves]
        opts = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(half.values(), lr=0.1, momentum=0.9), params.items() if number else half.items(), comp
            )
            for half, comp in zip(halves, comps, strict=True)
        ]
        for step in range(4):
            before = sum(comp.ledger.bytes_sent() for comp in comps)
            for opt in opts:
                opt.zero_grad()
            drawn = gradients(parameters("shared"), step, hvd.rank())
            backward(params, dict(zip(params, drawn.values(), strict=True)))
            for opt in opts:
                opt.step()
        sent.append(sum(comp.ledger.bytes_sent() for comp in comps) - before)  # of the last step
        finals.append({name.split(".")[-1]: p.detach().numpy() for name, p in params.items()})
        assert [sorted(comp.state_dict()["steps"]) for comp in comps] == [sorted(half) for half in halves]
    assert sent[0] == sent[1]
    assert_close(finals[0], finals[1], summed(hvd.size()), "parameters")


@case
def a_bucket_with_members_that_get_no_gradient() -> None:
    shapes = {f"s{number}": (20, 7) for number in range(6)}
    params = parameters("bucketless", shapes=shapes)
    settings = {"density": 0.1, "bucket_elements": 10_000, "min_elements": 1}
    comp = Compressor("scalecom", params.items(), **settings)
    opt = optimizer(params, comp)
    net = Loopback("scalecom", world_size=hvd.size(), **settings)
    for step in range(3):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        for grads in everyone:
            grads["bucketless.s3"][...] = 0
        got = reduce_once(opt, params, everyone[hvd.rank()], [n for n in params if not n.endswith("s3")])
        assert_close(got, net.allreduce_many(everyone)[0], summed(hvd.size()), f"step {step}")


@case
def several_backward_passes_per_step() -> None:
    params = parameters("passes")
    comp = Compressor("scalecom", params.items(), density=0.02)
    opt = optimizer(params, comp, backward_passes_per_step=3)
    net = Loopback("scalecom", world_size=hvd.size(), density=0.02)
    for step in range(4):
        sums = [{n: np.zeros(p.shape, np.float32) for n, p in params.items()} for _ in range(hvd.size())]
        for p in params.values():
            p.grad = None
        for part in range(3):
            for rank in range(hvd.size()):
                for name, grad in gradients(params, 3 * step + part, rank).items():
                    sums[rank][name] += grad
            backward(params, gradients(params, 3 * step + part, hvd.rank()))
        opt.synchronize()
        got = {name: p.grad.numpy() for name, p in params.items()}
        assert_close(got, net.allreduce_many(sums)[0], summed(hvd.size()), f"step {step}")


@case
def groups() -> None:
    for method in ("none", "fp16", "scalecom", "topk"):
        for kind in ("number", "list"):
            params = parameters(f"groups.{method}.{kind}")
            chosen = 2 if kind == "number" else [list(params.values())[:3]]
            comp = Compressor(method, params.items())
            opt = optimizer(params, comp, groups=chosen)
            net = Loopback(method, world_size=hvd.size())
            for step in range(3):
                everyone = [gradients(params, step, r) for r in range(hvd.size())]
                got = reduce_once(opt, params, everyone[hvd.rank()])
                if hvd.size() == 2 or method != "fp16":
                    assert_close(got, net.allreduce_many(everyone)[0], summed(hvd.size()), f"{method} {kind} {step}")


@case
def channels_last() -> None:
    params = {"cl.w": torch.nn.Parameter(torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last))}
    comp = Compressor("topk", params.items(), density=0.02)
    opt = optimizer(params, comp)
    net = Loopback("topk", world_size=hvd.size(), density=0.02)
    for step in range(3):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        params["cl.w"].grad = None
        weight = torch.from_numpy(everyone[hvd.rank()]["cl.w"]).to(memory_format=torch.channels_last)
        (params["cl.w"] * weight).sum().backward()
        assert params["cl.w"].grad.is_contiguous(memory_format=torch.channels_last)
        opt.synchronize()
        got = {"cl.w": params["cl.w"].grad.contiguous().numpy()}
        assert_close(got, net.allreduce_many(everyone)[0], EXACT, f"step {step}")


@case
def a_gradscaler_that_overflows() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    named = [(f"scaler.{n}", p) for n, p in model.named_parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
    comp = Compressor("topk", named, density=0.1, loss_scale=scaler.get_scale)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=comp)
    before = model.weight.detach().clone()
    for step in range(8):
        opt.zero_grad()
        x = torch.full((4, 64), 1e4 if step % 3 == 0 and hvd.rank() == hvd.size() - 1 else 0.5)
        scaler.scale((model(x) * 1e28 if step % 3 == 0 else model(x)).pow(2).mean().clamp(max=3e38)).backward()
        opt.synchronize()
        scaler.unscale_(opt)
        with opt.skip_synchronize():
            scaler.step(opt)
        scaler.update()
    assert not torch.equal(before, model.weight)
    assert bool(torch.isfinite(model.weight).all())
    assert_same_on_all_ranks({"w": model.weight.detach().numpy(), "s": np.array([scaler.get_scale()])}, "scaler")


@case
def a_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """The wrapped optimizer is found by itself; with gradients accumulated, and with ``synchronize()`` called first."""
    results = {}
    for what in ("step", "accumulated", "synchronized"):
        for momentum, lr in ((0.9, 0.05), (0.0, 0.5)):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
            named = [(f"momentum.{what}.{momentum}.{n}", p) for n, p in model.named_parameters()]
            compressor = Compressor("topk", named, density=0.05, min_elements=1, optimizer_momentum="cancel")
            sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            passes = 2 if what == "accumulated" else 1
            opt = hvd.DistributedOptimizer(
                sgd, named_parameters=named, compression=compressor, backward_passes_per_step=passes
            )
            if what == "synchronized":  # the optimizer is found by its first step, which comes after the exchange here
                compressor.use_optimizer(opt)
            generator = torch.Generator().manual_seed(hvd.rank())
            for _ in range(8):
                opt.zero_grad()
                for _ in range(passes):
                    x = torch.randn(16, 64, generator=generator)
                    torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
                if what == "synchronized":
                    opt.synchronize()
                    with opt.skip_synchronize():
                        opt.step()
                else:
                    opt.step()
            results[what, momentum] = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
        assert_close(results[what, 0.9], results[what, 0.0], (1e-5, 1e-5), what)


@case
def clip_norm_with_tensors_that_horovod_reduces() -> None:
    """The norm is that of all tensors together, those that go through Horovod's own all-reduce among them."""
    results = []
    for momentum, lr in ((0.9, 0.05), (0.0, 0.5)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
        named = [(f"clipped.{momentum}.{n}", p) for n, p in model.named_parameters()]
        rules = [{"match": {"name": "*.2.*"}, "method": "none"}, {"match": {"name": "*.bias"}, "method": "none"}]
        settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel"}
        compressor = Compressor("topk", named, clip_norm=0.2, rules=rules, **settings)
        dense = [p for n, p in model.named_parameters() if n != "0.weight"]  # without momentum in both trainings
        sgd = torch.optim.SGD(
            [{"params": [model[0].weight], "momentum": momentum, "lr": lr}, {"params": dense}], lr=0.1
        )
        opt = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compressor)
        generator, norms = torch.Generator().manual_seed(hvd.rank()), []
        for _ in range(6):
            opt.zero_grad()
            x = torch.randn(16, 64, generator=generator)
            torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
            opt.step()
            norms.append(compressor.gradient_norm())
        assert max(norms) > 0.2
        results.append({n: p.detach().numpy().copy() for n, p in model.named_parameters()})
    assert_close(*results, (1e-5, 1e-5), "clipped")


@case
def training_with_clipping_keeps_ranks_identical() -> None:
    for method in hvdcompress.available():
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 10))
        named = [(f"train.{method}.{n}", p) for n, p in model.named_parameters()]
        comp = Compressor(method, named)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        opt = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=comp)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(10):
            x = torch.randn(16, 64, generator=generator)
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
            opt.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with opt.skip_synchronize():
                opt.step()
        assert_same_on_all_ranks({n: p.detach().numpy() for n, p in named}, method)


@case
def torch_ops_give_the_same_as_numpy_ones() -> None:
    for number, (method, settings) in enumerate([*METHODS.items(), *ROUTES]):
        host, device = (
            parameters(f"collectives{number}"),
            parameters(f"collectives{number}"),
        )  # random numbers go by name
        opts = [
            optimizer(host, Compressor(method, host.items(), **settings)),
            optimizer(device, Compressor(method, device.items(), ops="torch", **settings)),
        ]
        for step in range(3):
            grads = gradients(host, step, hvd.rank())
            want = reduce_once(opts[0], host, grads)
            got = reduce_once(opts[1], device, grads)
            if hvd.size() > 2 and "fp16" in (method, settings.get("values")):
                continue  # a float16 sum depends on how Horovod fused the tensors
            for (name, a), b in zip(want.items(), got.values(), strict=True):
                what = f"{method} {settings} {name} step {step}"
                exact = hvdcompress.get(method).exact  # matrix libraries round each in their own way
                rtol, atol = (1e-6, 1e-6) if exact else (1e-3, 2e-4)
                np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=what)


@case
def a_process_set() -> None:
    if hvd.size() < 3:
        raise Skip("needs 3 ranks")
    members = PAIR
    if not members.included():
        return
    params = parameters("set")
    comp = Compressor("scalecom", params.items(), density=0.02, process_set=members)
    opt = optimizer(params, comp, process_set=members)
    net = Loopback("scalecom", world_size=2, density=0.02)
    for step in range(4):
        everyone = [gradients(params, step, r) for r in range(2)]
        got = reduce_once(opt, params, everyone[members.rank()])
        assert_close(got, net.allreduce_many(everyone)[0], EXACT, f"step {step}")


class Part(TorchDriver):
    """Some ranks, whose gradients are those of two backward passes."""

    def __init__(self, process_set: hvd.ProcessSet, folder: str):
        self.process_set, self.folder = process_set, OUT / folder
        self.rank, self.world_size = process_set.rank(), process_set.size()

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> TorchHandle:
        return TorchHandle(method, settings, shapes, dtype, op, loss_scale, self.process_set, passes=2)

    def meet(self) -> None:
        hvd.barrier(self.process_set)


@case
def several_backward_passes_with_all_other_features() -> None:
    all_features_at_once(Part(hvd.global_process_set, "passes"))


@case
def a_process_set_with_all_other_features() -> None:
    if hvd.size() < 3:
        raise Skip("needs 3 ranks")
    if PAIR.included():
        all_features_at_once(Part(PAIR, "set"))


@case
def names_in_horovods_timeline() -> None:
    params = parameters("timeline", shapes={"weight": (37, 41), "bias": (37,)})
    comp = Compressor("scalecom", params.items(), density=0.05)
    opt = optimizer(params, comp)
    assert re.fullmatch(r"hvdcompress\.set0\.compressor\d+", comp.prefix)
    shown = {
        "timeline.weight.round0",
        "timeline.weight.round1",
        "status.round0",
    }  # the first is a broadcast, sent as a sum

    def steps() -> None:
        for step in range(3):
            reduce_once(opt, params, gradients(params, step, hvd.rank()))

    check_names(hvd, steps, {f"allreduce.{comp.prefix}.{name}" for name in shown})


@case
def the_two_networks_of_a_gan() -> None:
    """The generator's loss goes through the discriminator, whose gradients of it are thrown away."""
    torch.manual_seed(0)
    nets = {"judge": torch.nn.Linear(40, 30), "twin": torch.nn.Linear(40, 30), "generator": torch.nn.Linear(20, 40)}
    nets["twin"].load_state_dict(nets["judge"].state_dict())
    optimizers, compressors = {}, {}
    for name, net in nets.items():
        named = [(f"gan.{name}.{key}", parameter) for key, parameter in net.named_parameters()]
        compressors[name] = Compressor("topk", named, density=0.05, min_elements=0)
        optimizers[name] = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), named, compression=compressors[name]
        )
    noise = torch.Generator().manual_seed(hvd.rank())
    for _ in range(8):
        real, z = torch.randn(16, 40, generator=noise), torch.randn(16, 20, generator=noise)
        fake = nets["generator"](z)
        for name in ("judge", "twin"):
            optimizers[name].zero_grad()
            (nets[name](fake.detach()).sigmoid().mean() - nets[name](real).sigmoid().mean()).backward()
            optimizers[name].step()
        optimizers["generator"].zero_grad()
        (-nets["judge"](fake).sigmoid().mean()).backward()
        optimizers["generator"].step()
        optimizers["judge"].synchronize()
        compressors["judge"].discard()
        optimizers["judge"].zero_grad()
        for one, other in zip(nets["judge"].parameters(), nets["twin"].parameters(), strict=True):
            assert_close({"p": one.detach().numpy()}, {"p": other.detach().numpy()}, summed(hvd.size()), "the twins")


@case
def a_pause_is_left_after_synchronize() -> None:
    params = parameters("pause")
    comp = Compressor("topk", params.items(), density=0.1)
    opt = optimizer(params, comp)
    reduce_once(opt, params, gradients(params, 0, hvd.rank()))
    for leave in (comp.paused, comp.discard):
        backward(params, gradients(params, 1, hvd.rank()))
        try:
            with leave():
                raise AssertionError("it is entered in the middle of a step")
        except RuntimeError as error:
            assert "a step is in progress" in str(error) and "synchronize()" in str(error)
        opt.synchronize()
    comp.discard()


@case
def the_momentum_buffer_is_known_whatever_the_optimizer_does() -> None:
    """Everything is sent and all momentum cancelled, so the buffer is the last gradient, ten times. A parameter that is
    frozen gets zeros; gradients of a pause are added as they are; a step without gradients changes nothing."""
    params = {f"buffer.{name}": torch.nn.Parameter(torch.zeros(40, 40)) for name in "ab"}
    settings = {"density": 1.0, "min_elements": 1, "optimizer_momentum": "cancel"}
    comp = Compressor("topk", params.items(), **settings)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(params.values(), lr=0.1, momentum=0.9), params.items(), compression=comp
    )
    frozen = params["buffer.b"]

    def train(gradient: float) -> None:
        opt.zero_grad()
        (sum(params.values()) * gradient).sum().backward()
        opt.step()

    for step in range(12):
        frozen.requires_grad_(step not in (3, 4))
        if step in (6, 7):
            with comp.paused():
                train(0.0)
        if step == 9:
            opt.zero_grad()
            torch.optim.SGD.step(opt)
        if step == 10:
            for parameter in params.values():
                parameter.grad.zero_()
            torch.optim.SGD.step(opt)
        train(step + 1.0)
        for name, parameter in params.items():
            want = 10.0 * (step + 1) if parameter.requires_grad else 30.0 * 0.9 ** (step - 2)
            got = opt.state[parameter]["momentum_buffer"]
            assert torch.allclose(got, torch.full_like(got, want), rtol=1e-4), (step, name, float(got[0, 0]), want)


@case
def defaults_of_the_program_are_not_ours() -> None:
    """Parameters are float32 on the CPU, whatever new tensors are."""
    results = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        for method in ("none", "topk"):
            params = parameters(f"default{number}.{method}")
            drawn = gradients(parameters("default"), 0, hvd.rank())
            torch.set_default_dtype(dtype)
            try:
                comp = Compressor(method, params.items(), **({"density": 0.1} if method == "topk" else {}))
                opt = optimizer(params, comp)
                got = reduce_once(opt, params, dict(zip(params, drawn.values(), strict=True)))
            finally:
                torch.set_default_dtype(torch.float32)
            results.append([*got.values()])
    for one in range(2, len(results)):
        for mine, its in zip(results[one], results[one % 2], strict=True):
            np.testing.assert_array_equal(mine, its)
