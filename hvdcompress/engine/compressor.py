"""What the Compressors of all drivers have in common: a plan, one rank's state, its ledger and its observers."""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.engine.fallback import Verdict
from hvdcompress.engine.safety.watchdog import Limits, Place, Watchdog
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Step, loss_scale_now
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.describe import describe, first_step
from hvdcompress.engine.telemetry.explanation import explanation
from hvdcompress.engine.telemetry.figures import Figures, figures
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.metrics import Writer, openmetrics, scalars
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.telemetry.summary import summary
from hvdcompress.optimizers import without_beta1
from hvdcompress.plan import Bucket, Plan


class Compressor(ABC):
    """A driver's Compressor, as far as it does without a framework.

    Args:
        plan: what each tensor gets.
        rank: this rank.
        world: number of ranks.
        loss_scale: a number, or a function that returns one, by which the loss was multiplied.

    Attributes:
        plan: the plan.
        local: this rank's state.
        ledger: bytes and seconds so far, on this rank.
    """

    driver = "unnamed"  #: the name that is saved with the state
    never_falls_back = ""  #: why the driver does not compare steps with uncompressed ones; empty if it does

    def __init__(self, plan: Plan, rank: int, world: int, loss_scale: float | Callable[[], float] = 1.0):
        self.plan = plan
        self.loss_scale = loss_scale
        self.ledger = Ledger(world, rank)
        self.local = RankState(plan, rank, world, self.ledger)
        self.local.driver = self.driver
        if world == 1:
            log.warn_once("there is one rank, so nothing is exchanged or compressed: start several")
        if self.local.fallback.on and self.never_falls_back:
            self.local.fallback.on = False
            if rank == 0:
                log.warn_once(f"fallback has no effect: {self.never_falls_back}. Compression is kept in any case")
        myself = weakref.ref(self)
        limits = Limits(plan.watchdog, plan.warn_after, plan.end_after, is_elastic())
        self.watchdog = Watchdog(rank, world, lambda: _place(myself()), lambda: _pulse(myself()), limits)

    # -- state ----------------------------------------------------------------------------------------------

    @abstractmethod
    def residual(self, name: str) -> Any:
        """This rank's residual of a tensor, in its shape (a copy); zeros where none is kept.

        Raises:
            KeyError: there is no such tensor.
        """

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plan, steps, residuals. Every rank has its own, so save one file per rank.

        Its key ``made_by`` has the driver, the versions of the packages in use, and the optimizer's momentum.
        """
        return self.local.state_dict()

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; before the first step, too.

        Rank 0 logs a warning if the plan, the optimizer's momentum or the library's version was another one.

        Raises:
            ValueError: it is of another rank or world, or of other tensors; nothing is changed then.
        """

    def save(self, folder: str | Path) -> Path:
        """Write this rank's state to its own file in ``folder``; call it on every rank, after the same step.

        The file's name has the step. Files older than those of the save before are removed.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written, as on a full disk; what was saved before is as it was.
        """
        return checkpoint.save(self.state_dict(), folder)

    def load(self, folder: str | Path) -> None:
        """Read this rank's state from ``folder``; the states of another number of ranks are re-sharded.

        The newest step that all ranks have saved is taken. If a newer one is incomplete or damaged, a warning says so.

        Raises:
            FileNotFoundError: the folder holds no saved state, or none of all ranks.
            ValueError: what is there is damaged, or the state does not fit; nothing is changed then.
        """
        self.load_state_dict(checkpoint.load(folder, self.local.rank, self.local.world))

    def release(self) -> None:
        """Give back the memory of residuals and other state; the Compressor begins again."""
        self.local.release()

    @abstractmethod
    def _waits_for(self) -> str | None:
        """What a step that is under way waits for, in words; None outside of a step. The watchdog's thread asks."""

    def _is_over(self) -> bool:
        """Whether the ranks that this Compressor was made for are no more, as after a reset of an elastic training."""
        return False

    def _end_step(self, step: Step) -> None:
        """At the end of a step: say what the first one did; go on compressing or not, if the ranks have compared."""
        fallback = self.local.fallback
        if self.local.paused or not step.finite:
            return
        if self.ledger.steps == 1 and self.local.rank == 0:
            self._say_what_is_done()
        before = fallback.verdict
        gives_up = fallback.end_step()
        fallback.decide(step.voted)
        if self.local.rank == 0 and (gives_up or (before, fallback.verdict) == (Verdict.OPEN, Verdict.COMPRESS)):
            log.warn_once(str(fallback))

    def _say_what_is_done(self) -> None:
        """After the first step, log what is compressed, or that nothing is."""
        buckets = self._buckets()
        if done := first_step(buckets, self.ledger.dense_bytes(), self.ledger.bytes_sent()):
            log.say_once(done)
        elif self.plan.program.main.id != "none":
            largest = max((member.size for bucket in buckets for member in bucket.members), default=0)
            log.warn_once(
                f"nothing is compressed: min_elements is {self.plan.min_elements}, the largest tensor has {largest} "
                "elements, and rules may send others uncompressed"
            )

    def _decision(self) -> str:
        fallback = self.local.fallback
        return f"\n{fallback}" if fallback.on and not fallback.compares else ""

    def _without_beta1(self, optimizers: Iterable[Any]) -> None:
        """If the plan says so, set beta1 of these optimizers to 0, as gradients that wait act as momentum."""
        for optimizer in optimizers if self.plan.without_beta1 else ():
            if (done := without_beta1(optimizer)) and self.local.rank == 0:
                log.warn_once(done)

    # -- what users say and ask -----------------------------------------------------------------------------

    def observe(self, **metrics: float) -> None:
        """Show metrics to the methods, ``loss=…`` or ``learning_rate=…``: some restart their schedule on them.

        Call it on any rank or on all, at any time: what one rank notices, all act on, after the next step. GradiVeQ
        trains its basis again when the learning rate drops; FFT sends more when the loss gets worse.
        """
        self.local.observe(metrics)

    def trigger(self) -> None:
        """Restart every method's schedule on all ranks after the next step; one rank's call is enough."""
        self.local.asks_for_trigger = True

    def discard(self) -> None:
        """Take the last step back: all state is as before it, except that a restart of schedules stays agreed.

        For gradients that are thrown away, as by ``zero_grad()`` after a backward pass for another network: error
        feedback would send in later steps what it has kept of them. Call it on every rank, before the next gradient.
        A step that had an Inf or a NaN has changed nothing, so nothing is to be taken back.

        Raises:
            RuntimeError: a step is under way, or there is none to take back.
        """
        self._refuse_in_step("discard() the step when it is over: after backward() under DDP, after synchronize()")
        self.local.discard()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: gradients are averaged uncompressed; residuals, step counts and schedules do not move.

        For gradients whose exact average is needed, or which are not the training's. Enter and leave it on every rank,
        between steps. The momentum of an optimizer that uses these gradients is not adapted.

        Raises:
            RuntimeError: a step is under way.
        """
        between = "enter and leave paused() between steps: with synchronize() inside of it, under Horovod"
        self._refuse_in_step(between)
        before = self.local.paused
        self.local.paused = True
        try:
            yield
            self._refuse_in_step(between)
        finally:
            self.local.paused = before

    def _refuse_in_step(self, instead: str) -> None:
        if self._waits_for() is not None:
            raise RuntimeError(f"a step is under way: {instead}")

    def watch(self, observer: Observer) -> None:
        """Tell an observer of every event from now on: what is encoded, sent, waited for, decoded and kept."""
        self.local.observers.append(observer)

    def describe(self) -> str:
        """Which method each group of tensors gets, the memory of its state on this rank, and whether it is kept."""
        return describe(self._buckets()) + self._decision()

    def summary(self, link_gbits: float | None = None) -> str:
        """Return what was done so far on this rank, and why it is not faster, within 80 columns.

        First a table with a line for each program of methods, as :func:`hvdcompress.engine.telemetry.summary.summary`
        says. Then, where the driver sees steps (not TensorFlow and FSDP2), the means of recent steps: computing, codec,
        waiting, bytes, and what uncompressed steps take, if some were measured. Times are those of the host.

        Args:
            link_gbits: speed of this rank's link in Gbit/s, to tell the link from waiting for slower ranks.
        """
        table = summary(self.figures(), self.ledger, self.local.rank)
        step = self.local.times.mean()
        if step is None:
            return table + self._decision()
        return f"{table}\n{explanation(step, self._uncompressed_steps(), link_gbits)}"

    def _uncompressed_steps(self) -> str:
        """Return what is known of the time that steps take without compression, in words."""
        fallback = self.local.fallback
        if not fallback.on:
            return "uncompressed steps: not measured; fallback: true in the plan measures some"
        if fallback.compares:
            return "uncompressed steps: being measured"
        compressed, dense = (1e3 * each for each in fallback.seconds)
        return f"uncompressed steps: {dense:.1f} ms, compressed {compressed:.1f} ms; compression is {fallback.outcome}"

    def log_to(self, writer: Writer, step: int | None = None) -> None:
        """Write this rank's figures to a writer of TensorBoard's events, under ``hvdcompress/``.

        Args:
            writer: has ``add_scalar(tag, value, step)``, as torch.utils.tensorboard's SummaryWriter.
            step: of the training; by default the steps that were done.
        """
        step = self.ledger.steps if step is None else step
        for tag, value in scalars(self.figures(), self.ledger, self.local.rank).items():
            writer.add_scalar(tag, value, step)

    def openmetrics(self, **labels: str) -> str:
        """This rank's figures as OpenMetrics text; ``labels``: further labels of every sample, such as ``job="a"``.

        Raises:
            ValueError: a label's name is none, or "rank", "program" or "counter".
        """
        return openmetrics(self.figures(), self.ledger, self.local.rank, labels)

    def figures(self) -> list[Figures]:
        """This rank's figures by program, as numbers; reads every residual once."""
        return figures(self.local, self.ledger, self._buckets(), self._to_host)

    def gradient_norm(self) -> float:
        """Return the norm of the reduced gradients of the last step, all tensors together, before clipping.

        It is that of the gradients themselves, with the loss scale and adapted momentum left out of account.

        Raises:
            RuntimeError: the plan has no ``clip_norm``, so norms are not measured.
        """
        return self.local.measured_norm()

    def _to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """An array of state, as one of numpy's."""
        return np.asarray(array)

    def _buckets(self) -> list[Bucket]:
        """The buckets that are known by now."""
        return self.local.buckets()

    def current_loss_scale(self) -> float:
        """The loss scale that is on now.

        Raises:
            ValueError: it is not a positive finite number.
        """
        return loss_scale_now(self.loss_scale)


