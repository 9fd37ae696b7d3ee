"""Measure a profile: ready times of gradients, the link by two sizes, how ranks share processors, free memory."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from experiments.advise import check
from experiments.advise.calibrate import REFERENCE
from experiments.advise.choose import DENSE
from experiments.advise.codecs import Known
from experiments.advise.fabric import Fabric
from experiments.advise.profile import MeasuredCodec, MeasuredLink, MeasuredTimes, Profile
from experiments.advise.workload import Shapes, Workload
from hvdcompress.method import Method
from hvdcompress.plan import load

__all__ = ["link", "profile", "sharing", "times", "wait_for_device", "with_rivals"]

PASSES, WARM = 11, 3
REPEATS = 15  # of collectives that are small
FEW = 64  # small collectives at once
SMALL, LARGE = 8, 1 << 20  # bytes; the large size grows until a collective takes LONG seconds
LONG, MOST = 0.15, 1 << 26
SPIN = 0.2
COMPRESSED = "compressed"
ROUNDS, TURN = 2, 1.0  # of dense and compressed steps: turns, and seconds of each


def times(workload: Workload, fabric: Fabric | None = None) -> tuple[dict[str, tuple[int, ...]], MeasuredTimes]:
    """When gradients are ready, over some backward passes without any exchange; medians.

    All ranks compute at the same time. A collective waits for the last one: a pass's times are the latest rank's.

    Args:
        workload: what is trained. Where its backward pass only waits, and there are no ranks to be disturbed by,
            nothing is measured: a processor that has other things to do waits longer than it was asked to.
        fabric: the ranks; None in one process.

    Returns:
        Shapes by name, and the times.
    """
    if fabric is None and isinstance(workload, Shapes):
        ready = workload.planned()
        waited = MeasuredTimes(forward=0.0, backward=max(ready.values()), update=0.0, waits=True, ready=ready)
        return dict(workload.tensors), waited
    rank, world_size = (fabric.rank, fabric.world_size) if fabric else (0, 1)
    model, loss = workload.make(rank, world_size)
    optimizer = workload.optimizer(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    came: dict[str, float] = {}

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            came[name] = time.perf_counter()

        return note

    hooks = [p.register_post_accumulate_grad_hook(hook(name)) for name, p in trained.items()]
    rows: list[tuple[float, float, float, dict[str, float]]] = []
    for number in range(WARM + PASSES):
        optimizer.zero_grad()
        came.clear()
        if fabric:
            fabric.meet()
        began = time.perf_counter()
        total = loss(model)
        wait_for_device(total)
        forward = time.perf_counter()
        total.backward()
        wait_for_device(total)
        backward = time.perf_counter()
        optimizer.step()
        wait_for_device(total)
        if number >= WARM:
            ready = {name: at - forward for name, at in came.items()}
            rows.append((forward - began, backward - forward, time.perf_counter() - backward, ready))
    for one in hooks:
        one.remove()
    if missing := [name for name in trained if name not in rows[-1][3]]:
        raise ValueError(f"no gradient of {missing[0]!r} came in the backward pass: freeze it, or use it in the loss")
    latest = [
        (
            *(max(row[part] for row in each) for part in range(3)),
            {name: max(row[3][name] for row in each) for name in trained},
        )
        for each in zip(*(fabric.share(rows) if fabric else [rows]), strict=True)
    ]

    def middle(part: int) -> float:
        return statistics.median(row[part] for row in latest)

    backward = middle(1)
    ready = {name: min(backward, statistics.median(row[3][name] for row in latest)) for name in trained}
    # shapes hand out copies of their gradients, which are made in the forward pass: not a part of what is trained
    forward = 0.0 if workload.waits else middle(0)
    found = MeasuredTimes(forward=forward, backward=backward, update=middle(2), waits=workload.waits, ready=ready)
    return {name: tuple(parameter.shape) for name, parameter in trained.items()}, found


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait until a GPU has computed everything that this tensor depends on."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def sharing(meet: Callable[[], None]) -> float:
    """Ranks that share a processor: a computation's time by its processor time, while all ranks compute."""
    meet()
    began, own = time.perf_counter(), time.thread_time()
    while time.perf_counter() < began + SPIN:
        pass
    return max(1.0, SPIN / max(1e-9, time.thread_time() - own))


