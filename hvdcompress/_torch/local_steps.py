"""The algorithm of local steps, over any network: DiLoCo, local SGD and Streaming DiLoCo.

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
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdcompress._torch import local_state as state
from hvdcompress._torch.compressor import TensorCompressor, averaged_by_ddp
from hvdcompress._torch.fragment import Fragment, parts_of
from hvdcompress._torch.optimizers import trains, unwrapped
from hvdcompress.engine.saving import checkpoint as files
from hvdcompress.engine.telemetry import log
from hvdcompress.method import Method
from hvdcompress.plan import Plan, plan_of

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  #: the outer optimizer of DiLoCo's paper (section 3.1)
AVERAGES = {"lr": 1.0, "momentum": 0.0, "nesterov": False}  #: an outer optimizer that averages the parameters
FEWEST, MOST = 10, 30  #: steps between exchanges that every="auto" chooses from; the guide has accuracies
MEASURED = 3  #: the exchange that is measured for it; the first ones compile and allocate
SHARE = 0.1  #: of the time of the steps that an exchange may take


class Ranks(Protocol):
    """Ranks that exchange parameters, with the collective that no Compressor has."""

    rank: int

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> TensorCompressor:
        """Return a Compressor of these parameters."""

    def largest(self, data: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor of uint8 over all ranks, by element; collective."""


