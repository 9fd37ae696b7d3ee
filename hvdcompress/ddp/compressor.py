"""The DDP driver: every method as a communication hook of ``DistributedDataParallel``.

DDP calls its hook with a bucket as soon as the bucket's gradients are ready, in the same order on all ranks, and
expects a future of the reduced bucket. The hook only queues the bucket. A thread, one for each Compressor, takes
buckets from the queue in this order, so every rank starts its collectives in the same order, and they overlap with the
backward pass. The unit of exchange is a bucket of the plan, and state is kept by parameter name, so it does not matter
how DDP forms its own buckets. See ``docs/drivers.md``.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Unpack

import torch
import torch.distributed as dist

from hvdcompress._torch.compressor import TensorCompressor
from hvdcompress.ddp.group import GroupCompressor
from hvdcompress.engine.nodes import Location
from hvdcompress.engine.step import Step
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.launchers import torchrun_location
from hvdcompress.method import Method
from hvdcompress.plan import Plan, plan_of
from hvdcompress.settings import Settings


@dataclass(eq=False)
class Arrival:
    """A DDP bucket in the queue between the backward pass and the Compressor's thread.

    Attributes:
        last: whether this is the last bucket of the step.
        buffer: the bucket's flat memory [n]. Results are written to it.
        future: the future that the hook returned; None for an interrupted backward pass.
        gradients: views of the buffer by parameter name, in the shapes and strides of the parameters.
        used: names of the parameters that have had a gradient so far in this backward pass.
        ready: on a GPU, the CUDA event that marks the gradients as computed.
        error: an error that the Compressor's thread has to raise for this bucket.
    """

    last: bool
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor] | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    ready: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class BackwardPass:
    """A backward pass of DDP.

    Attributes:
        began: time of its first bucket (``time.perf_counter()``, seconds).
        running: the engine's step, in the Compressor's thread; None if gradients are all-reduced without the engine.
        arrivals: the queue of the step; None if no further bucket is expected.
    """

    began: float
    running: Future[None] | None = None
    arrivals: SimpleQueue[Arrival] | None = None


class Compressor(GroupCompressor):
    """Compresses the gradients of one model; made by :func:`hvdcompress.ddp.attach`.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        named_parameters: names and parameters of the model, without DDP's ``module.``. State is kept by name.
        process_group: the group that DDP uses (default: all ranks).
        loss_scale: the factor by which the loss is multiplied: a number, or a function that returns it, such as
            ``scaler.get_scale``. Residuals are kept unscaled, so the factor may change between steps.
        backend: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: the plan: which method each tensor gets, and with which hyper-parameters.
        ledger: bytes and seconds so far, on this rank. Besides the tensors it lists "status" (64 bytes per step) and
            "lengths" (8 bytes per all-gather whose lengths are not known in advance).
        parameters: the parameters by name.
        used: names of the parameters that had a gradient in this backward pass; None if DDP does not look for unused
            parameters.

    Raises:
        ValueError: the plan is wrong; two parameters have the same name; the process group is not initialized; a
            Compressor under Horovod already has one of the parameters.
    """

    driver = "DistributedDataParallel"
    _local_steps = "local_steps"

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] = (),
        *,
        process_group: Any = None,
        loss_scale: float | Callable[[], float] = 1.0,
        backend: str = "auto",
        **settings: Unpack[Settings],
    ):
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() before making a Compressor")
        if isinstance(method, TensorCompressor):
            raise ValueError(
                f"a Compressor under {method.driver} cannot be attached to a model: give the method and its settings, "
                "or the plan"
            )
        parent = process_group or dist.group.WORLD
        told = torchrun_location() if dist.get_world_size(parent) == dist.get_world_size() else None
        location = Location(*told) if told else None
        super().__init__(plan_of(method, **settings), parent, named_parameters, loss_scale, backend, location)
        self.used: set[str] | None = None
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdcompress")
        self._backward = BackwardPass(0.0)  # the last one
        self._stream: Any = None  # the CUDA stream of the Compressor's thread

    def close(self) -> None:
        """Free the Compressor's process group. Call it between steps."""
        self._thread.shutdown()
        super().close()

    def _is_under_way(self) -> bool:
        running = self._backward.running
        return super()._is_under_way() or (running is not None and not running.done())

    # -- the hook, in the thread of the backward pass ---------------------------------------------------------

    def _receive(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Communication hook: queue a DDP bucket. The returned future completes at the end of the step.

        If the step fails, the futures still complete and ``backward()`` raises the error after DDP has finished: a
        future with an exception would leave DDP's reducer unusable.

        Args:
            bucket: a ``torch.distributed.GradBucket``.
        """
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin(buffer)
        backward = self._backward
        if bucket.is_last():
            # In the pass of the last bucket: with reentrant checkpointing, the first one may be of an inner pass
            _at_the_end_of_backward(partial(self._end, backward, time.perf_counter()))
        if backward.running is None:
            return self._all_reduce(bucket)
        devices = [buffer.device] if buffer.is_cuda else None
        arrival = Arrival(bucket.is_last(), buffer, torch.futures.Future(devices=devices))
        assert arrival.future is not None
        if backward.arrivals is None:  # the step was aborted, and its error is raised at the end of this backward pass
            arrival.future.set_result(buffer)
            return arrival.future
        try:
            arrival.gradients = self._gradients(bucket)
            if buffer.is_cuda:
                arrival.ready = torch.cuda.current_stream(buffer.device).record_event()
            if self.used is not None and arrival.last:
                arrival.used = frozenset(self.used)
                self.used.clear()
        except Exception as error:
            # Raised here, it would end this rank's backward pass while the other ranks wait in their collectives.
            # The Compressor's thread raises it instead, and tells them
            arrival.error = error
        backward.arrivals.put(arrival)
        if arrival.last:
            backward.arrivals = None
        return arrival.future

    def _all_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a DDP bucket in place, as DDP does without a hook."""
        buffer = bucket.buffer()
        num_bytes: Counter[str] = Counter()  # by the name of the plan's bucket
        for parameter in bucket.parameters():
            plan_bucket, _ = self._bucket_and_index[self._names[id(parameter)]]
            num_bytes[plan_bucket.spec.name] += parameter.numel() * buffer.element_size()
        for observer in self.rank_state.observers:
            for name, count in num_bytes.items():
                observer.begun(self.rank_state.rank, name, count)
                observer.sent(self.rank_state.rank, name, Sent("AllReduce", None, count))
        self.ledger.steps += bucket.is_last()
        work = dist.all_reduce(buffer.div_(self.rank_state.world_size), group=self._parent, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _begin(self, buffer: torch.Tensor) -> None:
        """Begin a backward pass at its first bucket: with a step of the engine, unless compression is given up."""
        uncompressed = self.rank_state.fallback.uncompressed and not self.rank_state.paused
        self._abort_step()
        self._backward = BackwardPass(time.perf_counter())
        # With verify_every, the engine compares the ranks' parameters, so the step cannot bypass it
        if uncompressed and not self.plan.verify_every:
            self.rank_state.begin_round()  # so that discard() does not undo the compressed step before this one
            self.rank_state.late = {}
            return
        self._connect(buffer.device)
        if buffer.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        arrivals = self._backward.arrivals = SimpleQueue()
        _abort_after_backward(weakref.ref(self), self._backward)
        self._backward.running = self._thread.submit(self._run, arrivals)

    def _abort_step(self) -> None:
        """Fail the open step on all ranks, if a backward pass was interrupted and left one open."""
        arrivals = self._backward.arrivals
        self._backward.arrivals = None
        if arrivals is not None:
            error = RuntimeError("a backward pass ended before all of its gradients were exchanged")
            arrivals.put(Arrival(True, torch.empty(0), error=error))

    def _before_forward(self, module: torch.nn.Module) -> None:
        self._abort_step()  # a forward pass means that an unfinished backward pass will not go on

    def _end(self, backward: BackwardPass, last_bucket_at: float) -> None:
        """Wait for the end of the step, raise its error if it failed, and record how long it took."""
        running = backward.running
        backward.running = None
        if running:
            running.result()
        # After its last bucket, the backward pass only waits for the exchange
        now = time.perf_counter()
        self.rank_state.note_step(backward.began, now, now - last_bucket_at)

    def _gradients(self, bucket: Any) -> dict[str, torch.Tensor]:
        """Return the gradients of a DDP bucket by name, as views of its buffer.

        Raises:
            ValueError: the gradients are sparse, or the Compressor was not given one of the parameters.
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
                    f"a gradient of shape {tuple(gradient.shape)} belongs to no parameter that the Compressor was "
                    "given: attach after the model has all of its parameters"
                )
            # DDP stores a gradient with its parameter's strides (channels_last, for example), but bucket.gradients()
            # shows this memory as a contiguous tensor, whose elements are then in the wrong order
            like = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
            has_other_strides = not like.is_contiguous() and _is_dense(like)
            found[name] = gradient.as_strided(like.shape, like.stride()) if has_other_strides else gradient
        return found

    # -- the exchange, in the Compressor's thread -------------------------------------------------------------

    def _run(self, arrivals: SimpleQueue[Arrival]) -> None:
        """Run one step, from its first bucket until all futures are completed."""
        received: list[Arrival] = []

        def each() -> Iterator[Arrival]:
            while not (received and received[-1].last):
                received.append(arrivals.get())
                yield received[-1]

        with torch.no_grad(), torch.cuda.stream(self._stream):
            try:
                self._run_step(lambda step: self._add_all(step, each()), 1.0 / self.rank_state.world_size)
            finally:
                for _ in each():  # after an error: DDP waits for the futures of all buckets, so take the others, too
                    pass
                for arrival in received:
                    if arrival.future is not None:
                        arrival.future.set_result(arrival.buffer)

    def _run_step(self, add: Callable[[Step], None], factor: float) -> None:
        self._connect(next(iter(self.parameters.values())).device)
        self.rank_state.begin_round()
        self._end_step(self._run_ordered(self._config, factor, add))

    def _add_all(self, step: Step, arrivals: Iterator[Arrival]) -> None:
        """Give the gradients to the engine, bucket by bucket as they arrive."""
        for arrival in arrivals:
            if arrival.error:
                raise arrival.error
            if arrival.ready:
                self._stream.wait_event(arrival.ready)
            groups: dict[str, dict[int, Any]] = {}
            for name, gradient in arrival.gradients.items():
                bucket, index = self._bucket_and_index[name]
                groups.setdefault(bucket.spec.name, {})[index] = self._framework.vector(step, bucket, gradient)
            with step.batch():
                for name, vectors in groups.items():
                    step.add(self.buckets[name], list(vectors), list(vectors.values()))
            if arrival.last and self.used is not None:
                step.used = [name in arrival.used for name in self.parameters]


def _at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, after DDP has finalized its buckets."""
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    # Callbacks run in the order in which they were queued. DDP queues its own after this hook returns, so a callback
    # that this one queues runs after DDP's
    queue_callback(lambda: queue_callback(call))


class _BackwardLifetime:
    """An object that lives as long as the backward pass whose callback refers to it."""


def _abort_after_backward(reference: weakref.ref[Compressor], backward: BackwardPass) -> None:
    """Abort the step of a backward pass that ends before its last bucket, or fails.

    The other ranks wait for the collectives of the step.
    """
    lifetime = _BackwardLifetime()

    def ended() -> None:
        compressor = reference()
        if compressor is None or backward.arrivals is None:
            return
        # Inside of another pass, this was the pass of a block with reentrant checkpointing, and the step goes on
        if torch._C._current_graph_task_id() == -1:
            compressor._abort_step()
        else:
            _abort_after_backward(reference, backward)

    # Autograd frees the callbacks of a pass when it has called them, and also when the pass fails
    weakref.finalize(lifetime, ended).atexit = False
    torch.autograd.Variable._execution_engine.queue_callback(lambda lifetime=lifetime: None)  # type: ignore[misc]


def _views(bucket: Any) -> list[torch.Tensor]:
    """Return the gradients of a DDP bucket as views of its buffer; a complex one as [*shape, 2] real numbers.

    ``bucket.gradients()`` shows only the first half of a complex gradient. PyTorch 2.9.1 has a complex buffer.
    """
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):  # all parameters of a bucket have the same dtype
        return bucket.gradients()
    shapes = [(*parameter.shape, 2) for parameter in parameters]
    buffer = bucket.buffer()
    numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    parts = numbers.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is contiguous in some order of its dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
