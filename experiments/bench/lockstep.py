"""Ranks in lockstep in one process, of which only what they compute is timed: the codec of a real step.

A step goes the way of the PyTorch driver: gradients come one by one, the last layer's first, into the buckets that the
driver would make; the reduced gradients overwrite them; and what the driver leaves to Horovod (``none``) costs nothing.

On the CPU the time is that of the calling thread alone, which does not include what other processes take. On a GPU it
is the time between two events, with an idle device before the first and after the second: the host's part is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from hvdcompress.engine.commit import Part, commit_step
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.lockstep import perform
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import Array, Broadcast, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.ops.spec import Ops
from hvdcompress.plan import BY_NAME, Bucket, Plan


class Cpu:
    """NumPy arrays and the compiled ops, in this thread."""

    ops: Ops = fast

    def array(self, x: Array) -> Array:
        """Return a NumPy array as an array of the device."""
        return x

    def fetch(self, x: Array) -> Array:
        """Return an array of the device as a NumPy array."""
        return x

    def empty(self, n: int) -> Array:
        """Return a float32 array [n] whose memory has been touched."""
        return np.full(n, 0.0, np.float32)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Call, and return the result and the seconds."""
        began = time.thread_time()
        result = call(*arguments)
        return result, time.thread_time() - began


class Tensors(Cpu):
    """PyTorch tensors on "cuda", an NVIDIA GPU, or on "cpu", where they serve tests."""

    def __init__(self, where: str):
        import torch

        from hvdcompress.ops import cuda
        from hvdcompress.ops.torch import ops as general

        ops: Any = cuda if where == "cuda" else general
        self.ops, self.torch, self.where = ops, torch, where

    def array(self, x: Array) -> Array:
        return self.torch.from_numpy(np.ascontiguousarray(x)).to(self.where)

    def fetch(self, x: Array) -> Array:
        return x.cpu().numpy()

    def empty(self, n: int) -> Array:
        return self.torch.zeros(n, dtype=self.torch.float32, device=self.where)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        if self.where == "cpu":
            return super().timed(call, *arguments)
        cuda = self.torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        first.record()
        result = call(*arguments)
        last.record()
        last.synchronize()
        return result, first.elapsed_time(last) / 1e3


def device(name: str) -> Cpu:
    """Return the device "cpu" or "cuda".

    Raises:
        ValueError: this machine has no GPU.
        ModuleNotFoundError: PyTorch is not installed.
    """
    if name == "cpu":
        return Cpu()
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda: PyTorch {torch.__version__} finds no GPU; use --device cpu")
    return Tensors("cuda")


#: Parts of a step: up to the last collective (with receiving the gradients); from its result to the sum; writing the
#: sum over the gradients and keeping the new state
PARTS = ("encode", "decode", "apply")
WARM = 4  #: minimum number of steps before the first that counts: thresholds are learned, buffers are made


