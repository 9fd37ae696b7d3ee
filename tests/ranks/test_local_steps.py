"""Tests of local steps, over torch.distributed and over Horovod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from hvdcompress.engine.agreement import PeerError
from hvdcompress.local_steps import OUTER, LocalSteps
from hvdcompress.plan import plan_of
from tests.ranks.checks import FOLDER, logged
from tests.ranks.torch_ranks import HOROVOD, gather, must_raise, rank, world_size

pytestmark = pytest.mark.drivers("torch", "ddp")

if HOROVOD:
    import horovod.torch as hvd

    from tests.ranks.drivers.torch import PAIR

SETTINGS: dict[str, Any] = {"method": "topk", "density": 0.1, "min_elements": 10}


def mean(tensor: torch.Tensor) -> torch.Tensor:
    return sum(gather(tensor)) / world_size()


class Training:
    """A net, and its inner optimizer. By default, each rank has its own weights, as when they are not broadcast."""

    def __init__(self, seed: int | None = None, lr: float = 0.05, momentum: float = 0.9) -> None:
        torch.manual_seed(rank() if seed is None else seed)
        layers = (torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
        self.model: torch.nn.Module = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)

    def run(self, steps: range, after: Callable[[int], object]) -> None:
        """Train, and call ``after`` with the number of each step when it is done."""
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + rank())
            inputs, targets = torch.randn(16, 20, generator=generator), torch.randint(0, 3, (16,), generator=generator)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
            after(step)


def trained(every: int, steps: range, folder: Any = None, save_at: int = -1, **settings: Any) -> tuple[Any, LocalSteps]:
    """Train for these steps; load from the folder before the first, or save there after step ``save_at``."""
    training = Training()
    local = LocalSteps(training.model, training.optimizer, every=every, **settings)
    if folder and steps.start:
        local.load(folder)

    def after(step: int) -> None:
        local.step()
        if step == save_at:
            local.save(folder)

    training.run(steps, after)
    local.close()
    return training.model.state_dict(), local


def diloco(every: int, steps: int) -> dict[str, torch.Tensor]:
    """DiLoCo, as its paper writes it."""
    training = Training(seed=0)
    parameters = list(training.model.parameters())
    anchor = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
    outer = torch.optim.SGD(anchor, **OUTER)

    @torch.no_grad()
    def exchange(step: int) -> None:
        if (step + 1) % every:
            return
        for here, there in zip(parameters, anchor, strict=True):
            there.grad = mean(there - here)
        outer.step()
        for here, there in zip(parameters, anchor, strict=True):
            here.copy_(there)
        for buffer in training.model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(mean(buffer))

    training.run(range(steps), exchange)
    return training.model.state_dict()


def assert_equal(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], tolerance: float = 0.0) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023


def assert_same_on_all_ranks(state: Mapping[str, torch.Tensor]) -> None:
    for other in gather({name: tensor.clone() for name, tensor in state.items()}):
        assert_equal(other, state)


def test_local_steps_are_diloco() -> None:
    got, local = trained(3, range(9), method="none")
    assert_equal(got, diloco(3, 9), 0.0 if world_size() == 2 else 1e-5)  # more are added in another order
    assert_same_on_all_ranks(got)
    assert local.compressors[0].ledger.steps == 3


def test_parameters_are_averaged_in_each_step_of_the_warm_up() -> None:
    got, _ = trained(50, range(4), **SETTINGS, warmup=4)
    assert_equal(got, trained(1, range(4), method="none", outer=None)[0], 1e-5)


def test_the_outer_momentum_is_cancelled_where_it_is_asked_for() -> None:
    """In settings, a dict, a plan or a method alike; otherwise it is kept."""
    asked = {**SETTINGS, "optimizer_momentum": "cancel"}
    plan = plan_of(asked.pop("method"), **asked)
    kept, _ = trained(2, range(6), **SETTINGS)
    first, _ = trained(2, range(6), method=plan)
    assert any(not torch.equal(first[name], kept[name]) for name in kept)
    for settings in (
        {"method": plan.to_dict()},
        {"method": plan.program.main, "min_elements": 10},
        {**SETTINGS, "optimizer_momentum": "cancel"},
    ):
        assert_equal(trained(2, range(6), **settings)[0], first)


def post_local_sgd(warmup: int, momentum: float, steps: int) -> dict[str, torch.Tensor]:
    """PyTorch's own local SGD."""
    training = Training(seed=0, momentum=momentum)
    parameters = dict(training.model.named_parameters())
    training.model = DistributedDataParallel(training.model)
    state = PostLocalSGDState(None, None, warmup, post_local_gradient_allreduce=False)
    training.model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(4, warmup_steps=warmup)
    training.optimizer = PostLocalSGDOptimizer(training.optimizer, averager)
    training.run(range(steps), lambda step: None)
    return parameters


