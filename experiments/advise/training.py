"""Train dense and under plans for the same seconds, for the losses that ``losses.py`` compares."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from experiments.advise import check, run
from experiments.advise.choose import DENSE
from experiments.advise.fabric import Fabric
from experiments.advise.losses import Curve, Trial
from experiments.advise.measure import wait_for_device
from experiments.advise.profile import Profile
from experiments.advise.report import Report
from experiments.advise.workload import Setup, Workload
from hvdcompress.plan import Plan, load

__all__ = ["Trainings", "with_trials"]

OFTEN = 20.0  # seconds between two messages about the same training


@dataclass(frozen=True)
class Trainings:
    """Trains dense and under plans on all ranks, from the same weights and with the same batches.

    Attributes:
        fabric: the ranks.
        workload: what is trained.
        seconds: of each training. Making batches and the first ``check.WARM`` steps, in which buffers are made, do not
            count.
        seeds: how many trainings of each plan.
        say: called with the training that runs.
    """

    fabric: Fabric
    workload: Workload
    seconds: float
    seeds: int
    say: Callable[[str], None]

    def compare(self, label: str, plan: dict[str, Any], dense: dict[int, Curve]) -> Trial:
        """Train under a plan with every seed; of two seeds in a row, each begins with the other training.

        Args:
            label: the plan's, for messages.
            plan: as ``load`` reads it.
            dense: dense trainings by seed; missing ones are added.
        """
        curves: dict[int, Curve] = {}
        for seed in range(self.seeds):
            if seed % 2:
                curves[seed] = self.train(label, load(plan), seed)
            if seed not in dense:
                dense[seed] = self.train(DENSE, None, seed)
            if seed not in curves:
                curves[seed] = self.train(label, load(plan), seed)
        seeds = range(self.seeds)
        return Trial.of(plan, self.seconds, [dense[seed] for seed in seeds], [curves[seed] for seed in seeds])

    def train(self, label: str, plan: Plan | None, seed: int) -> Curve:
        """Train once; on all ranks."""
        gc.collect()  # hooks and optimizers of the training before hold each other
        setup = self.workload.setup(self.fabric.rank, self.fabric.world_size, seed)
        module, optimizer, compressor = self.fabric.wrap(setup.model, plan, setup.optimizer)
        words = f"training {self.workload.name} with {label}, seed {seed + 1} of {self.seeds}"
        times, losses = self._steps(setup, module, optimizer, words)
        every = self.fabric.share((times, losses))
        held_out = self._held_out(setup)
        if compressor:
            compressor.release()
        mean = [statistics.fmean(each) for each in zip(*(theirs for _, theirs in every), strict=True)]
        return Curve(every[0][0], mean, held_out)

    def _steps(self, setup: Setup, module: Any, optimizer: Any, words: str) -> tuple[list[float], list[float]]:
        """Train until the seconds are over, or a loss is NaN or Inf.

        All ranks stop at the same step: between steps they add up the seconds of rank 0, zeros of the others, and the
        number of ranks whose loss is not finite.

        Returns:
            This rank's seconds so far at the end of each step, and its losses.
        """
        times: list[float] = []
        losses: list[float] = []
        elapsed, failed, said = 0.0, False, -OFTEN
        for batch in setup.batches:
            seconds, failures = self.fabric.sums(0.0 if self.fabric.rank else elapsed, float(failed))
            if seconds >= self.seconds or failures:
                break
            if time.monotonic() >= said + OFTEN:
                said = time.monotonic()
                self.say(f"{words}, {seconds:.0f} of {self.seconds:g} s")
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = setup.loss(module, batch)
            loss.backward()
            optimizer.step()
            wait_for_device(loss)
            if len(times) >= check.WARM:
                elapsed += time.perf_counter() - began
            times.append(elapsed)
            losses.append(loss.item())
            failed = not math.isfinite(losses[-1])
        return times, losses

    @torch.no_grad()
    def _held_out(self, setup: Setup) -> float | None:
        """Return the mean loss of all ranks' held-out examples; None if there are none, or it is not finite."""
        if setup.held_out is None:
            return None
        setup.model.eval()
        sums, counts = zip(*self.fabric.share(setup.held_out(setup.model)), strict=True)
        found = sum(sums) / max(1, sum(counts))
        return found if math.isfinite(found) else None


def with_trials(profile: Profile, report: Report | None, trainings: Trainings) -> Profile:
    """Train the advised plan against dense training, and if it loses the one that is advised then, until one does not.

    Args:
        profile: what has been measured, equal on all ranks.
        report: rank 0's advice; None on other ranks.
        trainings: trains on all ranks.

    Returns:
        The profile with a trial of each plan.
    """
    dense: dict[int, Curve] = {}
    while asked := trainings.fabric.share(run.plan_to_train(report) if report else None)[0]:
        trial = trainings.compare(asked[0], asked[1], dense)
        profile = Profile.open({**profile.to_dict(), "trials": [*profile.to_dict()["trials"], trial.model_dump()]})
        report = run.decided(report, profile) if report else None
    return profile
