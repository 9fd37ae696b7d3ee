"""Local steps: each rank trains alone, and the ranks exchange their parameters every ``every`` steps, compressed.

    from hvdcompress.local_steps import LocalSteps

    local = LocalSteps(model, optimizer, every=30, method="qsgd")       # on every rank; no DDP wrapper
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        local.step()                                                    # exchanges in every 30th call

An exchange averages the *pseudo-gradient*, the parameters at the last exchange (the *anchor*) minus the parameters now,
by any method or plan, with its error feedback. An outer optimizer, SGD with Nesterov momentum, then updates the anchor,
from which all ranks go on (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1). ``outer=None`` sets the
parameters to their average instead (local SGD: Stich 2019, arXiv 1805.09767).

If a program changes the parameters between two steps, for example by loading weights, the next exchange averages them
uncompressed, without the outer optimizer, for which the change would be progress of the training.

With ``fragments`` and ``delay``, a part of the parameters is exchanged at a time, while training goes on (Streaming
DiLoCo: Douillard et al. 2025, arXiv 2501.18512, algorithm 2).
"""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress._torch.compressor import TensorCompressor, plain_name
from hvdcompress._torch.optimizers import unwrapped
from hvdcompress.engine.telemetry import log
from hvdcompress.method import Method
from hvdcompress.parts import momentum
from hvdcompress.plan import Plan, plan_of

PLAIN = (type(None), bool, int, float, complex, str, bytes)
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  #: the outer optimizer of DiLoCo's paper (section 3.1)