def test_local_steps_are_pytorchs_post_local_sgd() -> None:
    """PyTorch also averages after the first step without warm-up, so it has a step of warm-up less.

    It averages gradients while warming up, and we parameters. So momentum is each rank's own here, and equal there: it
    shows after a warm-up, but not within one.
    """
    if HOROVOD:
        pytest.skip("PyTorch's own local SGD needs torch.distributed")
    for warmup, momentum, steps in ((0, 0.9, 9), (5, 0.0, 14), (6, 0.9, 7)):
        training = Training(momentum=momentum)
        with LocalSteps(training.model, training.optimizer, every=4, outer=None, warmup=warmup + 1) as local:
            training.run(range(steps), lambda step: local.step())  # noqa: B023
        assert_equal(dict(training.model.named_parameters()), post_local_sgd(warmup, momentum, steps), 1e-5)


def test_local_steps_resume_to_the_bit() -> None:
    """Also with exchanges in flight."""
    for every, saved, end, more in ((4, 9, 14, {}), (6, 12, 20, {"fragments": 2, "delay": 2, "mixing": 0.5})):
        folder, settings = FOLDER / f"local-{every}", {**SETTINGS, "warmup": 3, **more}
        want, _ = trained(every, range(end), folder, save_at=saved, **settings)
        gather(None)
        got, _ = trained(every, range(saved + 1, end), folder, **settings)
        assert_equal(got, want)


def test_the_warm_up_is_saved() -> None:
    settings = {**SETTINGS, "warmup": 20, "checkpoint": FOLDER / "warm-up"}
    want, _ = trained(4, range(9), **settings)
    gather(None)
    assert trained(4, range(0), **settings)[1].steps == 8
    got, _ = trained(4, range(8, 9), folder=settings["checkpoint"], **settings)
    assert_equal(got, want)


def test_local_steps_are_synchronized_for_evaluation() -> None:
    """With a result in flight; a second synchronization changes nothing."""
    training = Training()
    streaming = {"fragments": 2, "delay": 1, "mixing": 0.5}
    with LocalSteps(training.model, training.optimizer, every=4, **streaming, **SETTINGS) as local:
        local.synchronize()
        training.run(range(7), lambda step: local.step())
        local.synchronize()
        once = {name: each.clone() for name, each in training.model.state_dict().items()}
        local.synchronize()
        assert_equal(training.model.state_dict(), once)
        assert_same_on_all_ranks(once)


def test_a_nan_returns_all_ranks_to_the_last_exchange() -> None:
    training = Training(lr=1e-2, momentum=0.0)
    parameters = dict(training.model.named_parameters())
    with LocalSteps(training.model, training.optimizer, every=2, **SETTINGS) as local:
        training.run(range(3), lambda step: local.step())
        anchor = {name: each.detach().clone() for name, each in local.fragments[0].anchors.items()}
        parameters["0.weight"].data[0, 0] = float("nan") if rank() == world_size() - 1 else 0.0
        with logged() as lines:
            training.run(range(3, 4), lambda step: local.step())
        assert_equal(parameters, anchor)
        assert rank() or any("go on from the last exchange" in line for line in lines)
        training.run(range(4, 6), lambda step: local.step())
        assert_same_on_all_ranks(parameters)


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


def test_odd_parameters_are_exchanged() -> None:
    torch.manual_seed(rank())
    model = Odd()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, sgd, every=2, **SETTINGS)
    unchanged = {name: getattr(model, name).detach().clone() for name in ("unused", "frozen")}
    for _ in range(4):
        sgd.zero_grad()
        model(torch.randint(0, 30, (16,))).backward()
        sgd.step()
        local.step()
    assert model.head.weight is model.body.weight
    assert_same_on_all_ranks(model.state_dict())
    assert_equal(model.state_dict(), unchanged)
    model.frozen.requires_grad_()
    local.step()
    must_raise(ValueError, ["'frozen'", "make LocalSteps again"], local.step)
    local.close()
    local.close()


