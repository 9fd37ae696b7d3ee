"""Cases of local steps, over torch.distributed and over Horovod."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import hvdcompress
from hvdcompress.engine.agreement import PeerError
from hvdcompress.local_steps import OUTER, LocalSteps
from hvdcompress.plan import plan_of
from tests.harness import OUT, Skip, case, logged, must_raise

HOROVOD = os.environ["DRIVER"] == "torch"
if HOROVOD:
    import horovod.torch as hvd

    RANK, WORLD = hvd.rank(), hvd.size()
else:
    RANK, WORLD = dist.get_rank(), dist.get_world_size()

SETTINGS: dict[str, Any] = {"method": "topk", "density": 0.1, "min_elements": 10}


def gather(value: Any) -> list[Any]:
    if HOROVOD:
        return hvd.allgather_object(value)
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, value)
    return everyone


def mean(tensor: torch.Tensor) -> torch.Tensor:
    return sum(gather(tensor)) / WORLD


def net(seed: int = RANK) -> torch.nn.Module:
    """Ranks start from different weights, as programs do that forget to broadcast them."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
    )


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[int], object], steps: range
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        inputs, targets = torch.randn(16, 20, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        after(step)


def trained(every: int, steps: range, folder: Any = None, save_at: int = -1, **settings: Any) -> tuple[Any, LocalSteps]:
    """A net after these steps; loaded from the folder before, or saved there after step ``save_at``."""
    model = net()
    optimizer = optimizer_of(model)
    local = LocalSteps(model, optimizer, every=every, **settings)
    if folder and steps.start:
        local.load(folder)

    def after(step: int) -> None:
        local.step()
        if step == save_at:
            local.save(folder)

    train(model, optimizer, after, steps)
    local.close()
    return model.state_dict(), local


def plain(every: int, steps: int, outer: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """DiLoCo, or local SGD, as their papers write them."""
    model = net(seed=0)
    optimizer = optimizer_of(model)
    anchor = [torch.nn.Parameter(each.detach().clone()) for each in model.parameters()]
    outer_sgd = torch.optim.SGD(anchor, **(outer or {"lr": 1.0}))

    @torch.no_grad()
    def exchange(step: int) -> None:
        if (step + 1) % every:
            return
        for here, there in zip(model.parameters(), anchor, strict=True):
            there.grad = mean(there - here)
        outer_sgd.step()
        for here, there in zip(model.parameters(), anchor, strict=True):
            here.copy_(there)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(mean(buffer))

    train(model, optimizer, exchange, range(steps))
    return model.state_dict()


def assert_equal(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], tolerance: float = 0.0) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023


def assert_same_on_all_ranks(state: Mapping[str, torch.Tensor]) -> None:
    for other in gather({name: tensor.clone() for name, tensor in state.items()}):
        assert_equal(other, state)


@case
def local_steps_are_diloco_or_local_sgd() -> None:
    for outer in (OUTER, None):
        got, local = trained(5, range(20), method="none", outer=outer)
        assert_equal(got, plain(5, 20, outer), 0.0 if WORLD == 2 else 1e-5)  # more ranks are added in another order
        assert_same_on_all_ranks(got)
        assert local.compressors[0].ledger.steps == 4


@case
def the_outer_momentum_is_cancelled_where_it_is_asked_for() -> None:
    """In settings, a dict, a plan or a method alike; otherwise it is kept."""
    asked = {**SETTINGS, "optimizer_momentum": "cancel"}
    plan = plan_of(asked.pop("method"), **asked)
    kept, _ = trained(2, range(8), outer=OUTER, **SETTINGS)
    first, _ = trained(2, range(8), outer=OUTER, method=plan)
    assert any(not torch.equal(first[name], kept[name]) for name in kept)
    for method in (plan.to_dict(), plan.program.main):
        rest = {} if isinstance(method, dict) else {"min_elements": plan.min_elements}
        assert_equal(trained(2, range(8), outer=OUTER, method=method, **rest)[0], first)


@contextlib.contextmanager
def torch_group() -> Iterator[None]:
    """Under Horovod, PyTorch needs a process group of its own."""
    if HOROVOD:
        dist.init_process_group("gloo", f"file://{OUT}/group", rank=RANK, world_size=WORLD)
    try:
        yield
    finally:
        if HOROVOD:
            dist.destroy_process_group()


def post_local_sgd(every: int, warmup: int, momentum: float, steps: int) -> dict[str, torch.Tensor]:
    """PyTorch's own local SGD."""
    model = net(seed=0)
    module = DistributedDataParallel(model)
    state = PostLocalSGDState(None, None, warmup, post_local_gradient_allreduce=False)
    module.register_comm_hook(state, post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    averager = PeriodicModelAverager(every, warmup_steps=warmup)
    train(module, PostLocalSGDOptimizer(inner, averager), lambda step: None, range(steps))
    return dict(model.named_parameters())


@case
def local_steps_are_pytorchs_post_local_sgd() -> None:
    """PyTorch also averages after the first step without warm-up, so it has a step of warm-up less.

    It averages gradients while warming up, and we parameters. So momentum is each rank's own here, and equal there: it
    shows after a warm-up, but not within one.
    """
    with torch_group():
        for warmup, momentum, steps in ((0, 0.9, 9), (5, 0.0, 14), (6, 0.9, 7)):
            model = net()
            sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
            driver = "horovod" if HOROVOD else "torch"
            local = LocalSteps(model, sgd, every=4, outer=None, warmup=warmup + 1, driver=driver)
            train(model, sgd, lambda step: local.step(), range(steps))  # noqa: B023
            local.close()
            assert_equal(dict(model.named_parameters()), post_local_sgd(4, warmup, momentum, steps), 1e-5)


@case
def local_steps_resume_to_the_bit() -> None:
    streaming = {"fragments": 2, "delay": 2, "mixing": 0.5}
    for number, more in enumerate(({}, streaming)):
        folder = OUT / f"local-{number}"
        settings = {**SETTINGS, "warmup": 3, **more}
        want, _ = trained(6, range(30), folder, save_at=17, **settings)
        gather(None)
        got, _ = trained(6, range(18, 30), folder, **settings)
        assert_equal(got, want)


@case
def local_steps_warm_up_as_every_step_training() -> None:
    got, _ = trained(50, range(6), **SETTINGS, warmup=6)
    assert_equal(got, plain(1, 6, None), 1e-5)


@case
def the_warm_up_is_saved() -> None:
    settings = {**SETTINGS, "warmup": 20, "checkpoint": OUT / "warm-up"}
    want, _ = trained(4, range(9), **settings)
    gather(None)
    _, local = trained(4, range(0), **settings)
    assert local.steps == 8
    got, _ = trained(4, range(8, 9), folder=settings["checkpoint"], **settings)
    assert_equal(got, want)


@case
def local_steps_are_synchronized_for_evaluation() -> None:
    model = net()
    optimizer = optimizer_of(model)
    local = LocalSteps(model, optimizer, every=4, fragments=2, delay=1, mixing=0.5, **SETTINGS)
    train(model, optimizer, lambda step: local.step(), range(7))
    local.synchronize()
    assert_same_on_all_ranks(model.state_dict())
    local.close()


@case
def a_nan_returns_all_ranks_to_the_last_exchange() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    local = LocalSteps(model, sgd, every=2, **SETTINGS)
    train(model, sgd, lambda step: local.step(), range(3))
    anchor = {name: each.detach().clone() for name, each in local.fragments[0].anchors.items()}
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan") if RANK == WORLD - 1 else 0.0
    with logged() as lines:
        train(model, sgd, lambda step: local.step(), range(3, 4))
    assert_equal(dict(model.named_parameters()), anchor)
    assert RANK or any("go on from the last exchange" in line for line in lines)
    train(model, sgd, lambda step: local.step(), range(4, 6))
    assert_same_on_all_ranks(dict(model.named_parameters()))
    local.close()


class Odd(torch.nn.Module):
    """An embedding with sparse gradients, tied weights, a parameter without gradient, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 20, sparse=True)
        self.body = torch.nn.Linear(20, 20)
        self.head = torch.nn.Linear(20, 20)
        self.head.weight = self.body.weight
        self.unused = torch.nn.Parameter(torch.randn(7))
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(inputs))).square().mean()


@case
def odd_parameters_are_exchanged() -> None:
    torch.manual_seed(RANK)
    model = Odd()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, sgd, every=2, **SETTINGS)
    unused, frozen = model.unused.detach().clone(), model.frozen.clone()
    for _ in range(4):
        sgd.zero_grad()
        model(torch.randint(0, 30, (16,))).backward()
        sgd.step()
        local.step()
    assert model.head.weight is model.body.weight
    assert_same_on_all_ranks(model.state_dict())
    torch.testing.assert_close(model.unused, unused, rtol=0, atol=0)
    torch.testing.assert_close(model.frozen, frozen, rtol=0, atol=0)
    model.frozen.requires_grad_()
    local.step()
    must_raise(ValueError, ["'frozen'", "make LocalSteps again"], local.step, gather)
    local.close()
    local.close()


@case
def parameters_of_any_dtype_are_exchanged() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, *(() if HOROVOD else (torch.complex64,))):
        model = torch.nn.ParameterDict({"w": torch.full((40, 30), RANK + 2.0, dtype=dtype), "b": torch.zeros(())})
        local = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, outer=None)
        with torch.no_grad():
            model["w"] += (1j if dtype.is_complex else 1.0) * RANK
            model["b"] += RANK
        assert local.step()
        ranks = torch.arange(WORLD, dtype=torch.float64).mean()
        want = 2.0 + (1j if dtype.is_complex else 1.0) * ranks  # all ranks start from the 2 of rank 0
        assert_equal({"w": model["w"].detach()}, {"w": torch.full((40, 30), want.item(), dtype=dtype)}, 1e-2)
        assert_same_on_all_ranks(model.state_dict())
        local.close()


class Buffered(torch.nn.Module):
    """A mask with -inf, and a buffer that is replaced in each pass; neither is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 3)
        self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=False)
        self.register_buffer("seen", torch.full((2,), float(RANK)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + RANK
        return self.layer(inputs)


@case
def buffers_are_averaged_or_left_alone() -> None:
    model = Buffered()
    compiled = torch.nn.ModuleDict({"_orig_mod": model})  # as torch.compile names it
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(compiled, sgd, every=2, **SETTINGS)
    train(model, sgd, lambda step: local.step(), range(2))
    average = (WORLD - 1) / 2 * 2
    assert model.seen.tolist() == [average] * 2 and model.mask.tolist() == [-torch.inf] * 3
    train(model, sgd, lambda step: local.step(), range(2, 3))
    if RANK == WORLD - 1:
        model.seen = model.seen * float("nan")
    train(model, sgd, lambda step: local.step(), range(3, 4))
    assert model.seen.tolist() == [average] * 2, "all ranks return to the last exchange"
    local.close()


@case
def a_second_synchronization_changes_nothing() -> None:
    model = net()
    optimizer = optimizer_of(model)
    local = LocalSteps(model, optimizer, every=3, **SETTINGS)
    local.synchronize()
    train(model, optimizer, lambda step: local.step(), range(5))
    local.synchronize()
    once = {name: each.clone() for name, each in model.state_dict().items()}
    local.synchronize()
    assert_equal(model.state_dict(), once)
    local.close()


@case
def every_method_trains_with_local_steps() -> None:
    for method in hvdcompress.available():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(RANK))
        local = LocalSteps(model, sgd, every=2, method=method, min_elements=100, outer={"lr": 1.0})
        losses = []
        for _ in range(4):
            sgd.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), torch.arange(16) % 3)
            loss.backward()
            sgd.step()
            losses.append(loss.item())
            local.step()
        assert_same_on_all_ranks(model.state_dict())
        losses.append(torch.nn.functional.cross_entropy(model(inputs), torch.arange(16) % 3).item())
        assert sum(gather(losses[-1])) < sum(gather(losses[0])), f"{method}: {losses}"
        local.close()


