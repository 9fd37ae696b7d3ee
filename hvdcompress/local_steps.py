"""Local steps: each rank trains alone, and the ranks exchange their parameters every ``every`` steps, compressed.

    from hvdcompress.local_steps import LocalSteps

    local = LocalSteps(model, optimizer, every=30, method="powersgd")   # on every rank; no DDP wrapper
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        local.step()                                                    # exchanges in every 30th call

An exchange averages the *pseudo-gradient*, the parameters at the last exchange (the *anchor*) minus the parameters now,
by any method or plan, with its error feedback. An outer optimizer, SGD with Nesterov momentum, then updates the anchor,
from which all ranks go on (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1). ``outer=None`` sets the
parameters to their average instead (local SGD: Stich 2019, arXiv 1805.09767).

With ``fragments`` and ``delay``, a part of the parameters is exchanged at a time, while training goes on (Streaming
DiLoCo: Douillard et al. 2025, arXiv 2501.18512, algorithm 2).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hvdcompress._torch.compressor import TensorCompressor, plain_name
from hvdcompress.engine.telemetry import log
from hvdcompress.method import Method
from hvdcompress.plan import Plan, plan_of

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  #: the outer optimizer of DiLoCo's paper (section 3.1)
KEPT = 2  #: saved steps that are kept, so that one is complete while the next one is being written


class Fragment:
    """Some parameters of the model, which are exchanged together.

    Args:
        parameters: the parameters of the model by name.
        offset: the fragment's exchanges begin at steps t with t mod ``every`` = offset.

    Attributes:
        anchors: the parameters at the last exchange, by name; equal on all ranks.
        compressor: exchanges the pseudo-gradients.
        gradients: the pseudo-gradients in flight by name; their averages once ``pending`` is done.
        pending: the exchange in flight; None if there is none.
        due: the step in which its result is applied.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], offset: int):
        self.parameters = parameters
        self.offset = offset
        self.anchors = {name: torch.nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
        self.compressor: TensorCompressor
        self.gradients: dict[str, torch.Tensor] = {}
        self.pending: Future[None] | None = None
        self.due = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the pseudo-gradients."""
        self.gradients = {name: anchor - self.parameters[name] for name, anchor in self.anchors.items()}

    def end(self, outer: torch.optim.Optimizer, mixing: float) -> bool:
        """Wait for the exchange, let the outer optimizer update the anchor, and move the parameters to it.

        Args:
            outer: the outer optimizer.
            mixing: the parameters become ``mixing`` times themselves plus (1 - ``mixing``) times the anchor.

        Returns:
            False if a parameter of some rank was Inf or NaN: then the parameters return to the last anchor.
        """
        assert self.pending is not None
        pending = self.pending
        self.pending = None
        pending.result()
        # After a NaN on any rank, all averages are NaN on all ranks
        is_finite = all(bool(each.isfinite().all()) for each in self.gradients.values())
        if is_finite:
            # The outer optimizer updates the anchors that have a gradient: only those of this fragment
            for name, anchor in self.anchors.items():
                anchor.grad = self.gradients[name]
            outer.step()
            for anchor in self.anchors.values():
                anchor.grad = None
        self.gradients = {}
        self.pull(mixing if is_finite else 0.0)
        return is_finite

    @torch.no_grad()
    def pull(self, mixing: float) -> None:
        """Move the parameters to the anchor; ``mixing`` is the share of their present values."""
        for name, anchor in self.anchors.items():
            if mixing:
                self.parameters[name].lerp_(anchor, 1.0 - mixing)
            else:
                self.parameters[name].copy_(anchor)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the anchor to the parameters."""
        for name, anchor in self.anchors.items():
            anchor.copy_(self.parameters[name])


class LocalSteps:
    """Exchanges the parameters of a model every few steps.

    Constructing it is collective: all ranks must do it. It broadcasts parameters and buffers from rank 0.

    Args:
        model: the model, not wrapped in ``DistributedDataParallel``. Its parameters that require a gradient are
            exchanged. Floating-point buffers, such as those of batch normalization, are averaged in each exchange.
        optimizer: the inner optimizer. Its state stays local; it is saved with the rest.
        every: steps from one exchange of a parameter to the next.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        outer: ``lr``, ``momentum`` and ``nesterov`` of the outer SGD; None to average the parameters.
        fragments: number of parts of the model. One of them is exchanged every ``every / fragments`` steps.
        delay: steps from the beginning of an exchange to the use of its result. During these steps, training goes on.
        mixing: share of a rank's own parameters when a delayed result is applied (α in Streaming DiLoCo).
        warmup: number of first steps after which parameters are averaged in every step, uncompressed.
        driver: "torch" for torch.distributed or "horovod"; by default the one that is initialized.
        process_group: a torch.distributed process group or a Horovod process set; by default all ranks.
        checkpoint: a folder. The state is loaded from there if there is one, and saved after each exchange.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``nodes``, …). The outer optimizer's
            momentum is kept, unless ``optimizer_momentum`` is given here or in the plan's dict.

    Attributes:
        steps: number of calls of :meth:`step`.
        outer: the outer optimizer.
        fragments: the parts of the model.

    Raises:
        ValueError: an argument is out of range, the plan is wrong, or neither torch.distributed nor Horovod is
            initialized.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        method: str | Method | Plan | Mapping[str, Any] = "none",
        outer: Mapping[str, Any] | None = OUTER,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        warmup: int = 0,
        driver: str | None = None,
        process_group: Any = None,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ):
        if every < 1:
            raise ValueError(f"every = {every} must be 1 or more")
        if not 1 <= fragments <= every:
            raise ValueError(f"fragments = {fragments} must be from 1 to every = {every}")
        if not 0 <= delay < every:
            raise ValueError(f"delay = {delay} must be from 0 to {every - 1}: less than the steps between exchanges")
        if not 0.0 <= mixing < 1.0:
            raise ValueError(f"mixing = {mixing} must be at least 0 and less than 1; with 1, ranks would never agree")
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.delay = delay
        self.mixing = mixing
        self.warmup = warmup
        self.checkpoint = Path(checkpoint) if checkpoint else None
        self.steps = 0
        self._network = _Network(driver, process_group)
        self._network.broadcast(model)
        trained = {plain_name(name): each for name, each in model.named_parameters() if each.requires_grad}
        parts = _parts(trained, fragments)
        self.fragments = [Fragment(part, (n + 1) * every // len(parts) % every) for n, part in enumerate(parts)]
        anchors = [anchor for fragment in self.fragments for anchor in fragment.anchors.values()]
        self.outer = torch.optim.SGD(anchors, **({"lr": 1.0} if outer is None else outer))
        plan = plan_of(method, **settings)
        for fragment in self.fragments:
            fragment.compressor = self._network.compressor(plan, fragment.anchors)
            if "optimizer_momentum" in {**(method if isinstance(method, Mapping) else {}), **settings}:
                fragment.compressor.use_optimizer(self.outer)
            else:
                fragment.compressor.ignore_optimizers()
        buffers = {name: each for name, each in model.named_buffers() if each.is_floating_point()}
        self._buffers = buffers
        self._buffer_compressor: TensorCompressor | None = None
        if buffers:
            named = {name: torch.nn.Parameter(each.detach()) for name, each in buffers.items()}
            self._buffer_compressor = self._network.compressor(plan_of("none"), named)
        # One thread for all exchanges, so that they begin in one order on all ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdcompress")
        if self.checkpoint and _complete(self.checkpoint):
            self.load(self.checkpoint)

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Call it when training has ended; exchanges in flight are completed."""
        self._thread.shutdown()

    @property
    def compressors(self) -> list[TensorCompressor]:
        """The Compressor of each fragment, for ``summary()`` and ``ledger``."""
        return [fragment.compressor for fragment in self.fragments]

    # -- a step ---------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step of the inner optimizer, and exchange what is due. Call it after ``optimizer.step()``.

        Returns:
            Whether the result of an exchange was applied.

        Raises:
            PeerError: a rank failed, or the ranks disagree; on every rank.
        """
        self.steps += 1
        if self.steps <= self.warmup:
            self._average()
            return True
        worked = False
        for fragment in self.fragments:
            if (self.steps - self.warmup) % self.every == fragment.offset:
                self._begin(fragment, self.delay)
            if fragment.pending and fragment.due == self.steps:
                self._end(fragment, self.mixing if self.delay else 0.0)
                worked = True
        if self.checkpoint and self.fragments[-1].due == self.steps:
            self.save(self.checkpoint)
        return worked

    def synchronize(self) -> None:
        """Apply the results of exchanges in flight, and exchange all parameters now. Call it before evaluation.

        Afterwards all ranks have the same parameters.
        """
        for fragment in self.fragments:
            if fragment.pending:
                self._end(fragment, self.mixing)
        for fragment in self.fragments:
            self._begin(fragment, 0)
            self._end(fragment, 0.0)

    def _average(self) -> None:
        """Average the parameters, uncompressed, and make them the anchor."""
        for fragment in self.fragments:
            with fragment.compressor.paused():
                fragment.compressor.allreduce({name: each.data for name, each in fragment.parameters.items()})
            fragment.reset()
        self._average_buffers()

    def _begin(self, fragment: Fragment, delay: int) -> None:
        """Begin the exchange of a fragment, whose result will be applied after ``delay`` steps."""
        fragment.begin()
        fragment.due = self.steps + delay
        fragment.pending = self._thread.submit(self._exchange, fragment)

    def _exchange(self, fragment: Fragment) -> None:
        """Average the pseudo-gradients of a fragment, and with the last one the buffers; runs in the thread."""
        fragment.compressor.allreduce(fragment.gradients)
        if fragment is self.fragments[-1]:
            self._average_buffers()

    def _average_buffers(self) -> None:
        if self._buffer_compressor:
            self._buffer_compressor.allreduce(self._buffers)

    def _end(self, fragment: Fragment, mixing: float) -> None:
        """Apply the result of an exchange."""
        if not fragment.end(self.outer, mixing) and self._network.rank == 0:
            log.LOGGER.warning(
                "step %d: a parameter is Inf or NaN on some rank; all ranks go on from the last exchange", self.steps
            )

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: steps, model, both optimizers, anchors, residuals, and exchanges in flight.

        It waits for exchanges in flight, and contains their results. Ranks differ, so save one file per rank.
        """
        in_flight = {}
        for number, fragment in enumerate(self.fragments):
            if fragment.pending:
                fragment.pending.result()
                in_flight[number] = (fragment.due, {name: each.clone() for name, each in fragment.gradients.items()})
        return {
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "anchors": {n: anchor.detach() for f in self.fragments for n, anchor in f.anchors.items()},
            "outer": self.outer.state_dict(),
            "in_flight": in_flight,
            "compressors": [compressor.state_dict() for compressor in self.compressors],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, or model.
        """
        for fragment, state in zip(self.fragments, saved["compressors"], strict=True):
            fragment.compressor.load_state_dict(state)
        self._restore(saved)

    @torch.no_grad()
    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Restore everything but the Compressors."""
        self.steps = saved["steps"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.outer.load_state_dict(saved["outer"])
        for number, fragment in enumerate(self.fragments):
            fragment.pending = None
            for name, anchor in fragment.anchors.items():
                anchor.copy_(saved["anchors"][name])
            if number in saved["in_flight"]:
                fragment.due, fragment.gradients = saved["in_flight"][number]
                fragment.pending = Future()
                fragment.pending.set_result(None)

    def save(self, folder: str | Path) -> None:
        """Write the state of this rank into a folder of this step. Call it on every rank, after the same step."""
        rank = self._network.rank
        world_size = self._network.world_size
        place = Path(folder) / f"step-{self.steps}"
        state = self.state_dict()
        del state["compressors"]
        for number, compressor in enumerate(self.compressors):
            compressor.save(place / f"fragment-{number}")
        unfinished = place / f"rank-{rank}.tmp"
        torch.save(state, unfinished)
        unfinished.replace(place / f"rank-{rank}-of-{world_size}.pt")
        if rank == 0:
            for old in _steps(Path(folder))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, folder: str | Path) -> None:
        """Load the newest step that all ranks have saved. Another number of ranks is allowed.

        Then residuals are re-sharded, all ranks go on from the last exchange, and each rank takes the inner optimizer's
        state of one of the ranks that saved.

        Raises:
            FileNotFoundError: the folder has no step that all ranks have saved.
            ValueError: the state belongs to another model.
        """
        place = _complete(Path(folder))
        if place is None:
            raise FileNotFoundError(f"{folder} has no step that all ranks have saved")
        rank = self._network.rank
        world_size = self._network.world_size
        before = len(list(place.glob("rank-*-of-*.pt")))
        saved = torch.load(place / f"rank-{rank % before}-of-{before}.pt", weights_only=True)
        for number, compressor in enumerate(self.compressors):
            compressor.load(place / f"fragment-{number}")
        self._restore(saved)
        if before != world_size:
            # Parameters between exchanges are those of ranks that no longer exist
            for fragment in self.fragments:
                fragment.pull(0.0)


class _Network:
    """What differs between torch.distributed and Horovod."""

    def __init__(self, driver: str | None, group: Any):
        if driver not in (None, "torch", "horovod"):
            raise ValueError(f'driver = {driver!r} must be "torch" or "horovod"')
        has_torch = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.is_horovod = driver == "horovod" or (driver is None and not has_torch)
        if self.is_horovod:
            import horovod.torch as hvd

            if not hvd.is_initialized():
                raise ValueError("call torch.distributed.init_process_group() or hvd.init() before making LocalSteps")
            self.group = group or hvd.global_process_set
            self.rank = self.group.rank()
            self.world_size = self.group.size()
        else:
            self.group = group or torch.distributed.group.WORLD
            self.rank = torch.distributed.get_rank(self.group)
            self.world_size = torch.distributed.get_world_size(self.group)

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> TensorCompressor:
        """Return a Compressor of these parameters."""
        if self.is_horovod:
            from hvdcompress.horovod.torch import Compressor as HorovodCompressor

            return HorovodCompressor(plan, parameters.items(), process_set=self.group)
        from hvdcompress.ddp import Compressor

        return Compressor(plan, parameters.items(), process_group=self.group)

    @torch.no_grad()
    def broadcast(self, model: torch.nn.Module) -> None:
        """Copy parameters and buffers from rank 0 to all ranks."""
        tensors = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
        if self.is_horovod:
            import horovod.torch as hvd

            for name, tensor in tensors.items():
                hvd.broadcast_(tensor, 0, name=f"hvdcompress.local_steps.{name}", process_set=self.group)
            return
        source = torch.distributed.get_global_rank(self.group, 0)
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, source, group=self.group)


def _parts(parameters: Mapping[str, torch.nn.Parameter], count: int) -> list[dict[str, torch.nn.Parameter]]:
    """Cut parameters into at most ``count`` parts of consecutive parameters and about equal size."""
    total = sum(each.numel() for each in parameters.values())
    parts: list[dict[str, torch.nn.Parameter]] = [{}]
    done = 0
    for name, each in parameters.items():
        if done >= total * len(parts) / count and len(parts) < count:
            parts.append({})
        parts[-1][name] = each
        done += each.numel()
    return parts


def _steps(folder: Path) -> list[Path]:
    """Return the folders of saved steps, oldest first."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def _complete(folder: Path) -> Path | None:
    """Return the folder of the newest step that all ranks have saved."""
    for place in reversed(_steps(folder)):
        files = list(place.glob("rank-*-of-*.pt"))
        if files and all(path.name.endswith(f"-of-{len(files)}.pt") for path in files):
            return place
    return None