def test_parameters_of_any_dtype_are_exchanged() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, *(() if HOROVOD else (torch.complex64,))):
        model = torch.nn.ParameterDict({"w": torch.full((40, 30), rank() + 2.0, dtype=dtype)})
        step = 1j if dtype.is_complex else 1.0
        with LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, outer=None) as local:
            model["w"].data += step * rank()
            assert local.step()
        want = torch.full((40, 30), 2.0 + step * (world_size() - 1) / 2, dtype=dtype)  # all start from the 2 of rank 0
        assert_equal({"w": model["w"].detach()}, {"w": want}, 1e-2)
        assert_same_on_all_ranks(model.state_dict())


class Buffered(torch.nn.Module):
    """A mask with -inf, and a buffer that is replaced in each pass; neither is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 3)
        self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=False)
        self.register_buffer("seen", torch.full((2,), float(rank())), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + rank()
        return self.layer(inputs)


def test_buffers_are_averaged_or_left_alone() -> None:
    training = Training()
    model = training.model = Buffered()
    training.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.nn.ModuleDict({"_orig_mod": model})  # as torch.compile names it
    with LocalSteps(compiled, training.optimizer, every=2, **SETTINGS) as local:
        training.run(range(2), lambda step: local.step())
        average = [world_size() - 1.0] * 2
        assert model.seen.tolist() == average and model.mask.tolist() == [-torch.inf] * 3
        training.run(range(2, 3), lambda step: local.step())
        if rank() == world_size() - 1:
            model.seen = model.seen * float("nan")
        training.run(range(3, 4), lambda step: local.step())
        assert model.seen.tolist() == average, "all ranks return to the last exchange"


def first_ranks() -> tuple[bool, Any]:
    """Return whether this rank is in a group of fewer ranks, and the group."""
    if not HOROVOD:
        ranks = list(range(1, world_size()))
        return rank() in ranks, dist.new_group(ranks)
    if world_size() < 3:
        pytest.skip("needs 3 ranks")
    return bool(PAIR.included()), PAIR


def test_ranks_come_and_go_at_the_last_exchange() -> None:
    included, fewer = first_ranks()
    settings = {**SETTINGS, "every": 4, "checkpoint": FOLDER / "come-and-go"}

    def trained_until(end: int, group: Any, parameters: Mapping[str, torch.Tensor] | None = None) -> LocalSteps:
        training = Training()
        local = LocalSteps(training.model, training.optimizer, process_group=group, **settings)
        if parameters:
            assert_equal(dict(training.model.named_parameters()), parameters)
        training.run(range(local.steps, end), lambda step: local.step())
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


def test_wrong_arguments_of_local_steps_are_refused() -> None:
    training = Training()
    model, optimizer = training.model, training.optimizer
    for wrong, words in (
        ({"every": 0}, ["every = 0"]),
        ({"fragments": 5}, ["fragments = 5"]),
        ({"delay": 4}, ["delay = 4"]),
        ({"mixing": 1.0}, ["mixing = 1.0"]),
        ({"driver": "mpi"}, ["driver = 'mpi'"]),
        ({"method": "topkk"}, ["topkk", "topk"]),
    ):
        must_raise(ValueError, words, lambda wrong=wrong: LocalSteps(model, optimizer, **{"every": 4, **wrong}))
    empty = torch.nn.Sequential()
    must_raise(ValueError, ["no parameter"], lambda: LocalSteps(empty, optimizer, every=4))
    if HOROVOD:
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        must_raise(ValueError, ["plain optimizer"], lambda: LocalSteps(model, wrapped, every=4))
    else:
        module = DistributedDataParallel(model)
        must_raise(ValueError, ["without it"], lambda: LocalSteps(module, optimizer, every=4))
    with LocalSteps(model, optimizer, every=4) as local:
        must_raise(FileNotFoundError, ["no step that all ranks have saved"], lambda: local.load(FOLDER / "nothing"))


def test_ranks_that_exchange_at_other_steps_are_named() -> None:
    training = Training()
    with LocalSteps(training.model, training.optimizer, every=2 if rank() else 3, **SETTINGS) as local:

        def until_the_exchange() -> None:
            for _ in range(3):
                local.step()

        must_raise(PeerError, ["local_steps", "'every': 3", "'every': 2"], until_the_exchange)