class _Buffers:
    """The floating-point buffers of a model, such as those of batch normalization, which are averaged uncompressed.

    Buffers that contain Inf or NaN from the beginning, such as attention masks, are left out.

    Args:
        model: the model.

    Attributes:
        anchors: the buffers at the last exchange, by name; equal on all ranks.
        values: the buffers in flight by name; their averages after the exchange.
        compressor: averages them; None if there are none.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.anchors = {name: each.clone() for name, each in self._now().items() if each.isfinite().all()}
        self.values: dict[str, torch.Tensor] = {}
        self.compressor: TensorCompressor | None = None

    def _now(self) -> dict[str, torch.Tensor]:
        # A module may have replaced a buffer by another tensor since the last exchange
        named = self._model.named_buffers()
        return {plain_name(name): each.detach() for name, each in named if each.is_floating_point()}

    def begin(self) -> None:
        """Copy the buffers, which training may change during the exchange."""
        now = self._now()
        self.values = {name: now[name].clone() for name in self.anchors}

    def end(self, is_finite: bool) -> None:
        """Set the buffers to their averages, or to those of the last exchange."""
        if is_finite:
            self.anchors = self.values
        self.values = {}
        self.pull()

    def pull(self) -> None:
        """Set the buffers to those of the last exchange."""
        now = self._now()
        for name, anchor in self.anchors.items():
            now[name].copy_(anchor)


class Fragment:
    """Some parameters of the model, which are exchanged together.

    Args:
        parameters: the parameters of the model by name.
        offset: the fragment's exchanges begin at steps t with t mod ``every`` = offset.

    Attributes:
        anchors: the parameters at the last exchange, by name; equal on all ranks.
        compressor: exchanges the pseudo-gradients.
        gradients: the pseudo-gradients in flight by name; their averages after the exchange.
        buffers: the buffers that are averaged with this fragment; None for all fragments but the last.
        pending: the exchange in flight; None if there is none.
        due: the step in which its result is applied.
        agreed: the step after which the parameters were equal on all ranks.
        adapts: whether the momentum of the outer optimizer is adapted.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], offset: int):
        self.parameters = parameters
        self.offset = offset
        self.anchors = {name: torch.nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
        self.compressor: TensorCompressor
        self.gradients: dict[str, torch.Tensor] = {}
        self.buffers: _Buffers | None = None
        self.pending: Future[None] | None = None
        self.due = 0
        self.agreed = 0
        self.adapts = False

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the pseudo-gradients."""
        self.gradients = {name: anchor - self.parameters[name] for name, anchor in self.anchors.items()}
        if self.buffers:
            self.buffers.begin()

    def exchange(self, compressed: bool) -> None:
        """Average the pseudo-gradients and the buffers over all ranks."""
        with contextlib.nullcontext() if compressed else self.compressor.paused():
            self.compressor._reduce_in_place(self.gradients)
        if not self.adapts:
            self.compressor.rank_state.late = {}
        if self.buffers and self.buffers.compressor:
            self.buffers.compressor.allreduce(self.buffers.values, out=self.buffers.values)

    @torch.no_grad()
    def end(self, outer: torch.optim.Optimizer | None, mixing: float) -> bool:
        """Wait for the exchange, let the outer optimizer update the anchor, and move the parameters to it.

        Args:
            outer: the outer optimizer; None to average the parameters.
            mixing: the parameters become ``mixing`` times themselves plus (1 - ``mixing``) times the anchor.

        Returns:
            False if a parameter or a buffer of some rank was Inf or NaN: then they return to the last exchange.
        """
        assert self.pending is not None
        pending = self.pending
        self.pending = None
        pending.result()
        # After a NaN on any rank, all averages are NaN on all ranks
        averages = [*self.gradients.values(), *(self.buffers.values.values() if self.buffers else ())]
        is_finite = all(bool(each.isfinite().all()) for each in averages)
        if is_finite:
            # The outer optimizer updates the anchors that have a gradient: only those of this fragment
            for name, anchor in self.anchors.items():
                anchor.grad = self.gradients[name] if outer else None
                if outer is None:
                    anchor.sub_(self.gradients[name])
            if outer:
                outer.step()
            for anchor in self.anchors.values():
                anchor.grad = None
        self.gradients = {}
        self.pull(mixing if is_finite else 0.0)
        if self.buffers:
            self.buffers.end(is_finite)
        return is_finite

    @torch.no_grad()
    def pull(self, mixing: float) -> None:
        """Move the parameters to the anchor; ``mixing`` is the share of their present values."""
        for name, anchor in self.anchors.items():
            if mixing:
                self.parameters[name].lerp_(anchor, 1.0 - mixing)
            else:
                self.parameters[name].copy_(anchor)


class LocalSteps:
    """Exchanges the parameters of a model every few steps.

    Constructing it is collective: all ranks must do it. It broadcasts parameters and buffers from rank 0.

    Args:
        model: the model, not wrapped in ``DistributedDataParallel``. Its parameters that require a gradient are
            exchanged. Floating-point buffers, such as those of batch normalization, are averaged in each exchange.
        optimizer: the inner optimizer. Its state stays local; it is saved with the rest.
        every: steps from one exchange of a parameter to the next.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        outer: ``lr``, ``momentum`` and ``nesterov`` of the outer SGD; None to average the parameters.
        fragments: number of parts of the model. One of them is exchanged every ``every / fragments`` steps.
        delay: steps from the beginning of an exchange to the use of its result. During these steps, training goes on.
        mixing: share of a rank's own parameters when a delayed result is applied (α in Streaming DiLoCo).
        warmup: number of first steps after which parameters are averaged in every step, uncompressed.
        driver: "torch" for torch.distributed or "horovod"; by default the one that is initialized.
        process_group: a torch.distributed process group or a Horovod process set; by default all ranks.
        checkpoint: a folder that all ranks see. The state is loaded from there if there is one, and saved after each
            exchange; during the warm-up, every ``every`` steps.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``nodes``, …). The outer optimizer's
            momentum is kept, unless ``optimizer_momentum`` is set: here, in the plan's dict, or to another value than
            "adapt" in a rule, a plan or a method.

    Attributes:
        steps: number of calls of :meth:`step`.
        outer: the outer optimizer.
        fragments: the parts of the model.

    Raises:
        ValueError: an argument is out of range, the plan is wrong, or neither torch.distributed nor Horovod is
            initialized.
    """

    @torch.inference_mode(False)
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
        if isinstance(model, DistributedDataParallel):
            raise ValueError("DistributedDataParallel exchanges gradients in every step: give the model without it")
        if hasattr(optimizer, "_requires_update"):
            raise ValueError("hvd.DistributedOptimizer exchanges gradients in every step: give a plain optimizer")
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.delay = delay
        self.mixing = mixing
        self.warmup = warmup
        self.checkpoint = Path(checkpoint) if checkpoint else None
        self.steps = 0
        self._network = _Network(driver, process_group)
        parameters = {plain_name(name): each for name, each in model.named_parameters()}
        self._network.broadcast({**parameters, **dict(model.named_buffers())})
        trained = {name: each for name, each in parameters.items() if each.requires_grad}
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        self._frozen = {name: each for name, each in parameters.items() if not each.requires_grad}
        parts = _parts(trained, fragments)
        self.fragments = [Fragment(part, (n + 1) * every // len(parts) % every) for n, part in enumerate(parts)]
        anchors = [anchor for fragment in self.fragments for anchor in fragment.anchors.values()]
        self.outer = torch.optim.SGD(anchors, **({"lr": 1.0} if outer is None else outer))
        plan = plan_of(method, **settings)
        schedule = {"every": every, "fragments": fragments, "delay": delay, "mixing": mixing, "warmup": warmup}
        momentum_is_set = "optimizer_momentum" in {**(method if isinstance(method, Mapping) else {}), **settings}
        momentum_is_set |= any(each.optimizer_momentum != "adapt" for each in plan.methods)
        for fragment in self.fragments:
            fragment.compressor = self._network.compressor(plan, fragment.anchors)
            fragment.compressor._require_equal(local_steps={**schedule, "outer": outer and dict(sorted(outer.items()))})
            fragment.adapts = momentum_is_set
            if momentum_is_set:
                continue
            fragment.compressor.is_adapted = True  # or rather: it is kept as it is
            fragment.compressor.rank_state.tracks_ages = False
            if any(map(momentum.adapts, plan.methods)) and self.outer.defaults["momentum"] and not self._network.rank:
                log.warn_once(
                    "local steps: residuals act as momentum, and the outer optimizer adds its own, so training may "
                    "diverge; use outer=None, or a method without error feedback, such as qsgd"
                )
        # Weights that the program has changed since the last step, e.g. by loading them, are no progress of training.
        # An embedding with max_norm changes its weight in the forward pass
        self._changed = False
        self._renormed = {id(each.weight) for each in model.modules() if getattr(each, "max_norm", None) is not None}
        self._versions = self._versions_now()
        myself = weakref.ref(self)
        inner = unwrapped(optimizer)
        inner.register_step_pre_hook(lambda *_: (local := myself()) and local._notice_changes())  # type: ignore[func-returns-value, arg-type]
        inner.register_step_post_hook(lambda *_: (local := myself()) and local._note_versions())  # type: ignore[func-returns-value, arg-type]
        self._buffers = self.fragments[-1].buffers = _Buffers(model)
        if self._buffers.anchors:
            named = {name: torch.nn.Parameter(each) for name, each in self._buffers.anchors.items()}
            self._buffers.compressor = self._network.compressor(plan_of("none"), named)
        device = anchors[0].device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One thread for all exchanges, so that they begin in one order on all ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdcompress")
        if self.checkpoint and (place := self._newest(self.checkpoint)):
            self._load(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and free the process groups. Call it when training has ended.

        Exchanges in flight are completed, but not applied.
        """
        self._thread.shutdown()
        for compressor in (*self.compressors, self._buffers.compressor):
            getattr(compressor, "close", lambda: None)()

    @property
    def compressors(self) -> list[TensorCompressor]:
        """The Compressor of each fragment, for ``summary()`` and ``ledger``."""
        return [fragment.compressor for fragment in self.fragments]

    # -- a step ---------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def step(self) -> bool:
        """Count a step of the inner optimizer, and exchange what is due. Call it after ``optimizer.step()``.

        Returns:
            Whether the result of an exchange was applied.

        Raises:
            PeerError: a rank failed, or the ranks disagree; on every rank. Under Horovod, HorovodInternalError if a
                rank is gone.
            ValueError: a parameter has been unfrozen, which is not exchanged.
        """
        self.steps += 1
        self._note_versions()
        if self.steps <= self.warmup:
            for fragment in self.fragments:
                self._average(fragment)
            if self.checkpoint and self.steps % self.every == 0:
                self.save(self.checkpoint)
            return True
        begins = [each for each in self.fragments if (self.steps - self.warmup) % self.every == each.offset]
        ends = any(fragment.pending and fragment.due == self.steps for fragment in self.fragments)
        worked = bool(begins or ends) and self._average_changed()
        for fragment in self.fragments if not worked else ():
            if fragment in begins:
                self._begin(fragment, self.delay)
            if fragment.pending and fragment.due == self.steps:
                self._end(fragment, self.mixing if self.delay else 0.0, self.outer)
                worked = True
        if self.checkpoint and self.fragments[-1].due == self.steps:
            self.save(self.checkpoint)
        return worked

    @torch.inference_mode(False)
    def synchronize(self) -> None:
        """Apply the results of exchanges in flight, and exchange all parameters now. Call it before evaluation.

        Afterwards all ranks have the same parameters. Without a step since the last exchange it is a no-op.
        """
        self._notice_changes()
        self._average_changed()
        for fragment in self.fragments:
            if fragment.pending:
                self._end(fragment, self.mixing, self.outer)
        stale = [fragment for fragment in self.fragments if fragment.agreed != self.steps]
        for fragment in stale:
            self._begin(fragment, 0)
            self._end(fragment, 0.0, self.outer)

    def _versions_now(self) -> list[int]:
        """Return PyTorch's counts of in-place changes of the parameters."""
        trained = [each for fragment in self.fragments for each in fragment.parameters.values()]
        return [each._version for each in trained if id(each) not in self._renormed]

    def _note_versions(self) -> None:
        """Take all changes of the parameters so far for training."""
        self._versions = self._versions_now()

    def _notice_changes(self) -> None:
        """Notice parameters that were changed after the last step, unless they were restored after an exchange."""
        if self._versions != self._versions_now():
            self._changed |= any(
                fragment.agreed != self.steps or not torch.equal(fragment.parameters[name], anchor)
                for fragment in self.fragments
                for name, anchor in fragment.anchors.items()
            )

    def _average_changed(self) -> bool:
        """Average all parameters if some rank's were changed by the program. Return whether they were; collective."""
        with self.fragments[0].compressor.watchdog.rendezvous("every rank's exchange"):
            changed = self._network.any(self._changed, self.fragments[0].anchors)
        if changed and self._network.rank == 0:
            log.LOGGER.warning(
                "step %d: the program has changed the weights of some rank after local.step(), such as by loading "
                "them; this exchange averages them uncompressed, without the outer optimizer",
                self.steps,
            )
        for fragment in self.fragments if changed else ():
            if fragment.pending:  # a result for the earlier parameters
                fragment.pending.result()
            self._average(fragment)
        return changed

    def _average(self, fragment: Fragment) -> None:
        """Average the parameters of a fragment uncompressed, without the outer optimizer."""
        self._begin(fragment, 0, compressed=False)
        self._end(fragment, 0.0, outer=None)
        self._changed = False

    def _begin(self, fragment: Fragment, delay: int, compressed: bool = True) -> None:
        """Begin the exchange of a fragment, whose result will be applied after ``delay`` steps.

        Raises:
            ValueError: a frozen parameter has been unfrozen.
        """
        if unfrozen := [name for name, each in self._frozen.items() if each.requires_grad]:
            raise ValueError(
                f"{log.first_names(unfrozen)}: frozen when LocalSteps was made, so not exchanged; make LocalSteps again"
            )
        fragment.begin()
        fragment.due = self.steps + delay
        ready = self._stream and torch.cuda.current_stream(self._stream.device).record_event()
        fragment.pending = self._thread.submit(self._exchange, fragment, compressed, ready)

    def _exchange(self, fragment: Fragment, compressed: bool, ready: Any) -> None:
        """Exchange a fragment; runs in the thread.

        Args:
            fragment: the fragment.
            compressed: False to average the parameters uncompressed.
            ready: on a GPU, the CUDA event that marks the pseudo-gradients as computed.
        """
        with torch.cuda.stream(self._stream):
            if ready:
                self._stream.wait_event(ready)
            fragment.exchange(compressed)
            if self._stream:
                self._stream.synchronize()

    def _end(self, fragment: Fragment, mixing: float, outer: torch.optim.Optimizer | None) -> None:
        """Apply the result of an exchange."""
        if not fragment.end(outer, mixing) and self._network.rank == 0:
            log.LOGGER.warning(
                "step %d: a parameter or buffer is Inf or NaN on some rank; all ranks go on from the last exchange",
                self.steps,
            )
        if not mixing:
            fragment.agreed = self.steps
        self._note_versions()

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: steps, model, both optimizers, anchors, residuals, and exchanges in flight.

        It waits for exchanges in flight, and contains their results. Ranks differ, so save one file per rank.

        Raises:
            TypeError: an optimizer has a value that :meth:`load` would refuse, because it could run code.
        """
        in_flight = {}
        for number, fragment in enumerate(self.fragments):
            if fragment.pending:
                fragment.pending.result()
                in_flight[number] = {
                    "due": fragment.due,
                    "gradients": {name: each.clone() for name, each in fragment.gradients.items()},
                    "buffers": {name: each.clone() for name, each in self._buffers.values.items()},
                }
        return {
            "steps": self.steps,
            "agreed": [fragment.agreed for fragment in self.fragments],
            "model": self.model.state_dict(),
            "optimizer": _plain(self.optimizer.state_dict(), "optimizer"),
            "anchors": {n: anchor.detach() for f in self.fragments for n, anchor in f.anchors.items()},
            "buffers": self._buffers.anchors,
            "outer": _plain(self.outer.state_dict(), "outer"),
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
        for name, buffer in self._buffers.anchors.items():
            buffer.copy_(saved["buffers"][name])
        for number, fragment in enumerate(self.fragments):
            fragment.pending = None
            fragment.agreed = saved["agreed"][number]
            for name, anchor in fragment.anchors.items():
                anchor.copy_(saved["anchors"][name])
            if result := saved["in_flight"].get(number):
                fragment.due = result["due"]
                fragment.gradients = {n: each.to(fragment.anchors[n].device) for n, each in result["gradients"].items()}
                if fragment.buffers:
                    anchors = fragment.buffers.anchors
                    fragment.buffers.values = {n: each.to(anchors[n].device) for n, each in result["buffers"].items()}
                fragment.pending = Future()
                fragment.pending.set_result(None)
        self._changed = False
        self._note_versions()

    def save(self, folder: str | Path) -> None:
        """Write the state of this rank into a folder of this step. Call it on every rank, after the same step.

        The folder must be one that all ranks see. Steps before the newest that all ranks have saved are removed.
        """
        rank = self._network.rank
        place = Path(folder) / f"step-{self.steps}"
        state = self.state_dict()
        del state["compressors"]
        for number, compressor in enumerate(self.compressors):
            compressor.save(place / f"fragment-{number}")
        unfinished = place / f"rank-{rank}.tmp"
        torch.save(state, unfinished)
        unfinished.replace(place / f"rank-{rank}-of-{self._network.world_size}.pt")
        if rank == 0 and (newest := _complete(Path(folder))):
            for step in _steps(Path(folder)):
                if step < _step_of(newest):
                    _remove(Path(folder) / f"step-{step}")

    @torch.inference_mode(False)
    def load(self, folder: str | Path) -> None:
        """Restore the newest state that all ranks have saved in a folder. Call it on every rank.

        With another number of ranks, residuals are re-sharded, and all ranks go on from the last anchor. A rank that
        did not exist before takes over the state of the inner optimizer from another rank.

        Raises:
            FileNotFoundError: the folder has no step that all ranks have saved.
            ValueError: the state belongs to another model.
        """
        place = self._newest(Path(folder))
        if place is None:
            raise FileNotFoundError(f"{folder} has no step that all ranks have saved")
        self._load(place)

    def _newest(self, folder: Path) -> Path | None:
        """Return the folder of the newest step that all ranks have saved, as rank 0 finds it."""
        step = torch.tensor(-1, device=next(self.model.parameters()).device)
        if self._network.rank == 0 and (place := _complete(folder)):
            step.fill_(_step_of(place))
            for later in _steps(folder):
                if later > step:  # a killed run has left it incomplete
                    _remove(folder / f"step-{later}")
        self._network.broadcast({"step": step})
        return folder / f"step-{step.item()}" if step >= 0 else None

    def _load(self, place: Path) -> None:
        """Restore the state from the folder of a step."""
        before = _num_ranks(place)
        saved = torch.load(
            place / f"rank-{self._network.rank % before}-of-{before}.pt", map_location="cpu", weights_only=True
        )
        for number, compressor in enumerate(self.compressors):
            compressor.load(place / f"fragment-{number}")
        self._restore(saved)
        if before != self._network.world_size:
            # Parameters between exchanges are those of ranks that no longer exist
            for fragment in self.fragments:
                fragment.pull(0.0)
            self._buffers.pull()


def _plain(value: Any, key: str) -> Any:
    """Return the state of an optimizer with NumPy's numbers as Python's, so that ``torch.load`` accepts the file.

    Raises:
        TypeError: there is an object that it does not accept. The message has its key.
    """
    if isinstance(value, Mapping):
        return {name: _plain(each, f"{key}[{name!r}]") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_plain(each, f"{key}[{number}]") for number, each in enumerate(value)])
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if not isinstance(value, torch.Tensor | torch.dtype | torch.device) and type(value) not in PLAIN:
        raise TypeError(f"{key} is {value!r:.60}, of {type(value)}: it cannot be saved; give a number, text or tensor")
    return value


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
            self.root = self.group.ranks[0]
        else:
            self.group = group or torch.distributed.group.WORLD
            self.rank = torch.distributed.get_rank(self.group)
            if self.rank < 0:
                raise ValueError("this rank is not in the process group")
            self.world_size = torch.distributed.get_world_size(self.group)
            self.root = torch.distributed.get_global_rank(self.group, 0)

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> TensorCompressor:
        """Return a Compressor of these parameters."""
        if self.is_horovod:
            from hvdcompress.horovod.torch import Compressor as HorovodCompressor

            return HorovodCompressor(plan, parameters.items(), process_set=self.group)
        from hvdcompress.ddp import Compressor

        return Compressor(plan, parameters.items(), process_group=self.group)

    def any(self, flag: bool, like: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the flag is set on some rank; collective.

        Args:
            flag: this rank's flag.
            like: tensors on the device of the collectives.

        Raises:
            PeerLost: the process group has failed. Under Horovod, HorovodInternalError.
        """
        tensor = torch.tensor(int(flag), device=next(iter(like.values())).device)
        if self.is_horovod:
            import horovod.torch as hvd

            return bool(hvd.allreduce(tensor, op=hvd.Max, name="hvdcompress.local_steps", process_set=self.group))
        from hvdcompress.ddp.transport import peer_lost

        try:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise peer_lost(self.rank, error) from error
        return bool(tensor)

    @torch.no_grad()
    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors from rank 0 to all ranks, as bytes, because Horovod does not know every dtype."""
        for name, tensor in tensors.items():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if not len(data):
                continue
            if self.is_horovod:
                import horovod.torch as hvd

                hvd.broadcast_(data, self.root, name=f"hvdcompress.local_steps.{name}", process_set=self.group)
            else:
                torch.distributed.broadcast(data, self.root, group=self.group)
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


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


def _steps(folder: Path) -> list[int]:
    """Return the saved steps, in ascending order. Other folders of such a name are not ours, and stay."""
    return sorted(_step_of(path) for path in folder.glob("step-*") if (path / "fragment-0").is_dir())


def _remove(place: Path) -> None:
    """Remove a saved step. Files of others in the same folder stay."""
    for path in place.glob("fragment-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in place.glob("rank-*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        place.rmdir()


def _step_of(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _num_ranks(place: Path) -> int:
    """Return the number of ranks that have saved a step; 0 if some have not."""
    # A run that was killed here may have left files of another number of ranks
    counts = Counter(int(path.stem.rpartition("-")[2]) for path in place.glob("rank-*-of-*.pt"))
    return max((world_size for world_size, count in counts.items() if count == world_size), default=0)


def _complete(folder: Path) -> Path | None:
    """Return the folder of the newest step that all ranks have saved."""
    places = [folder / f"step-{step}" for step in reversed(_steps(folder))]
    return next((place for place in places if _num_ranks(place)), None)
