"""The TensorFlow driver: any method behind the unmodified ``hvd.DistributedGradientTape(compression=…)``.

Also behind ``horovod.tensorflow.keras.DistributedOptimizer`` of Keras 2 (``tf_keras``); Keras 3 has its own
optimizer in ``hvdcompress/horovod/keras.py``.

Horovod calls ``compress`` and ``decompress`` while a graph is traced, for each gradient inside a graph of its own,
and again in each retrace. So this driver

* knows a tensor by the variable whose gradient it is (``naming.py``);
* lays out each exchange as a chain: a segment of Python, a Horovod collective, a segment, …, one chain for each
  sequence of collectives that the tensor's plan has (``engine/rehearsal.py``), joined by a ``tf.switch_case`` if
  there are several;
* runs the segments (``segments.py``) in the numpy core, which is handed the tensors' memory as it lies:
  a codec is one graph node, so that tracing stays cheap, and was faster than TensorFlow's own operations
  (``docs/tensorflow.md`` has the figures); and
* lets a probe travel with each tensor through the stock all-reduce, which tells Average from Sum, and carries the
  flags of an error, of a number that is not finite, and of a trigger.

State is kept by this object, not by variables in the graph, which would be copied in and out in every step; it goes
into ``tf.train.Checkpoint`` all the same.
"""

from __future__ import annotations

import json
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdcompress.engine import compressor
from hvdcompress.engine.agreement import compare_terms
from hvdcompress.engine.collectives import cut
from hvdcompress.engine.rehearsal import Round, rehearse
from hvdcompress.engine.safety.watchdog import Watchdog
from hvdcompress.engine.saving import checkpoint, snapshot
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.horovod.tensorflow.naming import Names
from hvdcompress.horovod.tensorflow.segments import PROBE, Segments, Traced, denormals_count
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.optimizers import UNKNOWN, described, may_adapt
from hvdcompress.plan import Bucket, Plan, plan_of

_numbers: Counter[int] = Counter()  # see engine.compressor.next_number


def _number(process_set: Any, watchdog: Watchdog) -> int:
    """The next Compressor's number."""
    set_id = process_set.process_set_id

    def largest(number: int) -> int:
        name = f"hvdcompress.set{set_id}.number"
        return int(hvd.allreduce(tf.constant([number]), name=name, op=hvd.Max, process_set=process_set)[0])

    return compressor.next_number(_numbers, set_id, largest, watchdog)


def _count(counter: tf.Tensor, ended: tf.Tensor) -> None:
    """Count an exchange when ``ended`` is there; what reads the counter later waits for that."""
    with tf.control_dependencies([ended]):
        tf.raw_ops.AssignAddVariableOp(resource=counter, value=tf.constant(1, tf.int64))


@dataclass(frozen=True)
class Ticket:
    """What ``compress`` hands to ``decompress``: the gradient, its bucket, and the end of its exchange.

    Attributes:
        traced: what was traced in the same outermost graph.
        passing: with the first gradient of a graph, the tensors that the engine is told of with it.
        done: what the last segment waits for.
        rate: the learning rate of the step.
        received: whether ``done`` is a collective's result, which the last segment is to take.
    """

    gradient: tf.Tensor
    bucket: Bucket
    traced: Traced
    passing: Sequence[Bucket]
    done: tf.Tensor
    rate: tf.Tensor
    received: bool


