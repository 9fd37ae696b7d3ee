"""Run by every rank, under horovodrun: each case checks one promise of the torch driver.

``python cases.py OUT [CASE…]``: see ``harness.py``. Cases must not share parameter names, as a case that makes ranks
fail leaves collectives of those names behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import harness
import horovod.torch as hvd
import numpy as np
import torch
from harness import NUMBERS, OUT, Skip, case, heavy_tailed
from payloads import VARIANTS as PAYLOADS
from payloads import digests
from torch_model import (
    SHAPES,
    VARIANTS,
    against_loopback,
    assert_close,
    assert_same_on_all_ranks,
    backward,
    gradients,
    optimizer,
    parameters,
    reduce_once,
)

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Broadcast
from hvdcompress.torch import Compressor
from hvdcompress.torch.transport import Net

PAIR = hvd.ProcessSet([0, 2])


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


def main() -> None:
    import refusal_cases  # noqa: F401  (its cases run last)

    torch.set_num_threads(1)
    world = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)
    hvd.init(process_sets=[PAIR] if world > 2 else None)
    harness.run(hvd.rank(), hvd.barrier)


if __name__ == "__main__":
    main()