class ParameterExchange(contextlib.AbstractContextManager["ParameterExchange", None]):
    """Base class of local steps. Arguments and attributes are those of :class:`hvdcompress.local_steps.LocalSteps`."""

    @torch.inference_mode(False)
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int | Literal["auto"],
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        outer: Mapping[str, Any] | Literal["auto"] | None = "auto",
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        warmup: int = 0,
        driver: str | None = None,
        process_group: Any = None,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ):
        self._chooses_every = every == "auto"
        if every == "auto":
            if fragments > 1 or delay:
                raise ValueError('every="auto" measures whole exchanges: give a number with fragments or delay')
            every = FEWEST
        elif isinstance(every, str) or every < 1:
            raise ValueError(f'every = {every!r} must be 1 or more, or "auto"')
        if not 1 <= fragments <= every:
            raise ValueError(f"fragments = {fragments} must be from 1 to every = {every}")
        if not 0 <= delay < every:
            raise ValueError(f"delay = {delay} must be from 0 to {every - 1}: less than the steps between exchanges")
        if not 0.0 <= mixing < 1.0:
            raise ValueError(f"mixing = {mixing} must be at least 0 and less than 1; with 1, ranks would never agree")
        if isinstance(model, DistributedDataParallel):
            raise ValueError("DistributedDataParallel exchanges gradients in every step: give the model without it")
        self.model = model
        self.optimizer = optimizer
        self._optimizers: list[torch.optim.Optimizer] = []  # those that train the parameters, as far as known
        self._unloaded: list[dict[str, Any]] = []  # saved states of optimizers that have not taken a step yet
        self.every = every
        self.delay = delay
        self.mixing = mixing
        self.warmup = warmup
        self.checkpoint = Path(checkpoint) if checkpoint else None
        self.steps = 0
        self._clock = time.perf_counter()  # for every="auto": when the device last ended the steps or an exchange
        self._lapped = 0  # steps at that time
        self._counted = 0  # steps that DDP has counted since the last call of step()
        self._ranks = self._ranks_of(driver, process_group)
        parameters = averaged_by_ddp(model, model.named_parameters())
        for tensor in (*parameters.values(), *averaged_by_ddp(model, model.named_buffers()).values()):
            _broadcast(self._ranks, tensor)
        trained = {name: each for name, each in parameters.items() if each.requires_grad}
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        self._frozen = {name: each for name, each in parameters.items() if not each.requires_grad}
        parts = parts_of(trained, fragments)
        offsets = [(number + 1) * every // len(parts) % every for number in range(len(parts))]
        self.fragments = [Fragment(lambda: parameters, *each) for each in zip(parts, offsets, strict=True)]
        anchors = [anchor for fragment in self.fragments for anchor in fragment.anchors.values()]
        self._chooses_outer = outer == "auto"
        self.outer = torch.optim.SGD(anchors, **(OUTER if outer == "auto" else AVERAGES if outer is None else outer))
        plan = plan_of("qsgd" if method == "auto" else method, **{"optimizer_momentum": "keep", **settings})
        self._has_residuals = any(
            each.feedback != "none" and each.optimizer_momentum == "keep" and (each.sparse or each.delay > 1)
            for each in plan.methods
        )
        if optimizer:
            self._add_optimizer(optimizer)
        schedule: dict[str, Any] = {
            "every": "auto" if self._chooses_every else every,
            "fragments": fragments,
            "delay": delay,
            "mixing": mixing,
        }
        schedule["warmup"] = warmup
        schedule["outer"] = dict(sorted(outer.items())) if isinstance(outer, Mapping) else outer
        for fragment in self.fragments:
            fragment.optimizer = self.outer
            fragment.compressor = self._ranks.compressor(plan, fragment.anchors)
            fragment.compressor._require_equal(local_steps=schedule)
        # Buffers that contain Inf or NaN from the beginning, such as attention masks, are left out
        if finite := [name for name, each in _buffers_of(model).items() if each.isfinite().all()]:
            buffers = Fragment(partial(_buffers_of, model), finite, offsets[-1])
            buffers.compressor = self._ranks.compressor(plan_of("none"), buffers.anchors)
            self.fragments.append(buffers)
        # Weights that the program has changed since the last step, e.g. by loading them, are no progress of training.
        # An embedding with max_norm changes its weight in the forward pass
        self._changed = False
        renormed = {id(each.weight) for each in model.modules() if getattr(each, "max_norm", None) is not None}
        self._watched = {name: each for name, each in trained.items() if id(each) not in renormed}
        self._versions = self._versions_now()
        self._names = {id(each): name for name, each in trained.items()}
        self._own: list[dict[str, torch.Tensor]] | None = None  # this rank's tensors, inside of synchronized()
        myself = weakref.ref(self)

        def of_own(call: Callable[[ParameterExchange, torch.optim.Optimizer], None]) -> Callable[..., None]:
            """Return a hook of all optimizers that calls a function for those that train the model."""

            def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                if (local := myself()) and trains(optimizer, local._names.keys()):
                    call(local, optimizer)

            return hook

        self._handles = [
            register_optimizer_step_pre_hook(of_own(ParameterExchange._before_optimizer)),
            register_optimizer_step_post_hook(of_own(lambda local, _: local._note_versions())),
        ]
        self._device = anchors[0].device
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        # One thread for all exchanges, so that they begin in one order on all ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdcompress")
        if self.checkpoint:
            with contextlib.suppress(FileNotFoundError):
                self.load(self.checkpoint)

    def _ranks_of(self, driver: str | None, group: Any) -> Ranks:
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and free the process groups. Call it when training has ended.

        Exchanges in flight are completed, but not applied.
        """
        for handle in self._handles:
            handle.remove()
        self._thread.shutdown()
        for compressor in self.compressors:
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
        self._require_own_parameters()
        self.steps += 1
        self._note_versions()
        is_warm_up = self.steps <= self.warmup
        begins = [each for each in self.fragments if (self.steps - self.warmup) % self.every == each.offset]
        is_measured = self._chooses_every and bool(begins) and self.steps - self.warmup <= MEASURED * FEWEST
        computing = self._lap() / (self.steps - self._lapped) if is_measured else 0.0
        is_due = bool(begins) or any(each.pending and each.due == self.steps for each in self.fragments)
        worked = is_warm_up or (is_due and self._find_changes())
        if worked:
            self._average()
        for fragment in self.fragments if not worked else ():
            if fragment in begins:
                self._begin(fragment, self.delay)
            if fragment.pending and fragment.due == self.steps:
                self._end(fragment, self.mixing)
                worked = True
        if is_measured:
            self._choose_every(computing, self._lap())
            self._lapped = self.steps
        if self.checkpoint and self.fragments[-1].due == self.steps and not (is_warm_up and self.steps % self.every):
            self.save(self.checkpoint)
        return worked

    def _lap(self) -> float:
        """Return the seconds since the last call, when the device has finished its work."""
        if self._stream:
            torch.cuda.synchronize(self._device)
        last, self._clock = self._clock, time.perf_counter()
        return self._clock - last

    def _choose_every(self, step: float, exchange: float) -> None:
        """Choose the steps between exchanges after the last measured one; collective.

        Args:
            step: seconds of a step on this rank, without exchanges.
            exchange: seconds of the exchange. A rank that begins it early waits for the others.
        """
        if self.steps - self.warmup < MEASURED * FEWEST:
            return
        # An outer optimizer with momentum needs no fewer steps to a target if exchanges are frequent; averages do
        fewest = MOST if self.outer.param_groups[0]["momentum"] else FEWEST
        wanted = min(max(math.ceil(exchange / (SHARE * step)), fewest), MOST)
        self.every = MOST - self._largest(MOST - wanted)  # of the rank that waited least: it has measured the exchange
        if self._ranks.rank == 0:
            log.info_once(
                f"local steps: an exchange takes {1e3 * exchange:.0f} ms, and a step {1e3 * step:.0f} ms, so "
                f"parameters are exchanged every {self.every} steps"
            )

    @torch.inference_mode(False)
    def synchronize(self) -> None:
        """Apply the results of exchanges in flight, and exchange all parameters now. Call it before evaluation.

        Afterwards all ranks have the same parameters. Without a step since the last exchange it is a no-op.
        """
        self._require_own_parameters()
        self._notice_changes()
        if self._find_changes():
            self._average()
        for fragment in self.fragments:
            if fragment.pending:
                self._end(fragment, self.mixing)
        for fragment in self.fragments:
            if fragment.agreed != self.steps:
                self._begin(fragment, 0)
                self._end(fragment, 0.0)

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Context manager for evaluating or saving the model: inside, all ranks have the same parameters.

        They are those after the last exchange. Nothing is exchanged, so one rank may use it alone. Afterwards each rank
        trains on with its own parameters, as if nothing had happened. Training inside raises RuntimeError.
        """
        if self._own:
            yield
            return
        changed = self._versions != self._versions_now()
        self._own = self._replace_by_anchors()
        try:
            yield
        finally:
            self._restore_own()
            if not changed:
                self._note_versions()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _replace_by_anchors(self) -> list[dict[str, torch.Tensor]]:
        """Move parameters and buffers to the anchors; return copies of their present values, for each fragment."""
        own = []
        for fragment in self.fragments:
            now = fragment.current()
            own.append({name: now[name].detach().clone() for name in fragment.anchors})
            fragment.pull(0.0)
        return own

    @torch.inference_mode(False)
    @torch.no_grad()
    def _restore_own(self) -> None:
        """Move parameters and buffers to the copies, unless a state was loaded meanwhile."""
        own, self._own = self._own, None
        for fragment, values in zip(self.fragments, own or (), strict=bool(own)):
            now = fragment.current()
            for name, value in values.items():
                now[name].copy_(value)

    def _require_own_parameters(self) -> None:
        """Raise RuntimeError inside of :meth:`synchronized`, at whose end changes of the parameters would be lost."""
        if self._own:
            raise RuntimeError(
                "local steps: the program trains or synchronizes inside of `with compressor.synchronized():`, where "
                "the model has the parameters of the last exchange; end the context first"
            )

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that trains the parameters.

        Raises:
            ValueError: the optimizer communicates in every step.
        """
        if hasattr(optimizer, "_requires_update"):
            raise ValueError("hvd.DistributedOptimizer exchanges gradients in every step: give a plain optimizer")
        if isinstance(optimizer, Joinable):
            raise ValueError("ZeroRedundancyOptimizer exchanges parameters in every step: give a plain optimizer")
        inner = unwrapped(optimizer)
        self._optimizers.append(inner)
        if self._chooses_outer and not isinstance(inner, torch.optim.SGD):
            # With AdamW, two small transformers end 0.36 and 0.41 bits worse with DiLoCo's (docs/guides/local-steps.md)
            for group in self.outer.param_groups:
                group.update(AVERAGES)
        if self._ranks.rank:
            return
        if self._chooses_outer:
            kind = "has momentum" if self.outer.param_groups[0]["momentum"] else "averages"
            log.info_once(f"local steps: the outer optimizer {kind}, because the inner one is {type(inner).__name__}")
        if self._has_residuals and self.outer.param_groups[0]["momentum"]:
            log.warn_once(
                "local steps: residuals act as momentum, and the outer optimizer adds its own, so training may "
                "diverge; use outer=None, or a method without error feedback, such as qsgd"
            )

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Optimizer pre-step hook: notice changes of the parameters, and load the optimizer's saved state."""
        self._require_own_parameters()
        if not any(each is unwrapped(optimizer) for each in self._optimizers):
            self._add_optimizer(optimizer)
            self._load_optimizer(optimizer)
        self._notice_changes()

    def _load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the next state that was saved, if there is one."""
        if self._unloaded:
            saved = self._unloaded.pop(0)
            # Without a given optimizer, the program saves and loads learning rates, which are equal on all ranks
            optimizer.load_state_dict(saved if self.optimizer else {**optimizer.state_dict(), "state": saved["state"]})

    def _versions_now(self) -> list[int]:
        """Return PyTorch's counts of in-place changes of the parameters."""
        return [each._version for each in self._watched.values()]

    def _note_versions(self) -> None:
        """Take all changes of the parameters so far for training."""
        self._versions = self._versions_now()

    def _notice_changes(self) -> None:
        """Notice parameters that were changed after the last step, unless they were restored after an exchange."""
        if self._versions != self._versions_now():
            self._changed |= any(
                fragment.agreed != self.steps or not torch.equal(self._watched[name], anchor)
                for fragment in self.fragments
                for name, anchor in fragment.anchors.items()
                if name in self._watched
            )

    def _find_changes(self) -> bool:
        """Return whether some rank's parameters were changed by the program; collective."""
        changed = bool(self._largest(self._changed))
        if changed and self._ranks.rank == 0:
            log.LOGGER.warning(
                "step %d: the program has changed the weights of some rank between two steps, such as by loading "
                "them; this exchange averages them uncompressed, without the outer optimizer",
                self.steps,
            )
        return changed

    def _largest(self, number: int) -> int:
        """Return the maximum of a number below 256 over all ranks; collective."""
        with self.fragments[0].compressor.watchdog.rendezvous("every rank's exchange"):
            return int(self._ranks.largest(torch.tensor([number], device=self._device).byte()))

    def _average(self) -> None:
        """Average all tensors uncompressed, without the outer optimizer. Results in flight are dropped."""
        for fragment in self.fragments:
            if fragment.pending:
                fragment.pending.result()
            self._begin(fragment, 0, compressed=False)
            self._end(fragment, 0.0, compressed=False)
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
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        fragment.pending = self._thread.submit(self._exchange, fragment, compressed)

    def _exchange(self, fragment: Fragment, compressed: bool) -> None:
        """Exchange a fragment; runs in the thread."""
        with contextlib.nullcontext() if compressed else fragment.compressor.paused(), torch.cuda.stream(self._stream):
            fragment.compressor._reduce_in_place(fragment.gradients)
            if self._stream:
                self._stream.synchronize()

    def _end(self, fragment: Fragment, mixing: float, compressed: bool = True) -> None:
        """Apply the result of an exchange."""
        if not fragment.end(compressed, mixing) and self._ranks.rank == 0:
            log.LOGGER.warning(
                "step %d: a parameter or buffer is Inf or NaN on some rank; all ranks go on from the last exchange",
                self.steps,
            )
        if not mixing:
            fragment.agreed = self.steps
        self._note_versions()

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as bytes, ``{"rank-3-of-4": …}``, as a Compressor does.

        It has steps, model, all optimizers, anchors, residuals, and the results of exchanges in flight, for which it
        waits.

        Raises:
            TypeError: an optimizer has a value that :meth:`load` would refuse, because it could run code.
        """
        return files.by_rank(self._state())

    def _state(self) -> dict[str, Any]:
        if self._own:
            self._restore_own()
            saved = self._state()
            self._own = self._replace_by_anchors()
            return saved
        for fragment in self.fragments:
            if fragment.pending:
                fragment.pending.result()
        own = {
            "steps": self.steps,
            "counted": self._counted,
            "every": self.every,
            "model": self.model.state_dict(),
            "optimizers": [state.plain(each.state_dict(), "optimizer") for each in self._optimizers],
            "outer": state.plain(self.outer.state_dict(), "outer"),
            "fragments": [
                {"agreed": each.agreed, "due": each.due, "gradients": each.gradients, "anchors": each.anchors}
                for each in self.fragments
            ],
        }
        return state.joined(own, [compressor._state() for compressor in self.compressors])

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, or model, or was saved by a Compressor.
        """
        ranks = self.compressors[0].rank_state
        if "format" not in saved:
            saved = files.of_rank(saved, ranks.rank, ranks.world_size, ranks.nodes)
        own = state.own_of(saved)
        for fragment, head, before in zip(self.fragments, saved["fragments"], own["fragments"], strict=True):
            fragment.compressor.load_state_dict(state.of_fragment(saved, head, fragment.anchors))
            fragment.agreed = before["agreed"]
            fragment.due = before["due"]
            fragment.gradients = {name: each.to(self._device) for name, each in before["gradients"].items()}
            fragment.pending = self._thread.submit(lambda: None) if fragment.gradients else None  # it has ended
            for name, anchor in fragment.anchors.items():
                anchor.copy_(before["anchors"][name])
        self.steps = own["steps"]
        self._counted = own["counted"]
        if self._chooses_every:
            self.every = own.get("every", self.every)
        self._lapped = self.steps
        self._lap()
        self.model.load_state_dict(own["model"])
        self._unloaded = own["optimizers"]
        # Others are loaded in their first step: the framework may load those of rank 0 after this call
        self._optimizers = self._optimizers[:1] if self.optimizer else []
        for optimizer in self._optimizers:
            self._load_optimizer(optimizer)
        self.outer.load_state_dict(own["outer"])
        if saved.get("resharded"):
            # Parameters between exchanges are those of ranks that no longer exist
            for fragment in self.fragments:
                fragment.pull(0.0)
        self._own = None
        self._changed = False
        self._note_versions()

    def save(self, folder: str | Path) -> Path:
        """Write the state of this rank to its own file in a folder. Call it on every rank, after the same step.

        The folder must be one that all ranks see. It keeps the last two steps.

        Returns:
            The path of the file.

        Raises:
            OSError: writing failed, for example because the disk is full. Earlier files are unchanged.
            TypeError: as for :meth:`state_dict`.
        """
        return files.save(self._state(), folder)

    def load(self, folder: str | Path) -> None:
        """Restore the newest state that all ranks have saved in a folder. Call it on every rank.

        With another number of ranks, residuals are re-sharded, and all ranks go on from the last anchor, with the state
        that the inner optimizer had on rank 0.

        Raises:
            FileNotFoundError: the folder has no step that all ranks have saved.
            ValueError: the state belongs to another model, or an unreleased version has saved it.
        """
        if old := sorted(Path(folder).glob("step-*/rank-0-of-*.pt")):
            raise ValueError(
                f"an unreleased version has saved {old[-1]}, and only that version can read all of it: load its "
                "weights, torch.load(path, weights_only=True)['model'], and go on with another folder"
            )
        ranks = self.compressors[0].rank_state
        self.load_state_dict(files.load(folder, ranks.rank, ranks.world_size, ranks.nodes, state.KIND))


def _buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers, such as those of batch normalization, as they are now."""
    buffers = averaged_by_ddp(model, model.named_buffers())
    return {name: each.detach() for name, each in buffers.items() if each.is_floating_point()}


def _broadcast(ranks: Ranks, tensor: torch.Tensor) -> None:
    """Copy a tensor from rank 0 to all ranks, as bytes, because Horovod does not know every dtype."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    if ranks.rank:
        data.zero_()
    if len(data):
        tensor.detach().copy_(ranks.largest(data).view(tensor.dtype).view(tensor.shape))
