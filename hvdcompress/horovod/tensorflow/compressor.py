"""The TensorFlow driver: every method behind the unmodified ``hvd.DistributedGradientTape(compression=…)``.

It also works with ``horovod.tensorflow.keras.DistributedOptimizer`` of Keras 2 (``tf_keras``). Keras 3 has its own
optimizer, in ``hvdcompress/horovod/keras.py``.

Horovod calls ``compress`` and ``decompress`` while it traces a graph, separately for each gradient, and again in each
retrace. So this driver

* identifies a tensor by the variable to which its gradient belongs (``naming.py``);
* builds each exchange as a chain of graph nodes: a Python segment, a Horovod collective, a segment, and so on. The
  sequence of collectives must be known in advance (``engine/lockstep.py``). If it changes over time, there is one
  chain for each sequence, and ``tf.switch_case`` selects one;
* runs the segments (``segments.py``) in the numpy core, on the memory of the tensors. A codec is then a single graph
  node, which keeps tracing cheap. It was also faster than TensorFlow's own operations
  (``experiments/results/tensorflow-codecs.json``);
* appends a probe to each tensor's stock all-reduce. The probe tells Average from Sum, and carries flags: an error, a
  non-finite gradient, a trigger.

The Compressor keeps state outside of the graph, because variables would be copied in and out in every step. The state
can still be saved with ``tf.train.Checkpoint``.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from hvdcompress.engine import compressor
from hvdcompress.engine.agreement import compare_configs
from hvdcompress.engine.collectives import cut
from hvdcompress.engine.lockstep import Round, rehearse
from hvdcompress.engine.saving import checkpoint, snapshot
from hvdcompress.engine.step import evaluate_loss_scale
from hvdcompress.horovod.process_sets import has_changed, number_compressor
from hvdcompress.horovod.tensorflow.naming import Names
from hvdcompress.horovod.tensorflow.segments import PROBE, Segments, Traced, graph_dtype, with_denormals
from hvdcompress.launchers import is_elastic
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.parts.momentum import Moment
from hvdcompress.plan import Bucket, Plan, plan_of
from hvdcompress.settings import Settings

GRAPH_PER_TENSOR = "in TensorFlow each gradient has a graph of its own, in which the other gradients are not available"


class Compressor(compressor.Compressor, hvd.compression.Compressor, tf.train.experimental.PythonState):
    """Compresses the gradients of one optimizer: ``hvd.DistributedGradientTape(tape, compression=Compressor(…))``.

    Make it once, outside of the training step, because it holds the residuals. Make several in the same order on every
    rank.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        names: names of the variables, for the plan's rules and for :meth:`residual`, in the order in which the tape or
            optimizer gets the variables: of all variables, or only of those that have gradients. Without names, a
            variable is called by its index: "0", "1", ….
        process_set: the Horovod process set that the tape or optimizer uses (default: all ranks).
        loss_scale: the factor by which the loss is multiplied: a number, or a function that returns it. Residuals are
            kept unscaled.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, …).

    Raises:
        ValueError: the plan is wrong; ``hvd.init()`` was not called; the plan has ``bucket_elements``,
            ``verify_every`` or ``nodes``, which TensorFlow graphs do not support.
    """

    driver = "TensorFlow"
    _no_fallback_reason = "in TensorFlow, ranks agree on each tensor, not on a step"
    _refused: Mapping[str, str] = {
        "verify_every": "in TensorFlow the Compressor sees only gradients, not parameters",
        "nodes": GRAPH_PER_TENSOR,
        "bucket_elements": GRAPH_PER_TENSOR,
    }

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        *,
        names: Sequence[str] | None = None,
        process_set: Any = hvd.global_process_set,
        loss_scale: float | Callable[[], float] = 1.0,
        **settings: Unpack[Settings],
    ):
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a Compressor")
        plan = plan_of(method, **settings)
        if names is not None and len(set(names)) < len(names):
            repeated = sorted({name for name in names if list(names).count(name) > 1})
            raise ValueError(f"two tensors have the same name: {repeated}")
        self.names = None if names is None else list(names)
        self._names = Names(self.names)
        self.all_names: Callable[[], Sequence[str]] = list  # names of all variables; empty as long as they are unknown
        super().__init__(plan, process_set.rank(), process_set.size(), loss_scale)
        self.process_set = process_set
        self._segments = Segments(self.rank_state, lambda: evaluate_loss_scale(self.loss_scale))
        number = number_compressor(hvd, tf.constant, process_set, self.watchdog)
        # hvd.elastic.run recognizes that a peer is gone by the text HorovodAllreduce in the name of the failed node
        self.prefix = f"HorovodAllreduce.hvdcompress.tf.set{process_set.process_set_id}.compressor{number}"
        self.buckets: dict[str, Bucket] = {}
        # by outermost graph
        self._traced: weakref.WeakKeyDictionary[Any, Traced] = weakref.WeakKeyDictionary()
        self._exchange_counts: dict[str, tf.Tensor] = {}  # variables that count a tensor's completed exchanges
        self._name: str | None = None  # set inside of naming()
        self._plans_compared = False

    # -- Horovod's interface -------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # AutoGraph would be slow, for no benefit
    def compress(self, tensor: tf.Tensor = None) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """Build the exchange of a gradient in the graph. Horovod calls this method while it traces.

        Args:
            tensor: the gradient, of static shape.

        Returns:
            The tensor that Horovod all-reduces, and the context for :meth:`decompress`: a function that builds the end
            of the exchange. If the method changes nothing, the tensor is the gradient itself.

        Raises:
            PeerError: the ranks have different plans.
            ValueError: the shape is unknown or has changed, or the gradient has no name.
        """
        # Horovod's own compressions are classes with static methods, so people pass the class and not an instance
        if not isinstance(self, Compressor):
            raise TypeError('compression=Compressor is the class: give an instance, compression=Compressor("topk")')
        bucket, traced = self._bucket(tensor)
        self._compare_plans_once()
        if traced.exchanged and self._passes(bucket):
            traced.passing.append(bucket)

            def pass_on(output: tf.Tensor) -> tf.Tensor:
                # This orders iterations of a loop: Horovod refuses a second all-reduce of a name that is in flight
                self._count(bucket, traced, output)
                return output

            return tensor, pass_on
        passing = () if traced.exchanged else traced.passing
        traced.exchanged.append(bucket.spec.name)
        flat = tf.reshape(tensor, [-1])
        dtype = tf.as_dtype(graph_dtype(bucket))
        flat = flat if flat.dtype == dtype else tf.cast(flat, dtype)
        ended = tf.raw_ops.ReadVariableOp(resource=self._counter(bucket.spec.name, traced), dtype=tf.int64)
        segments = self._segments
        chains = list(dict.fromkeys(self._rehearsals(bucket).values()))
        # With one chain, the first segment also returns the first payload: a segment costs a call into Python
        first = chains[0][:1] if len(chains) == 1 else ()

        def begin(gradient: Array, _: Array) -> list[Array]:
            probe = segments.begin(bucket, gradient, traced)
            return [probe, *(segments.send(bucket, 0, first[0]) if first else ())]

        probe, *payload = _segment(begin, [flat, ended], [tf.float32, *(_dtypes(first[0]) if first else ())])
        probe.set_shape([PROBE])
        if first:
            done = self._chain(bucket, payload, chains[0])
        else:
            done = probe if len(chains) == 1 else self._switch(bucket, probe, chains)

        # It must not refer to tensors: a Python function in the graph would keep them alive
        def finish(probe: Array, result: Array) -> Array:
            if first:
                segments.receive(bucket, result)
            reduced = segments.finish(bucket, probe, traced, passing)
            self.rank_state.warn_about_unused()
            if self.ledger.steps == 2:
                self._warn_if_not_adapted()
            return reduced

        def end(output: tf.Tensor) -> tf.Tensor:
            out = _segment(finish, [output, done], dtype)
            self._count(bucket, traced, out)
            return tf.cast(tf.reshape(out, tensor.shape), tensor.dtype)

        return probe, end

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(self, output: tf.Tensor, ctx: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Build the end of a gradient's exchange in the graph.

        Args:
            output: the result of the stock all-reduce.
            ctx: the context that :meth:`compress` returned.

        Returns:
            The reduced gradient.
        """
        return ctx(output)

    # -- the graph -------------------------------------------------------------------------------------

    def _rehearsals(self, bucket: Bucket) -> dict[tuple[int, int], tuple[Round, ...]]:
        """Return the sequence of collectives for each (period of the plan, phase of the method)."""
        return {
            (period, phase): rehearse(method, phase, self.rank_state.world_size, bucket.spec)
            for period, (_, method) in enumerate(bucket.program.periods)
            for phase in range(len(method.phases))
        }

    def _switch(self, bucket: Bucket, begun: tf.Tensor, chains: list[tuple[Round, ...]]) -> tf.Tensor:
        """Build all chains, and select the one that this step needs.

        Args:
            bucket: the bucket.
            begun: a tensor that the first segment returns.
            chains: the sequences of collectives.

        Returns:
            A scalar that is available when the chain has ended.
        """
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
        """Build a chain of collectives with a segment between each two; return the result of the last collective."""
        result = self._collective(bucket, payload, 0, rounds[0])
        for number, planned in enumerate(rounds[1:], 1):
            between = partial(self._segments.between, bucket, number, planned)
            payload = _segment(between, [result], _dtypes(planned))
            result = self._collective(bucket, payload, number, planned)
        return result

    def _collective(self, bucket: Bucket, payload: list[tf.Tensor], number: int, planned: Round) -> tf.Tensor:
        # Horovod keeps only the part of a name after the last slash, and TensorFlow allows few other characters
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
        """Return whether the stock all-reduce reduces the gradient itself in every step."""
        return len(bucket.program.periods) == 1 and self.rank_state.next_step(bucket).passes_through

    def _bucket(self, tensor: tf.Tensor) -> tuple[Bucket, Traced]:
        """Return the bucket of a gradient, and the tensors that were traced in the same outermost graph."""
        if tensor.shape.num_elements() is None:
            raise ValueError(f"a gradient of unknown shape {tensor.shape} cannot be compressed: give it a static shape")
        name = self._name or self._names.of_variable(tensor)
        if name is None:
            raise ValueError(
                "hvd.allreduce gives the gradient no name, and residuals are kept by name: use "
                'hvd.DistributedGradientTape, or `with compressor.naming("layer1/kernel"):` around each hvd.allreduce'
            )
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype.name, "hwio")
        known = self.buckets.get(name)
        if known is None:
            (known,) = self.plan.buckets([spec])
            if getattr(known.program.main, "scope", "tensor") == "global":
                raise ValueError(
                    f"{known.program.main.id} does not work with scope: global ({GRAPH_PER_TENSOR}); use scope: tensor"
                )
            self.buckets[name] = known
        if (known.spec.shape, known.spec.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"gradient {name!r} had shape {known.spec.shape} and dtype {known.spec.dtype} before, and has "
                f"{spec.shape} and {spec.dtype} now: give each gradient a name of its own"
            )
        graph = _outermost_graph()
        return known, Traced() if graph is None else self._traced.setdefault(graph, Traced())

    def _counter(self, name: str, traced: Traced) -> tf.Tensor:
        """Return the variable that counts a tensor's completed exchanges."""

        def handle() -> tf.Tensor:
            # A raw resource, because a tf.function may create a tf.Variable only in its first trace
            with tf.device("CPU:0"):
                return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=(), shared_name=f"{self.prefix}.{name}")

        if name not in self._exchange_counts:
            with tf.init_scope():
                self._exchange_counts[name] = handle()
                tf.raw_ops.AssignVariableOp(resource=self._exchange_counts[name], value=tf.constant(0, tf.int64))
        if _outermost_graph() is None:
            return self._exchange_counts[name]
        # A graph that captured the resource could not be exported: no object of the model owns it. A function inside of
        # another one, such as the step of Keras 2, captures nothing of the other either, since it outlives its trace
        graph = tf.compat.v1.get_default_graph()
        while isinstance(graph, ControlFlowFuncGraph):
            graph = graph.outer_graph
        handles = traced.handles.setdefault(graph, {})
        if name not in handles:
            with graph.as_default(), tf.control_dependencies(None):
                handles[name] = handle().name
        return graph.get_tensor_by_name(handles[name])

    def _count(self, bucket: Bucket, traced: Traced, ended: tf.Tensor) -> None:
        """Increment a tensor's counter after ``ended``, so that a later read of it waits for the exchange."""
        with tf.control_dependencies([ended]):
            counter = self._counter(bucket.spec.name, traced)
            tf.raw_ops.AssignAddVariableOp(resource=counter, value=tf.constant(1, tf.int64))

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Context manager that names the gradient of an ``hvd.allreduce``.

        Args:
            name: the name, the same on all ranks.
        """
        self._name = name
        try:
            yield
        finally:
            self._name = None

    def _compare_plans_once(self) -> None:
        """Compare the plans of all ranks, while the first graph is traced.

        Raises:
            PeerError: the plans differ; the message has the first key that differs.
        """
        if self._plans_compared:
            return
        with tf.init_scope(), self.watchdog.rendezvous("every rank's first trace"):
            message = [self.plan.to_dict(), self.names, self.watchdog.endpoint()]
            texts = self._gather(np.frombuffer(json.dumps(message).encode(), np.uint8))
        everyone = [json.loads(text) for text in texts]
        compare_configs([(plan, {"names": str(names)}) for plan, names, _ in everyone])
        self.watchdog.set_peers([address for *_, address in everyone])
        self._plans_compared = True

    @contextmanager
    def _adapting(self, buffers: Mapping[str, Any], gradients: Mapping[str, Any], moment: Moment) -> Iterator[None]:
        """Add graph nodes before and after a step; see :meth:`adapted`. Use it in the graph of the exchange."""
        self.is_adapted = True
        self.rank_state.tracks_ages = not moment.at_once or bool(self.rank_state.tracks_ages)
        numbers = [tf.cast(tf.convert_to_tensor(each), tf.float32) for each in moment[:-1]]
        ends = []
        for name, buffer in buffers.items():
            if name not in self.buckets or gradients.get(name) is None:
                continue
            gradient = tf.convert_to_tensor(gradients[name])
            flat = tf.cast(tf.reshape(gradient, [-1]), tf.float32)
            shifts = _segment(partial(self._shifts, name, moment.at_once), [flat, *numbers], [tf.float32, tf.float32])
            before, after = (tf.cast(tf.reshape(each, gradient.shape), buffer.dtype) for each in shifts)
            buffer.assign_add(before)
            ends.append((buffer, after))
        yield
        for buffer, after in ends:
            buffer.assign_sub(after)

    def _shifts(self, name: str, at_once: bool, gradient: Array, *numbers: Array) -> list[Array]:
        """Return what is added to the buffer of a gradient before a step, and what is subtracted after it."""
        moment = Moment._make((*map(float, numbers), at_once))
        dense = [np.zeros(len(gradient), np.float32) for _ in range(2)]
        late = self.rank_state.late.pop(name, None)
        if late and moment.decay:
            index, ages = late.part(0)
            where: Any = slice(None) if index is None else index
            values, share = late.values(gradient, index, ages, moment)
            for out, factor in zip(dense, moment.changes(late.method), strict=True):
                out[where] = values * np.float32(share * factor)
        return dense

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not supported: a TensorFlow graph contains the collectives of the plan's methods, and cannot change them.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a TensorFlow graph contains the collectives of the plan's methods, so it cannot pause compression: use "
            "hvd.DistributedGradientTape without compression for these gradients"
        )
        yield

    def _gather(self, data: np.ndarray[Any, Any]) -> list[bytes]:
        """Exchange bytes [n] with all ranks eagerly; return those of every rank, in rank order."""
        name = f"{self.prefix}.plan"
        sizes = hvd.allgather(tf.constant([len(data)]), name=f"{name}.size", process_set=self.process_set).numpy()
        joined = hvd.allgather(tf.constant(data), name=name, process_set=self.process_set).numpy()
        lengths = [int(size) + 4 for size in sizes]
        self._segments.collectives.report("plan", "AllGather", data, len(data) + 4, lengths)
        return [piece.tobytes() for piece in cut(joined, sizes.tolist())]

    def _waits_for(self) -> str | None:
        return self._segments.waits_for()

    def _is_over(self) -> bool:
        return has_changed(self.process_set, self.rank_state.world_size)

    # -- state -------------------------------------------------------------------------------------------

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank. May be called before the first step.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, or to other tensors (if they are known
                already); nothing is changed.
        """
        snapshot.check(saved)
        saved = snapshot.renamed(saved, self.all_names())
        self.rank_state.load_state_dict(saved, self._buckets if self.buckets else None)
        self.ledger.steps = min(self.ledger.steps, self.rank_state.steps_done())

    def _buckets(self) -> list[Bucket]:
        return list(self.buckets.values())

    def serialize(self) -> bytes:
        """Return the state as bytes, for ``tf.train.Checkpoint(compressor=…)``. Every rank must write its own."""
        return checkpoint.to_bytes(self.state_dict())

    def deserialize(self, string_value: bytes) -> None:
        """Restore the state from bytes, for ``tf.train.Checkpoint``.

        Raises:
            ValueError: see :meth:`load_state_dict`.
        """
        self.load_state_dict(checkpoint.from_bytes(string_value))