class Compressor(compressor.Compressor, hvd.compression.Compressor, tf.train.experimental.PythonState):
    """One optimizer's compression, for ``hvd.DistributedGradientTape(tape, compression=Compressor(…))``.

    Make it once, outside of the training step: it holds the residuals. A program with several makes them in the
    same order on every rank.

    Args:
        method: a method id with hyper-parameters, a Method, a Plan, or a plan's dict.
        names: the variables' names, for rules and for :meth:`residual`, in the order in which the tape or optimizer
            is given them: of all variables, or of those that have gradients. Without them a variable's name is its
            number, "0", "1", ….
        process_set: the Horovod process set that the tape or optimizer uses (default: all ranks).
        loss_scale: a number, or a function, by which the loss was multiplied; residuals are kept unscaled.
        optimizer: the optimizer of Keras that gets the gradients, or an :class:`~hvdcompress.optimizers.SGD` that
            describes it. Its momentum is adapted where error feedback delays gradients. "auto" sets beta_1 of Adam and
            its relatives to 0.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, …).

    Raises:
        TypeError: ``optimizer`` is none of these.
        ValueError: a bad plan; ``hvd.init()`` was not called; the plan joins tensors, or has ``verify_every``,
            ``cosine_every`` or ``clip_norm``, which graphs cannot.
    """

    driver = "TensorFlow"
    never_falls_back = "in TensorFlow the ranks agree for each tensor, and not for a step"

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        *,
        names: Sequence[str] | None = None,
        process_set: Any = hvd.global_process_set,
        loss_scale: float | Callable[[], float] = 1.0,
        optimizer: Any = None,
        **settings: Any,
    ):
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a Compressor")
        plan = plan_of(method, **settings)
        if plan.verify_every:
            raise ValueError(
                "verify_every must be 0: in TensorFlow the Compressor has no parameters, and compares no more than "
                "fits into a probe"
            )
        if plan.cosine_every:
            raise ValueError("cosine_every must be 0: in TensorFlow no tensor's exchange knows of the others")
        if plan.clip_norm is not None:
            raise ValueError("clip_norm must be null: in TensorFlow no tensor's exchange knows of the others")
        if plan.bucket_elements:
            raise ValueError("bucket_elements must be 0: in TensorFlow each gradient has a graph of its own")
        if names is not None and len(set(names)) < len(names):
            raise ValueError(f"two tensors have one name: {sorted({n for n in names if list(names).count(n) > 1})}")
        self.names = None if names is None else list(names)
        self._names = Names(self.names)
        self.all_names: Callable[[], Sequence[str]] = list  # those of all variables, as far as they are known
        self._ordinals: int | None = None  # how many gradients are known by their ordinal, in each graph that has any
        super().__init__(plan, process_set.rank(), process_set.size(), loss_scale)
        self.process_set = process_set
        self._rates: dict[str, float] = {}  # the learning rate of the present step, by tensor
        self.use_optimizer(optimizer)
        self._segments = Segments(self.local, self.current_loss_scale)
        number = _number(process_set, self.watchdog)  # ranks may wait for each other here
        # by the first word in the name of the node that fails hvd.elastic.run knows that a peer is gone
        self.prefix = f"HorovodAllreduce.hvdcompress.tf.set{process_set.process_set_id}.compressor{number}"
        self.buckets: dict[str, Bucket] = {}
        # by outermost graph
        self._traced: weakref.WeakKeyDictionary[Any, Traced] = weakref.WeakKeyDictionary()
        self._variables: set[Any] = set()  # what graphs captured by their first gradients: the model's, and others
        self._ended: dict[str, tf.Tensor] = {}  # variables that count how often a tensor's exchange has ended
        self._name: str | None = None
        self._agreed = False

    # -- Horovod's interface -------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # it would rewrite, slowly, what needs no rewriting
    def compress(self, tensor: tf.Tensor = None) -> tuple[tf.Tensor, Ticket | tf.Tensor]:
        """Lay out a gradient's exchange; returns what Horovod shall all-reduce, and a ticket.

        A gradient that is all-reduced as it is goes to Horovod itself; its ticket is its counter.
        """
        if not isinstance(self, Compressor):  # Horovod's own compressions are classes
            raise TypeError('compression=Compressor is the class: give an instance, compression=Compressor("topk")')
        bucket, traced = self._bucket(tensor)
        self._compare_plans_once()
        if traced.exchanged and self._passes(bucket):
            traced.passing.append(bucket)
            return tensor, self._counter(bucket.spec.name)
        passing = () if traced.exchanged else traced.passing
        traced.exchanged.append(bucket.spec.name)
        flat = tf.reshape(tensor, [-1])
        work = _work(bucket)
        flat = flat if flat.dtype == work else tf.cast(flat, work)
        piggyback = self._piggyback(bucket)
        ended = tf.raw_ops.ReadVariableOp(resource=self._counter(bucket.spec.name), dtype=tf.int64)
        segments = self._segments
        chains: list[tuple[Round, ...]] = [()] if piggyback is not None else self._chains(bucket)
        first = chains[0][:1] if len(chains) == 1 else ()  # one segment does what it can: each costs much

        def begin(gradient: Array, _: Array) -> list[Array]:
            probe = segments.begin(bucket, gradient, piggyback, traced, self._refuse_other_ordinals(traced))
            return [probe, *(segments.send(bucket, 0, first[0]) if first else ())]

        probe, *payload = _segment(begin, [flat, ended], [tf.float32, *(_dtypes(first[0]) if first else ())])
        probe.set_shape([PROBE + (piggyback or 0)])
        if first:
            done = self._chain(bucket, payload, chains[0])
        else:
            done = probe if len(chains) == 1 else self._switch(bucket, probe, chains)
        return probe, Ticket(tensor, bucket, traced, passing, done, self._learning_rate(), received=bool(first))

    @tf.autograph.experimental.do_not_convert
    def decompress(self, output: tf.Tensor, ctx: Ticket | tf.Tensor) -> tf.Tensor:
        """The end of a gradient's exchange: the reduced gradient."""
        if not isinstance(ctx, Ticket):
            # in a loop, the next iteration waits for what a variable waits for: one name is all-reduced once at a time
            _count(ctx, output)
            return output
        bucket = ctx.bucket
        gradient = ctx.gradient
        traced = ctx.traced
        passing = ctx.passing
        received = ctx.received  # as a piece of Python holds no tensors

        def finish(probe: Array, done: Array, rate: Array) -> Array:
            if not np.isnan(rate):
                self._rates[bucket.spec.name] = float(rate)
            if received:
                self._segments.receive(bucket, done)
            reduced = self._segments.finish(bucket, probe, traced, passing)
            self.local.warn_of_what_is_idle()
            return reduced

        out = _segment(finish, [output, ctx.done, ctx.rate], _work(bucket))
        _count(self._ended[bucket.spec.name], out)
        return tf.cast(tf.reshape(out, gradient.shape), gradient.dtype)

    # -- the graph -------------------------------------------------------------------------------------

    def _chains(self, bucket: Bucket) -> list[tuple[Round, ...]]:
        """The sequences of collectives that the bucket's exchange may be, in its stages and phases."""
        return list(dict.fromkeys(self._rehearsals(bucket).values()))

    def _rehearsals(self, bucket: Bucket) -> dict[tuple[int, int], tuple[Round, ...]]:
        return {
            (stage, phase): rehearse(method, phase, self.local.world, bucket.spec)
            for stage, (_, method) in enumerate(bucket.program.stages)
            for phase in range(len(method.phases))
        }

    def _switch(self, bucket: Bucket, begun: tf.Tensor, chains: list[tuple[Round, ...]]) -> tf.Tensor:
        """The chain that this step needs, after ``begun``; a scalar tells its end."""
        segments = self._segments
        rehearsed = self._rehearsals(bucket)
        which = _segment(lambda _: np.int32(chains.index(rehearsed[segments.phase(bucket)])), [begun], tf.int32)
        which.set_shape([])

        def branch(rounds: tuple[Round, ...]) -> tf.Tensor:
            if not rounds:
                return tf.zeros([], tf.int32)
            payload = _segment(lambda _: segments.send(bucket, 0, rounds[0]), [begun], _dtypes(rounds[0]))
            result = self._chain(bucket, payload, rounds)
            return _segment(lambda result: segments.receive(bucket, result), [result], tf.int32)

        return tf.switch_case(which, [lambda rounds=rounds: branch(rounds) for rounds in chains])

    def _chain(self, bucket: Bucket, payload: list[tf.Tensor], rounds: Sequence[Round]) -> tf.Tensor:
        """Collectives with a segment between each two; returns the last one's result."""
        result = self._collective(bucket, payload, 0, rounds[0])
        for number, planned in enumerate(rounds[1:], 1):
            payload = _segment(self._between(bucket, number, planned), [result], _dtypes(planned))
            result = self._collective(bucket, payload, number, planned)
        return result

    def _between(self, bucket: Bucket, number: int, planned: Round) -> Callable[[Array], list[Array]]:
        def between(result: Array) -> list[Array]:
            self._segments.receive(bucket, result)
            return self._segments.send(bucket, number, planned)

        return between

    def _collective(self, bucket: Bucket, payload: list[tf.Tensor], number: int, planned: Round) -> tf.Tensor:
        # Horovod keeps of a name what follows its last slash
        tensor = re.sub(r"[^A-Za-z0-9_.-]", lambda found: f"_{ord(found[0]):x}", bucket.spec.name.replace("/", "."))
        name = f"{self.prefix}.{tensor}.round{number}.{planned.collective}"
        for part in payload:
            part.set_shape([None])
        if planned.collective == "AllGather":
            return mpi_ops.allgather(payload[0], name, ignore_name_scope=True, process_set=self.process_set)
        if planned.collective == "AllToAll":
            return mpi_ops.alltoall(*payload, name, ignore_name_scope=True, process_set=self.process_set)[0]
        op = hvd.Max if planned.op == "max" else hvd.Sum
        return mpi_ops._allreduce(payload[0], name, op, ignore_name_scope=True, process_set=self.process_set)

    def _passes(self, bucket: Bucket) -> bool:
        """Whether a gradient is all-reduced as it is in every step."""
        return len(bucket.program.stages) == 1 and self.local.turn(bucket).passes

    def _bucket(self, tensor: tf.Tensor) -> tuple[Bucket, Traced]:
        """The bucket of the gradient that is being traced, and what was traced in the same outermost graph."""
        if tensor.shape.num_elements() is None:
            raise ValueError(f"a gradient of unknown shape {tensor.shape} cannot be compressed: give it a static shape")
        name, traced = self._note_name(tensor)
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype.name, "hwio")
        known = self.buckets.get(name)
        if known is None:
            (known,) = self.plan.buckets([spec])
            if getattr(known.program.main, "scope", "tensor") == "global":
                raise ValueError(
                    f"{known.program.main.id} with scope: global joins all tensors, which cannot be in TensorFlow, "
                    "where each gradient has a graph of its own; use scope: tensor"
                )
            self.buckets[name] = known
        if (known.spec.shape, known.spec.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"gradient {name!r} had shape {known.spec.shape} and dtype {known.spec.dtype} before, and has "
                f"{spec.shape} and {spec.dtype} now: gradients without a variable must come in one "
                "order. Use hvd.DistributedGradientTape, which knows the variables, or `with compressor.naming(…):`"
            )
        return known, traced

    def _note_name(self, tensor: tf.Tensor) -> tuple[str, Traced]:
        """The name of the gradient that is being traced, and what was traced in the same outermost graph."""
        graph = tf.compat.v1.get_default_graph()
        outermost = None
        graphs = []
        while getattr(graph, "outer_graph", None) is not None:  # conditionals and functions within functions
            graphs.append(graph)
            outermost = graph
            graph = graph.outer_graph
        if outermost is not None and outermost not in self._traced:
            self._refuse_another_model(graphs)
        traced = Traced() if outermost is None else self._traced.setdefault(outermost, Traced())
        name = self._name
        if name is None and outermost is None:
            raise ValueError(
                "a gradient that is reduced by itself, outside of any tf.function, has no name, by which its residual "
                'would be kept: use hvd.DistributedGradientTape, or `with compressor.naming("layer1/kernel"):` '
                "around each hvd.allreduce"
            )
        name = name or self._names.of_variable(tensor)
        if name is None:
            name = self._names.of_ordinal(traced.ordinals)
            traced.ordinals += 1
        return name, traced

    def _refuse_other_ordinals(self, traced: Traced) -> Exception | None:
        """Return an error for a graph with another number of ordinals: they may be of other variables there.

        It is known only when the graph runs, as nothing tells the end of a trace.
        """
        if not traced.ordinals:
            return None
        if self._ordinals is None:
            self._ordinals = traced.ordinals
        if traced.ordinals == self._ordinals:
            return None
        return ValueError(
            f"hvd.allreduce reduces {traced.ordinals} gradients without a name in this graph, and {self._ordinals} in "
            "the one before: known by their order alone, they would take each other's residuals. Use "
            "hvd.DistributedGradientTape, which knows the variables, or one tf.function, or `with "
            'compressor.naming("layer1/kernel"):` around each hvd.allreduce'
        )

    def _counter(self, name: str) -> tf.Tensor:
        """The variable that counts how often a tensor's exchange has ended."""
        if name not in self._ended:
            with tf.init_scope(), tf.device("CPU:0"):
                # no tf.Variable, which a function may only make in its first trace
                counter = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=(), shared_name=f"{self.prefix}.{name}")
                tf.raw_ops.AssignVariableOp(resource=counter, value=tf.constant(0, tf.int64))
                self._ended[name] = counter
        return self._ended[name]

    def _refuse_another_model(self, graphs: Sequence[Any]) -> None:
        """Refuse a graph that has none of the variables of those before: equal ordinals would share residuals."""
        captured = [tensor for graph in graphs for tensor in getattr(graph, "external_captures", ())]
        here = {one.ref() for one in captured if one.dtype == tf.resource and not tf.is_symbolic_tensor(one)}
        if here and self._variables and not here & self._variables:
            raise ValueError(
                "this Compressor serves another model, of which this step has no variable: make one for each model"
            )
        self._variables |= here

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Context manager: a gradient's name is ``name``, not its ordinal. Names are equal on all ranks."""
        self._name = name
        try:
            yield
        finally:
            self._name = None

    def _piggyback(self, bucket: Bucket) -> int | None:
        """The length of a payload that is the stock all-reduce itself; never where a tensor has several stages."""
        (_, method), *more = bucket.program.stages
        if more or len(method.phases) > 1 or self.local.turn(bucket).dtype != "float32" or _work(bucket) != tf.float32:
            return None
        return method.piggyback(bucket.spec, 0, {})

    def _compare_plans_once(self) -> None:
        """While the first graph is traced: make sure that all ranks have the same plan.

        Raises:
            PeerError: they do not; it names the first key that differs.
        """
        if self._agreed:
            return
        with tf.init_scope(), self.watchdog.meeting("every rank's first trace"):
            said = [self.plan.to_dict(), self.names, self.watchdog.address()]
            texts = self._gather(np.frombuffer(json.dumps(said).encode(), np.uint8))
        everyone = [json.loads(text) for text in texts]
        compare_terms([(plan, {"names": str(names)}) for plan, names, _ in everyone])
        self.watchdog.meet([address for *_, address in everyone])
        self._agreed = True
        if self._optimizer is None and may_adapt(self.plan) and self.local.rank == 0:
            log.warn_once(UNKNOWN)

    def use_optimizer(self, optimizer: Any) -> None:
        """Adapt the momentum of an optimizer of Keras, or of what an ``SGD`` describes, from now on.

        With ``without_beta1`` in the plan, as under "auto", beta_1 of Adam and its relatives becomes 0.

        Raises:
            TypeError: it is neither.
        """
        self.local.optimizer = described(optimizer, self._rates)
        self._without_beta1([optimizer])
        self._optimizer = optimizer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not in TensorFlow, whose graphs have the collectives of the plan's methods.

        Raises:
            NotImplementedError: always; it says what to do instead.
        """
        raise NotImplementedError(
            "a graph has the collectives of the plan's methods, so it cannot pause: give these gradients to "
            "hvd.DistributedGradientTape without compression"
        )
        yield

    def _learning_rate(self) -> tf.Tensor:
        """The rate of the step that is being traced; NaN if the optimizer has none.

        It is read in the graph, before the optimizer counts the step: a schedule gives another one after that.
        """
        rate = getattr(self._optimizer, "learning_rate", None)
        return tf.constant(np.nan) if rate is None else tf.cast(tf.convert_to_tensor(rate), tf.float32)

    def _gather(self, data: np.ndarray[Any, Any]) -> list[bytes]:
        """Every rank's bytes, in rank order; eagerly."""
        name = f"{self.prefix}.plan"
        sizes = hvd.allgather(tf.constant([len(data)]), name=f"{name}.size", process_set=self.process_set).numpy()
        joined = hvd.allgather(tf.constant(data), name=name, process_set=self.process_set).numpy()
        lengths = [int(size) + 4 for size in sizes]
        for observer in self.local.observers:
            observer.sent(self.local.rank, "plan", Sent("AllGather", data, len(data) + 4, lengths))
        return [piece.tobytes() for piece in cut(joined, sizes.tolist())]

    def _waits_for(self) -> str | None:
        return self._segments.waits_for()

    def _is_over(self) -> bool:
        return compressor.has_changed(self.process_set, self.local.world)

    # -- state -------------------------------------------------------------------------------------------

    def residual(self, name: str) -> np.ndarray[Any, Any]:
        """This rank's residual of a tensor, in its shape (a copy); zeros where none is kept.

        Raises:
            KeyError: no such tensor has been traced.
        """
        if name not in self.buckets:
            raise KeyError(f"no tensor {name!r} has gone through yet; known: {', '.join(self.buckets) or 'none'}")
        shape = self.buckets[name].spec.shape
        flat = self.local.residual(name) if name in self.local.names() else None
        return np.zeros(shape, np.float32) if flat is None else flat.reshape(shape).copy()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; before the first step, too.

        Raises:
            ValueError: it is of another rank or world, or, as soon as the tensors are known, of other tensors;
                nothing is changed then.
        """
        snapshot.check(saved)
        saved = snapshot.renamed(saved, self.all_names())
        self.local.load_state_dict(saved, np.concatenate, self._buckets() or None)
        self.ledger.steps = min(self.ledger.steps, self.local.steps_done())

    def _buckets(self) -> list[Bucket]:
        return list(self.buckets.values())

    def serialize(self) -> bytes:
        """For ``tf.train.Checkpoint(compressor=…)``, of which every rank must write its own."""
        return checkpoint.to_bytes(self.state_dict())

    def deserialize(self, string_value: bytes) -> None:
        """For ``tf.train.Checkpoint``."""
        self.load_state_dict(checkpoint.from_bytes(string_value))


def _work(bucket: Bucket) -> tf.DType:
    """What a bucket's gradient is computed in, in the graph."""
    return tf.float64 if bucket.spec.dtype == "float64" else tf.float32


def _dtypes(planned: Round) -> list[tf.DType]:
    """What a collective is given: its payload and, of an all-to-all, how many bytes go to each rank."""
    payload = tf.int32 if planned.collective == "Broadcast" else tf.as_dtype(planned.dtype)
    return [payload, tf.int32] if planned.collective == "AllToAll" else [payload]


def _segment(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Any) -> Any:
    """A piece of Python in the graph; where it returns nothing, a zero says that it is done.

    Not "stateful", as TensorFlow means it: it would run such pieces one tensor after the other, in program order,
    and no exchange would overlap with another. That each runs once and in its place follows from what it is given:
    a variable that counts the tensor's exchanges is read by the first piece of a chain and written after the last,
    so that TensorFlow neither folds a chain into a constant, nor moves it out of a loop, nor leaves it out, nor
    overlaps two of one tensor.
    """

    def run(*arrays: Any) -> Any:
        try:
            with denormals_count():
                result = function(*arrays)
        except Exception as error:
            if compressor.is_elastic():  # hvd.elastic.run ends in silence at an UnknownError, which most become
                raise ValueError(str(error)) from error
            raise
        return np.int32(0) if result is None else result

    return tf.numpy_function(run, inputs, dtypes, stateful=False)