def first_ranks() -> tuple[bool, Any]:
    """Whether this rank is in a group of fewer ranks, and the group."""
    if not HOROVOD:
        ranks = list(range(1, WORLD))
        return RANK in ranks, dist.new_group(ranks)
    if WORLD < 3:
        raise Skip("needs 3 ranks")
    from tests.promises.drivers.torch import PAIR

    return bool(PAIR.included()), PAIR


@case
def ranks_come_and_go_at_the_last_exchange() -> None:
    included, fewer = first_ranks()
    settings = {**SETTINGS, "every": 4, "checkpoint": OUT / "come-and-go"}

    def trained_until(end: int, group: Any, parameters: Mapping[str, torch.Tensor] | None = None) -> LocalSteps:
        model = net()
        optimizer = optimizer_of(model)
        local = LocalSteps(model, optimizer, process_group=group, **settings)
        if parameters:
            assert_equal(dict(model.named_parameters()), parameters)
        train(model, optimizer, lambda step: local.step(), range(local.steps, end))
        local.close()
        return local

    def anchors(local: LocalSteps | None) -> dict[str, torch.Tensor]:
        mine = local and {n: each.detach().clone() for n, each in local.fragments[0].anchors.items()}
        return next(filter(None, gather(mine)))

    local = trained_until(8, fewer) if included else None
    local = trained_until(14, None, anchors(local))  # one rank more; the last exchange is in step 12
    assert local.steps == 14
    wanted = anchors(local)
    if included:
        assert trained_until(16, fewer, wanted).steps == 16
    gather(None)