def has_changed(process_set: Any, world: int) -> bool:
    """Whether a process set of Horovod's has another number of ranks than it had, or none, as Horovod has ended."""
    try:
        return bool(process_set.size() != world)
    except ValueError:
        return True


def is_elastic() -> bool:
    """Whether Horovod's elastic launcher has started this rank."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def next_number(numbers: Counter[int], set_id: int, largest: Callable[[int], int], watchdog: Watchdog) -> int:
    """The next Compressor's number within its process set: collectives are named by it.

    Ranks make their Compressors in one order, and ranks outside of a set make none; but one that joins an elastic
    training of Horovod's begins to count.

    Args:
        numbers: the next ones, by process set.
        set_id: the process set's.
        largest: brings the largest of all ranks' numbers.
        watchdog: the new Compressor's.
    """
    number = numbers[set_id]
    if is_elastic():
        with watchdog.meeting("every rank's Compressor"):
            number = largest(number)
    numbers[set_id] = number + 1
    return number


def _place(compressor: Compressor | None) -> Place | None:
    """Where a rank is, for its watchdog; one that has no Compressor any more is nowhere."""
    if compressor is None:
        return Place(0, None)
    if compressor._is_over():
        return None
    steps = max((state.step for state in list(compressor.local.states.values())), default=0)
    return Place(steps, compressor._waits_for(), first=compressor.ledger.steps == 0)


def _pulse(compressor: Compressor | None) -> Any:
    """What changes when a step moves: waiting alone does not."""
    if compressor is None:
        return None
    ledger = compressor.ledger
    return ledger.steps, ledger.collectives(), ledger.dense_bytes(), ledger.seconds()["select"]
