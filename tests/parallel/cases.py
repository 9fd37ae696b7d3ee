"""Run by every rank, under horovodrun: each case checks one promise of the torch driver.

``python cases.py OUT [CASE…]`` runs the cases and writes ``OUT/<rank>.json``: {case: "ok" | "skip: why" | traceback}.
One launch runs them all, since starting ranks costs seconds. Cases must not share parameter names, as a case
that makes ranks fail leaves collectives of those names behind.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from harness import heavy_tailed
from payloads import VARIANTS as PAYLOADS
from payloads import digests

import hvdcompress
from hvdcompress._torch_net import Net
from hvdcompress.loopback import Loopback
from hvdcompress.method import Broadcast
from hvdcompress.torch import Compressor, PeerError

CASES: dict[str, Callable[[], None]] = {}
SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (5,), "d": (1,), "e": (8, 131)}

# (method, hyper-parameters): every method, and options that change its choreography
VARIANTS = [
    ("none", {}),
    ("fp16", {}),
    ("bf16", {}),
    ("fp16", {"feedback": "plain"}),
    ("topk", {"density": 0.02}),
    ("topk", {"density": 0.5, "values": "fp16"}),
    ("randomk", {"density": 0.02}),
    ("randomk", {"density": 0.05, "values": "bf16"}),
    ("scalecom", {"density": 0.01, "beta": 0.3}),
    ("scalecom", {"density": 0.02, "select": "exact", "values": "fp16"}),
    ("scalecom", {"density": 0.02, "values": "bf16"}),
    ("gaussiank", {"density": 0.02}),
    ("gaussiank", {"density": 0.02, "refine": "paper", "values": "bf16"}),
    ("gaussiank", {"density": 0.01, "scope": "global", "min_elements": 1}),
    ("topk", {"density": 0.05, "bucket_elements": 1200, "min_elements": 1}),
    ("topk", {"density": 0.05, "warmup": {"steps": 2}, "schedule": {"density": {"steps": {4: 0.01}}}}),
    ("topk", {"density": 0.05, "values": "qsgd4"}),
    ("topk", {"density": 0.05, "feedback": "momentum"}),
    ("randomk", {"density": 0.05, "values": "rangefloat8"}),
    ("scalecom", {"density": 0.05, "values": "qsgd8"}),
    ("fft", {}),
    ("fft", {"feedback": "plain", "order": "filters", "block": 64}),
    ("qsgd", {}),
    ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
    ("terngrad", {}),
    ("terngrad", {"clip_factor": 0.0, "route": "scatter"}),
    ("terngrad", {"route": "gather"}),
    ("signsgd", {}),
    ("signsgd", {"route": "scatter"}),
    ("gtopk", {"density": 0.02}),
    ("gtopk", {"density": 0.02, "values": "fp16"}),
    ("dgc", {"density": 0.02}),
    ("dgc", {"density": 0.02, "clip_norm": 1.0, "select": "exact"}),
    ("powersgd", {}),
    ("powersgd", {"matrix_rank": 1, "values": "bf16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "feedback": "plain"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 3, "tensors": "all", "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "values": "qsgd8", "dense_values": "qsgd4"}),
]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Skip(Exception):
    """This case needs other ranks or another controller."""


# -- a model whose gradients we choose -------------------------------------------------------------


def parameters(prefix: str, dtype: torch.dtype = torch.float32, shapes: dict = SHAPES) -> dict[str, torch.nn.Parameter]:
    return {f"{prefix}.{name}": torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def gradients(params: dict[str, torch.nn.Parameter], step: int, rank: int) -> dict[str, np.ndarray]:
    """Heavy-tailed values that float16 and bfloat16 hold exactly, so that dtypes can be compared."""
    out = {}
    for number, (name, parameter) in enumerate(params.items()):
        rng = np.random.default_rng([step, rank, number])
        values = rng.standard_t(3, size=tuple(parameter.shape)).astype(np.float32)
        out[name] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).clip(-100, 100)
        out[name][np.abs(out[name]) < 1e-3] = 0
    return out


def backward(params: dict, grads: dict[str, np.ndarray], names: list[str] | None = None) -> None:
    """A backward pass that gives each parameter exactly these gradients, hooks firing in the order of ``names``."""
    loss = torch.zeros((), dtype=torch.float64)
    for name in names or list(params):
        loss = loss + (params[name].double() * torch.from_numpy(grads[name]).double()).sum()
    loss.backward()


def optimizer(params: dict[str, torch.nn.Parameter], comp: Compressor, **options) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=list(params.items()), compression=comp, **options)


def reduce_once(opt, params, grads, names=None) -> dict[str, np.ndarray]:
    opt.zero_grad(set_to_none=True) if hvd.size() == 1 else [setattr(p, "grad", None) for p in params.values()]
    backward(params, grads, names)
    opt.synchronize()
    return {name: p.grad.detach().float().contiguous().numpy().copy() for name, p in params.items()}


def assert_close(got: dict, want: dict, exact: bool, what: str, loose: float = 1.0) -> None:
    for name in want:
        if exact:
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{what}, {name}")
        else:  # ranks are summed in another order than loopback's
            scale = np.abs(want[name]).max() + 1e-30
            rtol, atol = 2e-6 * loose, 4e-7 * loose * scale
            np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    everyone = hvd.allgather_object({name: array.tobytes() for name, array in arrays.items()})
    for name in arrays:
        assert len({one[name] for one in everyone}) == 1, f"{what}: ranks differ in {name}"


def against_loopback(prefix: str, method: str, settings: dict, op=hvd.Average, steps: int = 6, **options) -> None:
    """Reduce by Horovod and by loopback, from the same gradients; compare results, residuals and bytes."""
    world, rank = hvd.size(), hvd.rank()
    params = parameters(prefix)
    comp = Compressor(method, params.items(), **settings)
    opt = optimizer(params, comp, op=op, **options)
    net = Loopback(method, world=world, **settings)
    names = list(params) if rank % 2 == 0 else list(params)[::-1]  # hooks fire in opposite orders
    for step in range(steps):
        everyone = [gradients(params, step, r) for r in range(world)]
        got = reduce_once(opt, params, everyone[rank], names)
        want = net.allreduce_many(everyone, op="sum" if op == hvd.Sum else "average")[rank]
        # a half-precision sum depends on the order of ranks far more than a float32 one
        exact = world == 2 or method in ("topk", "gaussiank", "bf16") and settings.get("min_elements") == 1
        if not (world > 2 and "fp16" in (method, settings.get("values"))):
            # what the order of a sum changes in its last bit, a matrix product and feedback make more of
            loose = 1.0 if hvdcompress.get(method).exact else 100.0
            assert_close(got, want, exact and not options, f"{method} {settings} step {step}", loose)
        assert_same_on_all_ranks(got, f"{method} {settings} step {step}")
    for name in params:
        if world == 2:
            want = net.residual(name, rank)
            np.testing.assert_array_equal(comp.residual(name).numpy(), want, err_msg=f"{method} {name}")
    # beyond loopback's bytes: a probe of 8 bytes for each parameter, and per step a status of 56; plans once
    extra = steps * (8 * len(params) + 56) + comp.ledger.tensors()["plan"].sent
    assert comp.ledger.bytes_sent() == net.ledger.bytes_sent(rank) + extra, (method, settings)


@case
def equals_loopback() -> None:
    for number, (method, settings) in enumerate(VARIANTS):
        against_loopback(f"loop{number}", method, settings)


@case
def equals_loopback_with_sum() -> None:
    for method in ("none", "topk", "scalecom", "fp16"):
        against_loopback(f"sum.{method}", method, {}, op=hvd.Sum, steps=3)


@case
def equals_loopback_with_predivide() -> None:
    for method in ("none", "topk", "scalecom"):
        against_loopback(f"pre.{method}", method, {}, steps=3, gradient_predivide_factor=2.0)


@case
def many_tensors_in_opposite_hook_order() -> None:
    shapes = {f"w{number:02d}": (40, 41 + number) for number in range(40)}
    params = parameters("many", shapes=shapes)
    comp = Compressor("scalecom", params.items(), density=0.02)
    opt = optimizer(params, comp)
    net = Loopback("scalecom", world=hvd.size(), density=0.02)
    order = list(params) if hvd.rank() == 0 else list(np.random.default_rng(hvd.rank()).permutation(list(params)))
    for step in range(5):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        got = reduce_once(opt, params, everyone[hvd.rank()], order)
        assert_close(got, net.allreduce_many(everyone)[0], hvd.size() == 2, f"step {step}")


@case
def parameters_without_gradient_and_frozen_ones() -> None:
    params = parameters("none_grad")
    frozen = torch.nn.Parameter(torch.ones(64, 64), requires_grad=False)
    params_all = {**params, "none_grad.frozen": frozen}
    comp = Compressor("topk", params_all.items(), density=0.1)
    opt = optimizer(params_all, comp)
    net = Loopback("topk", world=hvd.size(), density=0.1)
    for step in range(4):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        for r, grads in enumerate(everyone):  # rank r has no gradient for parameter number r
            grads[list(params)[(r + step) % len(params)]][...] = 0
        missing = list(params)[(hvd.rank() + step) % len(params)]
        got = reduce_once(opt, params, everyone[hvd.rank()], [n for n in params if n != missing])
        assert_close(got, net.allreduce_many(everyone)[0], hvd.size() == 2, f"step {step}")
    assert frozen.grad is None and bool((frozen == 1).all())


@case
def a_bucket_with_members_that_get_no_gradient() -> None:
    shapes = {f"s{number}": (20, 7) for number in range(6)}
    params = parameters("bucketless", shapes=shapes)
    settings = {"density": 0.1, "bucket_elements": 10_000, "min_elements": 1}
    comp = Compressor("scalecom", params.items(), **settings)
    opt = optimizer(params, comp)
    net = Loopback("scalecom", world=hvd.size(), **settings)
    for step in range(3):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        for grads in everyone:
            grads["bucketless.s3"][...] = 0
        got = reduce_once(opt, params, everyone[hvd.rank()], [n for n in params if not n.endswith("s3")])
        assert_close(got, net.allreduce_many(everyone)[0], hvd.size() == 2, f"step {step}")


@case
def several_backward_passes_per_step() -> None:
    params = parameters("passes")
    comp = Compressor("scalecom", params.items(), density=0.02)
    opt = optimizer(params, comp, backward_passes_per_step=3)
    net = Loopback("scalecom", world=hvd.size(), density=0.02)
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
        assert_close(got, net.allreduce_many(sums)[0], hvd.size() == 2, f"step {step}")


@case
def groups() -> None:
    for method in ("none", "fp16", "scalecom", "topk"):
        for kind in ("number", "list"):
            params = parameters(f"groups.{method}.{kind}")
            chosen = 2 if kind == "number" else [list(params.values())[:3]]
            comp = Compressor(method, params.items())
            opt = optimizer(params, comp, groups=chosen)
            net = Loopback(method, world=hvd.size())
            for step in range(3):
                everyone = [gradients(params, step, r) for r in range(hvd.size())]
                got = reduce_once(opt, params, everyone[hvd.rank()])
                if hvd.size() == 2 or method != "fp16":
                    assert_close(got, net.allreduce_many(everyone)[0], hvd.size() == 2, f"{method} {kind} {step}")


@case
def channels_last() -> None:
    params = {"cl.w": torch.nn.Parameter(torch.zeros(32, 16, 3, 3).to(memory_format=torch.channels_last))}
    comp = Compressor("topk", params.items(), density=0.02)
    opt = optimizer(params, comp)
    net = Loopback("topk", world=hvd.size(), density=0.02)
    for step in range(3):
        everyone = [gradients(params, step, r) for r in range(hvd.size())]
        params["cl.w"].grad = None
        weight = torch.from_numpy(everyone[hvd.rank()]["cl.w"]).to(memory_format=torch.channels_last)
        (params["cl.w"] * weight).sum().backward()
        assert params["cl.w"].grad.is_contiguous(memory_format=torch.channels_last)
        opt.synchronize()
        got = {"cl.w": params["cl.w"].grad.contiguous().numpy()}
        assert_close(got, net.allreduce_many(everyone)[0], True, f"step {step}")


@case
def other_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for method in ("none", "topk", "scalecom", "fp16", "bf16"):
            kind = str(dtype).removeprefix("torch.")
            params = parameters(f"{kind}.{method}", dtype)
            comp = Compressor(method, params.items())
            opt = optimizer(params, comp)
            net = Loopback(method, world=hvd.size())
            for step in range(2):
                everyone = [gradients(params, step, r) for r in range(hvd.size())]
                for p in params.values():
                    p.grad = None
                backward(params, everyone[hvd.rank()])
                opt.synchronize()
                want = net.allreduce_many(everyone)[0]
                for name, p in params.items():
                    assert p.grad.dtype == dtype
                    if hvd.size() == 2:
                        rounded = torch.from_numpy(want[name]).to(dtype)
                        assert torch.equal(p.grad, rounded), (method, kind, name, step)
            opt.step()


@case
def a_changing_loss_scale() -> None:
    scales = [1.0, 1024.0, 512.0, 65536.0]
    results = {}
    for kind in ("plain", "scaled"):
        params = parameters(f"amp.{kind}")
        current = {"scale": 1.0}
        comp = Compressor("scalecom", params.items(), density=0.02, beta=0.5, loss_scale=lambda c=current: c["scale"])
        opt = optimizer(params, comp)
        rows = []
        for step, scale in enumerate(scales):
            current["scale"] = scale if kind == "scaled" else 1.0
            grads = {n: g * np.float32(current["scale"]) for n, g in gradients(params, step, hvd.rank()).items()}
            got = reduce_once(opt, params, grads)
            rows.append({n.split(".")[-1]: g / np.float32(current["scale"]) for n, g in got.items()})
        results[kind] = rows
    for step, (plain, scaled) in enumerate(zip(results["plain"], results["scaled"], strict=True)):
        assert_close(scaled, plain, True, f"step {step}")  # powers of two: exact


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
def a_nan_on_one_rank_undoes_the_step() -> None:
    params, control = parameters("nan"), parameters("nan_control")
    comp, comp_control = (Compressor("gaussiank", p.items(), density=0.02) for p in (params, control))
    opt, opt_control = optimizer(params, comp), optimizer(control, comp_control)
    for step in range(3):
        grads = gradients(params, step, hvd.rank())
        got = reduce_once(opt, params, grads)
        want = reduce_once(opt_control, control, {n.replace("nan.", "nan_control."): g for n, g in grads.items()})
        for name in got:
            np.testing.assert_array_equal(got[name], want[name.replace("nan.", "nan_control.")])
        bad = {n: g.copy() for n, g in grads.items()}
        if hvd.rank() == 1:
            bad["nan.a"].flat[3] = np.inf if step % 2 else np.nan
        before = comp.state_dict()
        got = reduce_once(opt, params, bad)
        assert all(np.isnan(g).all() for g in got.values()), "every tensor of that step is NaN on every rank"
        after = comp.state_dict()
        assert before["steps"] == after["steps"]
        for name, slots in before["state"].items():
            for slot, array in slots.items():
                assert torch.equal(array, after["state"][name][slot]), (name, slot)


@case
def state_is_saved_and_restored_bit_exactly() -> None:
    for method in hvdcompress.available():
        params, again = parameters(f"save.{method}"), parameters(f"save.{method}")  # random numbers go by name
        comp, comp2 = (Compressor(method, these.items()) for these in (params, again))
        opt, opt2 = optimizer(params, comp), optimizer(again, comp2)
        for step in range(3):
            reduce_once(opt, params, gradients(params, step, hvd.rank()))
        comp2.load_state_dict(comp.state_dict())
        for step in range(3, 6):
            grads = gradients(params, step, hvd.rank())
            want, got = reduce_once(opt, params, grads), reduce_once(opt2, again, grads)
            if method == "fp16" and hvd.size() > 2:  # its sum depends on how Horovod fused the tensors
                continue
            for name in want:
                np.testing.assert_array_equal(got[name], want[name], err_msg=method)


@case
def state_goes_through_files() -> None:
    params = parameters("files")
    comp = Compressor("scalecom", params.items(), density=0.02)
    opt = optimizer(params, comp)
    for step in range(3):
        reduce_once(opt, params, gradients(params, step, hvd.rank()))
    comp.save(OUT / "state")
    want = {name: comp.residual(name) for name in params}
    reduce_once(opt, params, gradients(params, 3, hvd.rank()))
    comp.load(OUT / "state")
    for name, residual in want.items():
        assert torch.equal(comp.residual(name), residual), name
    reduce_once(opt, params, gradients(params, 3, hvd.rank()))


@case
def a_state_of_another_rank_is_refused() -> None:
    params = parameters("otherrank")
    comp = Compressor("topk", params.items())
    opt = optimizer(params, comp)
    reduce_once(opt, params, gradients(params, 0, hvd.rank()))
    saved = comp.state_dict()
    try:
        comp.load_state_dict({**saved, "rank": (hvd.rank() + 1) % hvd.size()})
    except ValueError as error:
        assert "rank" in str(error)
    else:
        raise AssertionError("rank 0's residuals must not be loaded into every rank")


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
def two_optimizers_with_the_same_parameter_names_in_two_compressors() -> None:
    first, second = parameters("twice"), parameters("twice2")
    comps = [Compressor("topk", first.items(), density=0.1), Compressor("topk", second.items(), density=0.1)]
    opts = [optimizer(first, comps[0]), optimizer(second, comps[1])]
    for step in range(3):
        got = [
            reduce_once(opt, params, gradients(params, step, hvd.rank()))
            for opt, params in zip(opts, (first, second), strict=True)
        ]
        for a, b in zip(got[0].values(), got[1].values(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert comps[0].prefix != comps[1].prefix


@case
def torch_verbs_give_the_same_as_numpy_ones() -> None:
    for number, (method, settings) in enumerate(VARIANTS):
        host, device = parameters(f"verbs{number}"), parameters(f"verbs{number}")  # random numbers go by name
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
    net = Loopback("scalecom", world=2, density=0.02)
    for step in range(4):
        everyone = [gradients(params, step, r) for r in range(2)]
        got = reduce_once(opt, params, everyone[members.rank()])
        assert_close(got, net.allreduce_many(everyone)[0], True, f"step {step}")


# -- errors: one message on all ranks, and no hang -----------------------------------------------------


def must_raise(kind: type[BaseException], words: list[str], run: Callable[[], object]) -> None:
    """``run`` raises the same message on every rank, with these words in it."""
    try:
        run()
    except kind as error:
        message = str(error)
    else:
        message = "no error"
    everyone = hvd.allgather_object(message)
    assert len(set(everyone)) == 1, f"ranks differ: {everyone}"
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@case
def different_hyperparameters() -> None:
    params = parameters("differ")
    comp = Compressor("topk", params.items(), density=0.01 if hvd.rank() == 0 else 0.02)
    opt = optimizer(params, comp)
    words = ["density", "0.01", "0.02", "rank 1"]
    must_raise(PeerError, words, lambda: reduce_once(opt, params, gradients(params, 0, 0)))


@case
def different_methods() -> None:
    for first in ("scalecom", "none"):
        params = parameters(f"methods.{first}")
        opt = optimizer(params, Compressor(first if hvd.rank() == 0 else "topk", params.items()))
        grads = gradients(params, 0, hvd.rank())
        must_raise(PeerError, ["'method'", "topk", first], lambda o=opt, p=params, g=grads: reduce_once(o, p, g))


@case
def different_models() -> None:
    shapes = {**SHAPES, "e": (8, 131 + hvd.rank())}
    params = parameters("shapes", shapes=shapes)
    comp = Compressor("topk", params.items())
    opt = optimizer(params, comp)
    must_raise(PeerError, ["shapes.e", "131", "132"], lambda: reduce_once(opt, params, gradients(params, 0, 0)))


@case
def ranks_at_different_steps() -> None:
    """A rank's warm-up is over, the others' is not: their collectives differ, of which Horovod complains first."""
    params = parameters("ahead")
    settings = {"density": 0.01, "warmup": {"steps": 2}}
    ahead = Compressor("topk", params.items(), **settings)
    opt = optimizer(params, ahead)
    for step in range(2):
        reduce_once(opt, params, gradients(params, step, hvd.rank()))
    fresh = parameters("ahead")
    comp = Compressor("topk", fresh.items(), **settings)
    if hvd.rank() == 1:
        comp.load_state_dict(ahead.state_dict())
    opt = optimizer(fresh, comp)
    words = ["ranks disagree on the step"]
    must_raise(PeerError, words, lambda: reduce_once(opt, fresh, gradients(fresh, 2, hvd.rank())))


@case
def a_rank_that_raises_inside_compress() -> None:
    for step_of_failure in (0, 2):
        params = parameters(f"raises{step_of_failure}")
        comp = Compressor("topk", params.items())
        opt = optimizer(params, comp)
        for step in range(step_of_failure):
            reduce_once(opt, params, gradients(params, step, hvd.rank()))
        if hvd.rank() == 1:

            def fail(*_: object) -> None:
                raise FloatingPointError("a fault made by the test")

            for unit in comp.units_by_name.values():
                object.__setattr__(unit.program.main, "encode", fail)
        try:
            must_raise(
                PeerError,
                ["a fault made by the test", "rank 1", f"raises{step_of_failure}.", "topk", "round 0"],
                lambda p=params, o=opt, s=step_of_failure: reduce_once(o, p, gradients(p, s, hvd.rank())),
            )
        finally:
            if hvd.rank() == 1:
                for unit in comp.units_by_name.values():
                    unit.program.main.__dict__.pop("encode", None)


@case
def a_gradient_that_belongs_to_no_parameter() -> None:
    params = parameters("stranger")
    stranger = {"stranger.x": torch.nn.Parameter(torch.zeros(64, 64))}
    comp = Compressor("topk", params.items())
    opt = optimizer({**params, **stranger}, comp)
    grads = gradients({**params, **stranger}, 0, hvd.rank())
    must_raise(PeerError, ["named_parameters", "(64, 64)"], lambda: reduce_once(opt, {**params, **stranger}, grads))


@case
def sparse_gradients_are_refused() -> None:
    for as_dense in (False, True):
        kind = f"sparse{as_dense}"
        embedding = torch.nn.Embedding(200, 16, sparse=True)
        named = [(f"{kind}.{n}", p) for n, p in embedding.named_parameters()]
        comp = Compressor("topk", named)
        sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
        opt = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=comp, sparse_as_dense=as_dense)

        def run(opt=opt, embedding=embedding) -> None:
            embedding(torch.arange(8)).sum().backward()
            opt.step()

        must_raise((ValueError, PeerError), [f"{kind}.weight", "sparse"], run)  # type: ignore[arg-type]


@case
def other_operations_are_refused() -> None:
    for number, op in enumerate((hvd.Min, hvd.Max, hvd.Product)):
        for method in ("none", "topk"):
            params = parameters(f"op{number}.{method}")
            opt = optimizer(params, Compressor(method, params.items()), op=op)
            grads = gradients(params, 0, hvd.rank())
            must_raise(PeerError, ["Average", "Sum", "refused"], lambda o=opt, p=params, g=grads: reduce_once(o, p, g))


@case
def adasum_is_refused() -> None:
    if hvd.size() & (hvd.size() - 1) or not hvd.mpi_enabled():
        raise Skip("Horovod's Adasum needs a power of two ranks, and MPI")
    params = parameters("adasum")
    opt = optimizer(params, Compressor("topk", params.items()), op=hvd.Adasum)

    def run() -> None:
        backward(params, gradients(params, 0, hvd.rank()))
        opt.step()

    must_raise(PeerError, ["Adasum"], run)


@case
def the_ledger_counts_what_horovod_is_given() -> None:
    """Every tensor that any of Horovod's functions is handed, ours or the stock optimizer's, and nothing else."""
    from horovod.torch import optimizer as stock

    given = 0

    def counted(function: Callable) -> Callable:
        def wrapper(tensor: torch.Tensor, *rest: object, **more: object) -> object:
            nonlocal given
            given += tensor.nbytes
            return function(tensor, *rest, **more)

        return wrapper

    places = [(hvd, name) for name in ("allreduce_async", "allgather_async", "alltoall_async", "allgather")]
    places.append((stock, "allreduce_async_"))
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, counted(original))
        for number, (method, settings) in enumerate(VARIANTS):
            given = 0
            params = parameters(f"counted{number}")
            comp = Compressor(method, params.items(), **settings)
            opt = optimizer(params, comp)
            for step in range(3):
                reduce_once(opt, params, gradients(params, step, hvd.rank()))
            assert comp.ledger.bytes_sent() == given, (method, settings, comp.ledger.bytes_sent(), given)
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


@case
def payloads_for_the_other_driver_to_equal() -> None:
    """Not a check of its own: a test compares what the torch and the TensorFlow driver hand to Horovod."""
    from horovod.torch import optimizer as stock

    shapes, names = {name: SHAPES[name] for name in "ace"}, "ace"
    for number, (method, settings) in enumerate(PAYLOADS):
        sent: dict[str, list[bytes]] = {}
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        comp = Compressor(method, params.items(), **settings)
        opt = optimizer(params, comp)
        submit, start = Net.submit, stock.allreduce_async_

        def watched_submit(net, name, round, verb, submit=submit, sent=sent):
            if name not in names:  # the status
                pass
            elif isinstance(verb, Broadcast):  # the root's bytes; the others give zeros
                mine = net.rank == int(verb.root)
                sent.setdefault(name, []).append(bytes(verb.make()) if mine else bytes(verb.num_bytes))
            else:
                sent.setdefault(name, []).append(torch.as_tensor(verb.x).numpy().tobytes())
            return submit(net, name, round, verb)

        def watched_start(tensor, name=None, start=start, sent=sent, **rest):
            if len(tensor) > 2:  # a payload that rides, and the probe
                sent.setdefault(name.split(".")[-1], []).append(tensor[:-2].numpy().tobytes())
            return start(tensor, name=name, **rest)

        Net.submit, stock.allreduce_async_ = watched_submit, watched_start
        try:
            for step in range(5):
                reduce_once(opt, params, heavy_tailed(shapes, step, hvd.rank()))
        finally:
            Net.submit, stock.allreduce_async_ = submit, start
        assert set(sent) == set(names), set(sent)
        NUMBERS[f"payloads {number}"] = digests(sent, method)


@case
def bytes_sent_by_scalecom() -> None:
    """Not a check of its own: the launches of 2 and 4 ranks are compared by the test."""
    params = parameters("bytes")
    comp = Compressor("scalecom", params.items(), density=0.01)
    opt = optimizer(params, comp)
    for step in range(4):
        reduce_once(opt, params, gradients(params, step, hvd.rank()))
    ledger = comp.ledger
    NUMBERS["scalecom"] = ledger.bytes_sent() - ledger.tensors()["plan"].sent  # the plan's comparison is a set-up cost


SECONDS_A_CASE = 60
OUT = Path(sys.argv[1])
NUMBERS: dict[str, object] = {}
PAIR = hvd.ProcessSet([0, 2])


def main() -> None:
    out, chosen = OUT, sys.argv[2:] or list(CASES)
    torch.set_num_threads(1)
    hvd.init(process_sets=[PAIR] if _world() > 2 else None)
    results: dict[str, object] = {}
    for name in chosen:
        faulthandler.dump_traceback_later(SECONDS_A_CASE, exit=True)  # a hang is a bug: say where
        try:
            CASES[name]()
            results[name] = "ok"
        except Skip as skip:
            results[name] = f"skip: {skip}"
        except BaseException:
            results[name] = traceback.format_exc()
        (out / f"{hvd.rank()}.json").write_text(json.dumps({"results": results, "numbers": NUMBERS}))
        hvd.barrier()


def _world() -> int:
    import os

    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)


if __name__ == "__main__":
    main()