@case
def wrong_arguments_of_local_steps_are_refused() -> None:
    model = net()
    optimizer = optimizer_of(model)
    for wrong, words in (
        ({"every": 0}, ["every = 0"]),
        ({"every": 4, "fragments": 5}, ["fragments = 5"]),
        ({"every": 4, "delay": 4}, ["delay = 4"]),
        ({"every": 4, "mixing": 1.0}, ["mixing = 1.0"]),
        ({"every": 4, "driver": "mpi"}, ["driver = 'mpi'"]),
        ({"every": 4, "method": "topkk"}, ["topkk", "topk"]),
    ):
        must_raise(ValueError, words, lambda wrong=wrong: LocalSteps(model, optimizer, **wrong), gather)
    empty = torch.nn.Sequential()
    must_raise(ValueError, ["no parameter"], lambda: LocalSteps(empty, optimizer, every=4), gather)
    if HOROVOD:
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        must_raise(ValueError, ["plain optimizer"], lambda: LocalSteps(model, wrapped, every=4), gather)
    else:
        module = DistributedDataParallel(model)
        must_raise(ValueError, ["without it"], lambda: LocalSteps(module, optimizer, every=4), gather)
    local = LocalSteps(model, optimizer, every=4)
    must_raise(FileNotFoundError, ["no step that all ranks have saved"], lambda: local.load(OUT / "nothing"), gather)
    local.close()


@case
def ranks_that_exchange_at_other_steps_are_named() -> None:
    model = net()
    local = LocalSteps(model, optimizer_of(model), every=2 if RANK else 3, **SETTINGS)

    def until_the_exchange() -> None:
        for _ in range(3):
            local.step()

    must_raise(PeerError, ["local_steps", "'every': 3", "'every': 2"], until_the_exchange, gather)
    local.close()