class Lockstep:
    """The ranks of one world.

    Args:
        plan: how tensors are compressed.
        specs: the tensors, in the order of the net.
        world_size: number of ranks.
        device: where the gradients are.
    """

    def __init__(self, plan: Plan, specs: Sequence[TensorSpec], world_size: int, device: Cpu):
        self.plan, self.world_size, self.device = plan, world_size, device
        self.ranks = [RankState(plan, rank, world_size) for rank in range(world_size)]
        places = {
            member.name: (bucket, at)
            for bucket in plan.buckets(specs, BY_NAME)
            for at, member in enumerate(bucket.members)
        }
        self._places = [places[spec.name] for spec in specs]
        self._spent: dict[str, float] = {}

    def step(self, gradients: Sequence[Sequence[Array]]) -> dict[str, float]:
        """Make one step.

        Args:
            gradients: by rank and tensor, flat float32; the reduced gradients overwrite them.

        Returns:
            Seconds by part, the mean over the ranks.
        """
        self._spent = dict.fromkeys(PARTS, 0.0)
        received = [self._receive(rank, given) for rank, given in zip(self.ranks, gradients, strict=True)]
        for name in received[0][0]:
            self._exchange([exchanges[name] for exchanges, _ in received])
        for rank, (exchanges, passed) in zip(self.ranks, received, strict=True):
            for exchange in exchanges.values():
                self._timed("apply", exchange.deliver, 1.0 / self.world_size)
            self._timed("apply", commit_step, rank, [*exchanges.values(), *passed])
        return self._spent

    def _timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        result, seconds = self.device.timed(call, *arguments)
        self._spent[part] += seconds / self.world_size
        return result

    def _receive(self, rank: RankState, given: Sequence[Array]) -> tuple[dict[str, Exchange], list[Part]]:
        """Take all gradients of a rank, up to the first collective of each bucket.

        Returns:
            The exchanges by bucket name, and the steps of the buckets that Horovod reduces itself.
        """
        exchanges: dict[str, Exchange] = {}
        passed: list[Part] = []
        ops = self.device.ops

        def take(bucket: Bucket, index: int, gradient: Array) -> None:
            name = bucket.spec.name
            if rank.next_step(bucket).passes_through:
                if not self.plan.stateless:
                    ops.all_finite(gradient)
                passed.append(Part(rank, bucket, gradient, ops))
                return
            if name not in exchanges:
                exchanges[name] = Exchange(rank, Group(rank.rank, self.world_size), bucket, gradient, ops)
            exchanges[name].add([index], [gradient])
            if exchanges[name].is_full:
                exchanges[name].start()

        rank.begin_round()
        for (bucket, index), gradient in reversed(list(zip(self._places, given, strict=True))):
            self._timed("encode", take, bucket, index, gradient)
        return exchanges, passed

    def _exchange(self, exchanges: list[Exchange]) -> None:
        """Perform the collectives of one bucket."""
        at = self.device
        while (collective := exchanges[0].collective) is not None:
            collectives: list[Any] = [exchange.collective for exchange in exchanges]
            if isinstance(collective, Broadcast):  # the mean rank computes a share of what the root computes
                made = at.fetch(self._timed("encode", collectives[collective.root].make))
                collectives = [replace(collective, make=lambda made=made: made)] * self.world_size  # type: ignore[misc]
            else:
                collectives = [replace(each, x=at.fetch(each.x)) for each in collectives]
            for exchange, result in zip(exchanges, perform(collectives), strict=True):
                lifted: Any = [at.array(one) for one in result] if isinstance(result, list) else at.array(result)
                _, seconds = at.timed(exchange.resume, lifted)
                # Only now is it known whether that was the last collective
                self._spent["decode" if exchange.collective is None else "encode"] += seconds / self.world_size


def draw(n: int, count: int, seed: int = 0) -> Array:
    """Draw gradients [count, n] float32 that resemble those of successive steps.

    The scale of each element is log-normal and the same in all of them, so magnitudes have a heavy tail and the same
    elements tend to be large; so is a fifth of the variance, the direction that a residual adds up.
    """
    random = np.random.default_rng(seed)
    scale = np.float32(1e-3) * np.exp(np.float32(0.85) * random.standard_normal(n, np.float32))
    direction = np.float32(0.5) * random.standard_normal(n, np.float32)
    rows = random.standard_normal((count, n), np.float32)
    for row in rows:
        row += direction
        row *= scale
    return rows


def warm_steps(plan: Plan) -> int:
    """Return the number of steps until the method is in its last phase and its thresholds are learned."""
    method = plan.program.main
    last = len(method.phases) - 1
    return next(age for age in range(WARM, 1_000_000) if method.phase_of(age) == last)


def time_steps(
    plan: Plan,
    specs: Sequence[TensorSpec],
    world_size: int,
    runs: int,
    warm: int | None = None,
    device: Cpu | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Time the codec of one rank.

    Args:
        plan: how tensors are compressed.
        specs: the tensors.
        world_size: number of ranks.
        runs: steps that count.
        warm: steps before them; None: :func:`warm_steps`.
        device: where the gradients are; None: in host memory.
        seed: of the gradients.

    Returns:
        One row per run: seconds by part of :data:`PARTS`, and of a ``copy`` of the gradient just before.
    """
    at = device or Cpu()
    ranks, ends = Lockstep(plan, specs, world_size, at), np.cumsum([0, *(spec.size for spec in specs)])
    rows, copy = at.array(draw(int(ends[-1]), 4, seed)), at.empty(int(ends[-1]))
    gradients = [[at.empty(spec.size) for spec in specs] for _ in range(world_size)]
    found = []
    for step in range((warm_steps(plan) if warm is None else warm) + runs):
        for rank, tensors in enumerate(gradients):
            for out, start, stop in zip(tensors, ends, ends[1:], strict=False):
                out[:] = rows[(step + rank) % len(rows), start:stop]
        _, seconds = at.timed(copy.__setitem__, slice(None), rows[0])
        found.append({**ranks.step(gradients), "copy": seconds})
    return pd.DataFrame(found[-runs:])