def link(fabric: Fabric, shared: float) -> MeasuredLink:
    """What collectives cost over the real link, in the way that the driver starts them.

    The rate is that of one large all-reduce; what is left of a small one's time is α and the cost of a round, which a
    small all-gather, with half as many messages one after the other, tells apart.

    Args:
        fabric: the ranks.
        shared: how many of them share a processor.
    """
    p = fabric.world_size
    small = _median(fabric, lambda: fabric.wait(fabric.all_reduce([torch.zeros(SMALL // 4)])))
    gather = _median(fabric, lambda: fabric.all_gather(torch.zeros(SMALL // 4)))
    many = [torch.zeros(SMALL // 4) for _ in range(FEW)]
    together = _median(fabric, lambda: fabric.wait(fabric.all_reduce(many)))
    size, seconds = LARGE, 0.0
    while True:
        array = torch.zeros(size // 4)
        seconds = _median(fabric, lambda array=array: fabric.wait(fabric.all_reduce([array])), 3)  # type: ignore[misc]
        if seconds >= LONG or size >= MOST:
            break
        size = min(MOST, int(size * min(16.0, max(2.0, 1.2 * LONG / seconds))))
    rate = 8 * 2 * (p - 1) / p * size / max(1e-9, seconds - small)
    message = min(max(0.0, small - gather), small / 2) / (p - 1)
    return MeasuredLink(
        rate=rate,
        message=message,
        round=max(0.0, small - 2 * (p - 1) * message),
        call=max(0.0, together - small) / (FEW - 1) / shared,
        overlap=_overlap(fabric, array, seconds),
    )


def _overlap(fabric: Fabric, array: torch.Tensor, alone: float) -> float:
    """The share of its speed at which this rank computes while the link is busy."""
    block = torch.zeros(1 << 16)

    def compute(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            block.add_(1.0)
        return time.perf_counter() - began

    fabric.meet()
    compute(100)
    fabric.meet()
    unit = compute(1000) / 1000
    count = max(1, int(alone / unit))
    found = []
    for _ in range(3):
        fabric.meet()
        computing = compute(count)
        fabric.meet()
        began = time.perf_counter()
        handle = fabric.all_reduce([array])
        compute(count)
        fabric.wait(handle)
        found.append(time.perf_counter() - began - computing)
    # with overlap e, computing makes e · alone of progress meanwhile, and the rest afterwards
    worst = max(fabric.share(statistics.median(found)))
    return min(1.0, max(0.0, 1.0 - worst / alone))


def _median(fabric: Fabric, call: Callable[[], None], repeats: int = REPEATS) -> float:
    """Seconds of a collective, begun by all ranks at once: the median of what the slowest rank took."""
    call()
    found = []
    for _ in range(repeats):
        fabric.meet()
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(map(max, zip(*fabric.share(found), strict=True)))


def with_rivals(
    profile: Profile,
    plans: Mapping[str, Mapping[str, Any]],
    workload: Workload,
    fabric: Fabric,
    say: Callable[[str], None],
) -> Profile:
    """The profile with real steps of plans that are predicted to be about as fast as each other.

    Args:
        profile: of the other measurements, alike on all ranks.
        plans: these plans by label, as ``run.rivals`` gives them.
        workload: what is trained.
        fabric: the ranks.
        say: called with what is measured next.
    """
    steps = check.measure(fabric, workload, check.stages(plans), ROUNDS, TURN, say)
    found = [{"plan": plan, "seconds": statistics.median(steps[label])} for label, plan in plans.items()]
    return Profile.open({**profile.to_dict(), "steps": found})


def profile(
    workload: Workload,
    methods: list[Method],
    known: dict[str, MeasuredCodec],
    fabric: Fabric | None,
    say: Callable[[str], None],
) -> Profile:
    """Measure everything that advice is made from; on every rank, or in one process.

    Args:
        workload: what is trained.
        methods: whose codecs are timed.
        known: codecs that need not be.
        fabric: the ranks; None in one process, whose profile has no link.
        say: called with what is measured next.
    """
    import psutil

    meet = fabric.meet if fabric else lambda: None
    say("measuring how ranks share processors")
    shared = max(fabric.share(sharing(meet))) if fabric else 1.0
    say(f"measuring when gradients of {workload.name} are ready")
    tensors, found = times(workload, fabric)
    say("measuring the link")
    measured = link(fabric, shared) if fabric else None
    meet()
    steps: dict[str, list[float]] = {}
    if fabric:
        plans = {DENSE: None, COMPRESSED: load(REFERENCE)}
        steps = check.measure(fabric, workload, plans, ROUNDS, TURN, say)
    codecs = Known(dict(known), say)
    codecs.time_all([*methods, load(REFERENCE).program.main] if fabric else methods)
    given = {"link": measured.model_dump()} if measured else {}
    return Profile.made_of(
        name=re.sub(r"[^\w.-]+", "-", workload.name) or "model",
        made=time.strftime("%Y-%m-%d"),
        ranks=fabric.world_size if fabric else 1,
        shared=shared,
        memory=psutil.virtual_memory().available,
        driver=fabric.driver if fabric else "Horovod",
        tensors={name: list(shape) for name, shape in tensors.items()},
        times=found.model_dump(),
        codecs={name: codec.model_dump() for name, codec in codecs.codecs.items()},
        **given,
        **{label: statistics.median(each) for label, each in steps.items()},
    )
