"""Cases of local steps, over torch.distributed and over Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvdcompress.local_steps import OUTER, LocalSteps
from tests.harness import OUT, case, logged, must_raise

HOROVOD = os.environ["DRIVER"] == "torch"
if HOROVOD:
    import horovod.torch as hvd

    RANK, WORLD = hvd.rank(), hvd.size()
else:
    import torch.distributed as dist

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
    local = LocalSteps(model, optimizer, every=4)
    must_raise(FileNotFoundError, ["no step that all ranks have saved"], lambda: local.load(OUT / "nothing"), gather)
    local.close()
