"""The DDP driver: any method as a communication hook of ``DistributedDataParallel``.

DDP calls its hook with a bucket of gradients when these are there, in one order on all ranks, and wants a future of the
reduced bucket. The hook only hands the bucket to a thread, one for each Compressor, that does all else in the order in
which buckets come: so every rank starts its collectives in the same order, and they overlap with the backward pass.
Units of exchange are the plan's buckets, and state goes by parameter name: DDP's own buckets do not matter.
``docs/drivers.md`` says more.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from hvdcompress._torch.compressor import TensorCompressor
from hvdcompress._torch.optimizers import Optimizers
from hvdcompress.ddp.transport import ProcessGroupTransport, joined
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.step import Agree, Step
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.method import Method
from hvdcompress.plan import IN_ORDER, Plan, plan_of


@dataclass(eq=False)
class Arrival:
    """A bucket of DDP's that has come.

    Attributes:
        last: it is the step's last one.
        buffer: its flat memory, to which results are written.
        future: what the hook has returned; None of a backward pass that was cut short.
        gradients: views of the buffer by parameter name, in the parameters' layouts.
        used: the parameters that had a gradient up to now in this backward pass.
        there: on a GPU, the event after which the gradients are there.
        error: what was wrong with it.
    """

    last: bool
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor] | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    there: Any = None
    error: Exception | None = None


class Compressor(TensorCompressor):
    """One model's compression; :func:`hvdcompress.ddp.attach` makes it.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        named_parameters: names and parameters of the model, without DDP's ``module.``. State is kept by name.
        process_group: the group that DDP uses (default: all ranks).
        loss_scale: a number, or a function such as ``scaler.get_scale``, by which the loss was multiplied;
            residuals are kept unscaled, so it may change between steps.
        optimizer: the optimizer, or several, whose momentum is adapted where error feedback delays gradients. Without
            it, an optimizer is found when it takes its first step. "auto" sets beta1 of Adam and its relatives to 0.
        ops: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: what each tensor gets.
        ledger: bytes and seconds so far, on this rank. Besides the tensors it has "status", 64 bytes per step, and
            "lengths", 8 bytes per all-gather whose lengths are not known from before.
        parameters: the parameters by name.
        used: names of the parameters that had a gradient in this backward pass; None where DDP does not look for
            unused ones.

    Raises:
        ValueError: the plan is wrong; two parameters have one name; the process group is not initialized; a Compressor
            under Horovod has one of the parameters.
    """

    driver = "DistributedDataParallel"
    grouping = IN_ORDER

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        process_group: Any = None,
        loss_scale: float | Callable[[], float] = 1.0,
        optimizer: Optimizers | None = None,
        ops: str = "auto",
        **settings: Any,
    ):
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() before making a Compressor")
        if isinstance(method, TensorCompressor):
            raise ValueError(
                f"a Compressor under {method.driver} cannot be attached: give the method and its settings, or the plan"
            )
        self._parent = process_group or dist.group.WORLD
        rank = dist.get_rank(self._parent)
        world = dist.get_world_size(self._parent)
        super().__init__(plan_of(method, **settings), rank, world, named_parameters, loss_scale, ops)
        if optimizer is not None:
            self.use_optimizer(optimizer)
        self.used: set[str] | None = None
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._transport: ProcessGroupTransport | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdcompress")
        self._arrivals: SimpleQueue[Arrival] | None = None  # of the step under way
        self._failure: Exception | None = None  # of the step that has ended, until it is raised
        self._step: Step | None = None  # the last one
        self._stream: Any = None  # of a GPU, the thread's
        self._is_plain = False  # the step under way goes without the engine
        self._began = 0.0  # when the step's first bucket came
        self._came = 0.0  # when its last bucket came

    def close(self) -> None:
        """Free its process group. Nothing may be under way."""
        self._thread.shutdown()
        if self._transport:
            self._transport.close()

    def _is_under_way(self) -> bool:
        return self._arrivals is not None

    def _waits_for(self) -> str | None:
        return self._step.waits_for() if self._step and self._is_under_way() else None

    # -- DDP's side, in the thread of the backward pass --------------------------------------------------------

    def receive(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket of DDP's; its future has the reduced one when the step is at its end.

        An error of the step is raised by ``backward()`` when DDP has finished its own part, so that both can go on.
        """
        buffer = bucket.buffer()
        if bucket.index() == 0:
            # Ranks that compare parameters do so in the engine
            tries = self.local.fallback.uncompressed and not self.local.paused
            self._is_plain = tries and not self.plan.verify_every
            self.cut_short()
            self._began = time.perf_counter()
            if self._is_plain:
                self.local.begin_round()  # discard() has nothing to take back
                _at_the_end_of_backward(self._end_uncompressed)
            else:
                self._begin(buffer)
        if bucket.is_last():
            self._came = time.perf_counter()
        if self._is_plain:
            return self._all_reduce(bucket)
        assert self._arrivals is not None
        devices = [buffer.device] if buffer.is_cuda else None
        arrival = Arrival(bucket.is_last(), buffer, torch.futures.Future(devices=devices))
        try:
            arrival.gradients = self._gradients(bucket)
            if buffer.is_cuda:
                arrival.there = torch.cuda.current_stream(buffer.device).record_event()
            if self.used is not None and arrival.last:
                arrival.used = frozenset(self.used)
                self.used.clear()
        except Exception as error:  # an exception here would leave the other ranks alone
            arrival.error = error
        self._arrivals.put(arrival)
        assert arrival.future is not None
        return arrival.future

    def _all_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a DDP bucket as DDP itself does."""
        buffer = bucket.buffer()
        num_bytes: Counter[str] = Counter()  # by the name of our bucket
        for parameter in bucket.parameters():
            ours, _ = self._place[self._names[id(parameter)]]
            num_bytes[ours.spec.name] += parameter.numel() * buffer.element_size()
        for observer in self.local.observers:
            for name, count in num_bytes.items():
                observer.begun(self.local.rank, name, count)
                observer.sent(self.local.rank, name, Sent("AllReduce", None, count))
        self.ledger.steps += bucket.is_last()
        work = dist.all_reduce(buffer.div_(self.local.world), group=self._parent, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _end_uncompressed(self) -> None:
        """Clip the averaged gradients, once DDP has written all of them, and note what the step took."""
        if self.plan.clip_norm is not None:
            scale = self.current_loss_scale()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.plan.clip_norm * scale)
            self.local.gradient_norm = norm.item() / scale
        self._note_step()

    def _begin(self, buffer: torch.Tensor) -> None:
        """The first bucket of a step in the engine."""
        arrivals: SimpleQueue[Arrival] = SimpleQueue()
        ends = _End()  # freed with the backward pass, which may fail
        weakref.finalize(ends, _cut_short, weakref.ref(self), arrivals).atexit = False
        _at_the_end_of_backward(lambda ends=ends: self._raise())  # type: ignore[misc]
        if self._transport is None:
            self._transport = joined(self._parent, buffer.device, self.watchdog)
        if buffer.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._arrivals = arrivals
        self._thread.submit(self._run, self._transport, self._arrivals)

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this is one of the parameters that the Compressor was given."""
        return id(parameter) in self._names

    def cut_short(self) -> None:
        """End the step that a backward pass has left in the middle, if any: the other ranks wait for it."""
        if self._arrivals is not None:
            short = RuntimeError("a backward pass ended before all of its gradients were there")
            self._arrivals.put(Arrival(True, torch.empty(0), error=short))

    def _raise(self) -> None:
        """After the backward pass: raise the step's error, if there is one."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure
        self._note_step()

    def _note_step(self) -> None:
        """Note what the step took. Once its last bucket has come, the backward pass waits for the exchange."""
        now = time.perf_counter()
        self.local.note_step(self._began, now, now - self._came)

    def _gradients(self, bucket: Any) -> dict[str, torch.Tensor]:
        """The bucket's gradients by name, as views.

        Raises:
            ValueError: one is sparse, or of a parameter that the Compressor was not given.
        """
        if bucket.buffer().is_sparse:
            names = [self._names.get(id(parameter), "?") for parameter in bucket.parameters()]
            raise ValueError(
                f"sparse gradients cannot be compressed ({', '.join(names)}): make them dense "
                "(torch.nn.Embedding(..., sparse=False))"
            )
        found = {}
        for parameter, gradient in zip(bucket.parameters(), _views(bucket), strict=True):
            name = self._names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} belongs to no parameter that the Compressor was given"
                )
            # DDP lays gradients out as their parameters, but shows them as if they were contiguous
            like = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
            other = not like.is_contiguous() and _is_dense(like)
            found[name] = gradient.as_strided(like.shape, like.stride()) if other else gradient
        return found

    # -- the exchange, in the Compressor's thread -------------------------------------------------------------

    def _run(self, transport: ProcessGroupTransport, arrivals: SimpleQueue[Arrival]) -> None:
        """One step, from its first bucket to the end of its futures."""
        came: list[Arrival] = []

        def each() -> Iterator[Arrival]:
            while not (came and came[-1].last):
                came.append(arrivals.get())
                yield came[-1]

        with torch.no_grad(), torch.cuda.stream(self._stream):
            try:
                self._exchange(transport, each())
            except Exception as error:
                self._failure = error
                for _ in each():  # DDP waits for the futures of all buckets
                    pass
            if self._arrivals is arrivals:
                self._arrivals = None
            for arrival in came:
                if arrival.future is not None:
                    arrival.future.set_result(arrival.buffer)

    def _exchange(self, transport: ProcessGroupTransport, arrivals: Iterator[Arrival]) -> None:
        transport.begin()
        self.local.begin_round()
        step = self._step = self._new_step(Collectives(transport, self.local.observers), Agree.FIRST_AND_LAST)
        step.factor = 1.0 / self.local.world
        with step.errors_wait:
            step.loss_scale = self.current_loss_scale()
        step.run(lambda: self._add_all(step, arrivals))
        self.ledger.steps += step.finite
        self._end_step(step)

    def _add_all(self, step: Step, arrivals: Iterator[Arrival]) -> None:
        """Give all gradients to the engine as they come."""
        for arrival in arrivals:
            if arrival.error:
                raise arrival.error
            if arrival.there:
                self._stream.wait_event(arrival.there)
            groups: dict[str, dict[int, Any]] = {}
            for name, gradient in arrival.gradients.items():
                bucket, index = self._place[name]
                groups.setdefault(bucket.spec.name, {})[index] = self.framework.vector(step, bucket, gradient)
            with step.batch():
                for name, vectors in groups.items():
                    step.add(self.buckets[name], list(vectors), list(vectors.values()))
            if arrival.last and self.used is not None:
                step.used = [name in arrival.used for name in self.parameters]


def _at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass that is under way is over, after DDP's own work there."""
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    # DDP puts its own callback in line after this one, and before the one that this one puts there
    queue_callback(lambda: queue_callback(call))


class _End:
    """Is freed when the backward pass whose callback holds it is over, however it ends."""


def _cut_short(compressor: weakref.ref[Compressor], arrivals: SimpleQueue[Arrival]) -> None:
    """End the step of these arrivals, unless it has ended, and another has begun."""
    there = compressor()
    if there is not None and there._arrivals is arrivals:
        there.cut_short()


def _views(bucket: Any) -> list[torch.Tensor]:
    """The bucket's gradients as views of its buffer. Of complex ones, DDP's own views show the first half."""
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):  # a bucket has one dtype
        return bucket.gradients()
    shapes = [(*parameter.shape, 2) for parameter in parameters]
    parts = bucket.buffer().split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill its memory, in some order of the dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
