"""Horovod for TensorFlow: the stock ``hvd.DistributedGradientTape`` in a ``tf.function``."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.method import TensorSpec
from hvdcompress.plan import Plan, plan_of
from hvdcompress.testing import Trial
from tests.ranks.drivers.base import Arrays, Counter, Driver, Handle, Shapes, replaced

PAIR = hvd.ProcessSet([0, 2])  #: a process set, where there are so many ranks; for the cases


@dataclass(frozen=True)
class TensorFlowPlan(Plan):
    """A plan that takes four dimensions for TensorFlow's: height, width, in, out."""

    def buckets(self, specs: Any, *more: Any, **named: Any) -> Any:
        return super().buckets([replace(spec, layout="hwio") for spec in specs], *more, **named)


def yardstick(method: Any, world_size: int, **settings: Any) -> Trial:
    """The loopback that TensorFlow is held against."""
    plan = plan_of(method, **settings)
    return Trial(TensorFlowPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)}), world_size)


@tf.custom_gradient
def with_gradient(variable: tf.Tensor, gradient: tf.Tensor) -> Any:
    """Zero, whose derivative by ``variable`` is ``gradient``: no arithmetic, which would make zeros of denormals."""
    return tf.zeros([], variable.dtype), lambda _: (gradient, None)


class TensorFlowHandle(Handle):
    """Variables whose gradients we choose."""

    def __init__(self, comp: Compressor, shapes: Shapes, dtype: Any = tf.float32, **options: Any):
        self.compressor, self.shapes, self.dtype, self.options = comp, shapes, dtype, options
        self.variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in shapes.values()]
        # tracing is most of what a promise takes, and this is a quarter of it; the cases' models have autograph on
        self.step = tf.function(self.reduced, autograph=False)

    def reduced(self, fed: list[tf.Tensor]) -> list[tf.Tensor]:
        """One step in a graph, or eagerly."""
        with tf.GradientTape() as tape:
            loss = tf.add_n([with_gradient(v, g) for v, g in zip(self.variables, fed, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=self.compressor, **self.options)
        return tape.gradient(loss, self.variables)

    def reduce(self, gradients: Arrays, step: Callable | None = None) -> Arrays:
        fed = [tf.cast(tf.constant(gradients[name]), self.dtype) for name in self.shapes]
        reduced = (step or self.step)(fed)
        assert all(array.dtype == self.dtype for array in reduced)
        plain = [tf.cast(array, tf.float32) if self.dtype == tf.bfloat16 else array for array in reduced]
        return dict(zip(self.shapes, [array.numpy() for array in plain], strict=True))

    def trained(self, fed: list[tf.Tensor], momentum: tf.Tensor) -> list[tf.Tensor]:
        """One step of SGD with a rate of 1."""
        reduced = self.reduced(fed)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(array)) for array in reduced])
        gradients = dict(zip(self.shapes, reduced, strict=True))
        with self.compressor.adapted(self.buffers, gradients, momentum=momentum):
            for name, buffer in self.buffers.items():
                buffer.assign(tf.where(finite, momentum * buffer + gradients[name], buffer))
            return [tf.where(finite, buffer, float("nan")) for buffer in self.buffers.values()]

    def train(self, gradients: Arrays, momentum: float) -> Arrays:
        if not hasattr(self, "step_with_momentum"):
            self.buffers = {name: tf.Variable(tf.zeros(shape, self.dtype)) for name, shape in self.shapes.items()}
            self.step_with_momentum = tf.function(self.trained, autograph=False)
        return self.reduce(gradients, lambda fed: self.step_with_momentum(fed, tf.constant(momentum, self.dtype)))

    def overhead(self, steps: int) -> dict[str, int]:
        """A probe with each gradient that TensorFlow does not hand to Horovod itself, plans once."""
        probes = dict.fromkeys(self.shapes.keys() - self.unseen(), steps * TensorFlowDriver.probe)
        return {**probes, "plan": self.sent().get("plan", 0)}

    def unseen(self) -> set[str]:
        """Those that are all-reduced as they are in every step, but for the first."""
        plain = [name for name, bucket in self.compressor.buckets.items() if self.compressor._passes(bucket)]
        return set(plain) - {next(iter(self.shapes))}


class TensorFlowDriver(Driver):
    name = "tensorflow"
    # a convolution lies as height, width, in, out
    shapes: ClassVar[Shapes] = {"a": (37, 41), "b": (3, 5, 7, 16), "c": (8, 131), "d": (1,)}
    expensive = by_tensor = True
    probe = 24

    def __init__(self, folder: Path):
        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        world_size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)
        hvd.init(process_sets=[PAIR] if world_size > 2 else None)
        self.rank, self.world_size, self.folder = hvd.rank(), hvd.size(), folder

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> TensorFlowHandle:
        comp = Compressor(method, names=list(shapes), loss_scale=loss_scale, **settings)
        return TensorFlowHandle(comp, shapes, getattr(tf, dtype), op=hvd.Sum if op == "sum" else hvd.Average)

    def gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value)

    def yardstick(self, method, settings, world_size=None) -> Trial:
        return yardstick(method, world_size or self.world_size, **settings)

    def specs(self, shapes: Shapes) -> list[TensorSpec]:
        return [replace(spec, layout="hwio") for spec in super().specs(shapes)]

    def tolerance(self, method, settings) -> tuple[float, float] | None:
        """Of three ranks or more, a method's result depends on a sum's rounding where it selects by it."""
        if not self.exact and (
            method in ("gtopk", "terngrad", "powersgd", "gradiveq", "fft", "qsgd") or "qsgd" in str(settings)
        ):
            return None
        return super().tolerance(method, settings)

    @contextmanager
    def counting(self) -> Iterator[Counter]:
        counter = Counter()

        def count(array: Any) -> Any:
            counter.num_bytes += array.nbytes
            return array

        def counted(function: Any) -> Any:
            def call(tensor: tf.Tensor, *rest: Any, **more: Any) -> Any:
                noted = tf.numpy_function(count, [tensor], tensor.dtype, stateful=False)
                noted.set_shape(tensor.shape)
                return function(noted, *rest, **more)

            return call

        places: list[tuple[Any, str]] = [(mpi_ops, name) for name in ("_allreduce", "allgather", "alltoall")]
        with replaced([*places, (hvd, "_allreduce"), (hvd, "allgather")], counted):
            yield counter


DRIVER = TensorFlowDriver