def _outermost_graph() -> Any:
    """Return the outermost graph that is being traced, or None. Conditionals and functions have graphs of their own."""
    graph = tf.compat.v1.get_default_graph()
    found = None
    while getattr(graph, "outer_graph", None) is not None:
        found = graph
        graph = graph.outer_graph
    return found


def _dtypes(planned: Round) -> list[tf.DType]:
    """Return the dtypes of a collective's inputs: the payload and, for an all-to-all, the bytes for each rank."""
    payload = tf.int32 if planned.collective == "Broadcast" else tf.as_dtype(planned.dtype)
    return [payload, tf.int32] if planned.collective == "AllToAll" else [payload]


def _segment(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Any) -> Any:
    """Add a Python function to the graph.

    The node is not "stateful": TensorFlow would run stateful nodes one after the other in program order, and no
    exchange would overlap with another. A counter variable gives the necessary order instead. The first segment of a
    chain reads it, and it is incremented after the last one. Because of this dependency, TensorFlow does not fold a
    chain into a constant, move it out of a loop, prune it, or overlap two exchanges of one tensor.

    Args:
        function: takes numpy arrays, and returns arrays or None.
        inputs: its arguments.
        dtypes: the dtypes of its results.

    Returns:
        The results as tensors; an int32 zero if the function returns None.
    """

    def run(*arrays: Any) -> Any:
        try:
            with with_denormals():
                result = function(*arrays)
        except Exception as error:
            # TensorFlow turns most exceptions into UnknownError, at which hvd.elastic.run ends without a message
            if is_elastic():
                raise ValueError(str(error)) from error
            raise
        return np.int32(0) if result is None else result

    return tf.numpy_function(run, inputs, dtypes, stateful=False)
