"""Keras 3: an optimizer that averages compressed gradients, and the callbacks that distributed training needs.

Horovod's own ``DistributedOptimizer`` fails on Keras 3 variables. (With Keras 2, which is ``tf_keras`` today, use that
one, with ``hvdcompress.horovod.tensorflow.Compressor``.) ::

    import horovod.tensorflow as hvd
    from hvdcompress.horovod.keras import BroadcastCallback, DistributedOptimizer, MetricAverageCallback

    hvd.init()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), "scalecom", density=0.01)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    model.fit(x, y, callbacks=[BroadcastCallback(), MetricAverageCallback()])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdcompress.engine.telemetry import log
from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.method import Method
from hvdcompress.optimizers import SGD, keras_momentum, may_adapt
from hvdcompress.plan import Plan

__all__ = ["BroadcastCallback", "DistributedOptimizer", "MetricAverageCallback", "ObserveCallback", "load_model"]

#: dtypes that Horovod can broadcast; random seeds are uint32, and go as int64
_BROADCAST = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: str | Method | Plan | Mapping[str, Any] | Compressor = "none",
    *,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    **settings: Any,
) -> keras.optimizers.Optimizer:
    """Have an optimizer reduce its gradients over ranks first.

    Args:
        optimizer: any new Keras 3 optimizer; a ``LossScaleOptimizer`` too, whose inner optimizer must be a plain one.
        compression: a Compressor, or what one is made of: a method id, a Method, a Plan or a plan's dict. "auto" sets
            beta_1 of Adam and its relatives to 0.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: gradients of so many batches are averaged on each rank before they are exchanged.
        sparse_as_dense: make the sparse gradients of embeddings dense, and exchange them; an error otherwise.
        process_set: the Horovod process set to reduce over.
        settings: hyper-parameters and plan keys, if ``compression`` is no Compressor.

    Returns:
        The same object, whose class is now derived from what it was; ``.compressor`` is its Compressor.

    Raises:
        ValueError: the optimizer was used or given before, the backend is not TensorFlow, or the plan is bad.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow")
    if optimizer.built:
        raise ValueError("the optimizer has been used already: give DistributedOptimizer a new one")
    if isinstance(optimizer, _Reduction):
        raise ValueError("the optimizer reduces its gradients already: DistributedOptimizer takes it once")
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if isinstance(compression, Compressor):
        if settings:
            raise ValueError(f"a Compressor has its settings already: {', '.join(settings)}")
        compressor = compression
    else:
        compressor = Compressor(compression, process_set=process_set, **settings)
    if backward_passes_per_step > 1:
        if scaled or getattr(optimizer, "gradient_accumulation_steps", None):
            raise ValueError("backward_passes_per_step: this optimizer scales its loss, or accumulates, itself")
        optimizer.gradient_accumulation_steps = backward_passes_per_step
    # the object itself: one made again of its configuration would lose what a program's own class leaves out of that
    mixin = _ReducesScaled if scaled else _Reduces
    cls = type(optimizer)
    object.__setattr__(optimizer, "__class__", type(cls.__name__, (mixin, cls), {"__module__": cls.__module__}))
    optimizer.compressor = compressor
    optimizer.reduction = op
    optimizer.sparse_as_dense = sparse_as_dense
    compressor.all_names = lambda: list(optimizer._names(()).values())
    _adapt_momentum(optimizer.inner_optimizer if scaled else optimizer, compressor)
    if scaled:
        compressor.loss_scale = lambda: float(
            tf.convert_to_tensor(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
        )
    return optimizer


def _adapt_momentum(optimizer: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    """Have an optimizer's momentum adapted, or say why it is not."""
    compressor.use_optimizer(optimizer)
    first = compressor.local.rank == 0 and may_adapt(compressor.plan)
    clips = [key for key in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(optimizer, key, None) is not None]
    momentum = keras_momentum(optimizer)
    text = ""
    if clips and momentum and momentum.factor:
        compressor.use_optimizer(SGD(0.0))
        text = (
            f"{clips[0]} would clip gradients whose momentum is adapted, which are larger: so the optimizer's "
            "momentum is kept, on top of the residuals, which costs accuracy; give the Compressor local_clip_norm "
            "instead"
        )
    elif momentum and momentum.factor:
        text = (
            f"the optimizer's momentum ({momentum.factor:g}) is adapted to how long gradients wait in residuals; "
            "optimizer_momentum: keep turns this off"
        )
    elif beta := float(getattr(optimizer, "beta_1", 0.0)):
        text = (
            f"{type(optimizer).__name__} with beta_1 = {beta:g}: momentum on top of residuals costs accuracy, and "
            "only that of SGD can be adapted; set beta_1=0.0"
        )
    if text and first:
        log.warn_once(text)


#: the key in an optimizer's configuration that says that it reduces gradients; some of Keras's errors show it alone
_REDUCES = "hvdcompress.horovod.keras.load_model"
_REFUSED = (
    "the saved optimizer averages gradients over ranks, and a plain one would let ranks drift apart: load the model "
    "with this function, or with compile=False"
)


def load_model(
    filepath: Any,
    compression: str | Method | Plan | Mapping[str, Any] | Compressor = "none",
    *,
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
) -> keras.Model:
    """``keras.saving.load_model`` of a model that was compiled with a :func:`DistributedOptimizer`, and saved.

    ``keras.saving.load_model`` itself refuses such a model, unless it is called with ``compile=False``.

    Args:
        filepath: the file.
        compression: as for :func:`DistributedOptimizer`; a saved model has no residuals, which the Compressor saves.
        custom_objects: the program's own classes and functions, by name.
        options: further arguments of :func:`DistributedOptimizer`.

    Returns:
        The model, compiled with the optimizer that it was saved with, in its state, which reduces gradients again.

    Raises:
        ValueError: as :func:`DistributedOptimizer`.
    """
    given = dict(custom_objects or {})

    def again(cls: Any) -> Any:
        """What Keras makes an optimizer of, in the place of its class."""

        def from_config(config: Mapping[str, Any], *more: Any, **named: Any) -> Any:
            plain = {key: value for key, value in config.items() if key != _REDUCES}
            made = cls.from_config(plain, *more, **named)
            return DistributedOptimizer(made, compression, **options) if _REDUCES in config else made

        return type(cls.__name__, (), {"from_config": staticmethod(from_config)})

    classes = {**vars(keras.optimizers), **given}.items()
    optimizers = {
        name: again(one)
        for name, one in classes
        if isinstance(one, type) and issubclass(one, keras.optimizers.Optimizer)
    }
    return keras.saving.load_model(filepath, custom_objects={**given, **optimizers})


class _Reduction:
    """Reduces gradients over ranks."""

    compressor: Compressor
    reduction: Any
    sparse_as_dense: bool

    def get_config(self) -> dict[str, Any]:
        """The plain optimizer's, with an argument that none takes: in a saved model it would be one, in silence."""
        return {**super().get_config(), _REDUCES: _REFUSED}  # type: ignore[misc]

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        process_set = self.compressor.process_set
        if process_set.size() == 1 or not process_set.included():
            return list(gradients)
        names = self._names(variables)
        pairs = zip(gradients, variables, strict=True)
        return [self._reduce_one(gradient, variable, names[id(variable)]) for gradient, variable in pairs]

    def _names(self, variables: Sequence[Any]) -> dict[int, str]:
        """Variables' names by their identity: paths; the second variable of the optimizer's with a path has "#2" added.

        Args:
            variables: those that an optimizer which is not built yet is going to have.
        """
        optimizer: Any = getattr(self, "inner_optimizer", self)
        seen: Counter[str] = Counter()
        names = {}
        for variable in optimizer._trainable_variables or variables:
            seen[variable.path] += 1
            again = f"#{seen[variable.path]}" if seen[variable.path] > 1 else ""
            names[id(variable)] = f"{variable.path}{again}"
        return names

    def _reduce_one(self, gradient: Any, variable: Any, name: str) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            if not self.sparse_as_dense:
                raise ValueError(
                    f"the gradient of {variable.path!r} is sparse: give DistributedOptimizer sparse_as_dense=True"
                )
            gradient = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
        with self.compressor.naming(name):
            return hvd.allreduce(
                gradient, op=self.reduction, compression=self.compressor, process_set=self.compressor.process_set
            )


class _Reduces(_Reduction):
    """Reduces what Keras is about to clip and apply: unscaled, and accumulated if need be."""

    _reduced: Any

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        vars(self)["_reduced"] = (
            trainable_variables  # Keras would take an attribute's variables for the optimizer's own
        )
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._reduce(grads, self._reduced))  # type: ignore[misc]


class _ReducesScaled(_Reduction):
    """Reduces gradients while they are scaled, so that all ranks see the same ones finite and skip alike."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer  # type: ignore[attr-defined]
        variables = trainable_variables or inner._trainable_variables
        super().apply(self._reduce(grads, variables), trainable_variables)  # type: ignore[misc]


class BroadcastCallback(keras.callbacks.Callback):
    """Gives every rank the weights and the optimizer's state of one rank.

    It does so before the first batch or, where the model is not built by then, after it.

    Args:
        root: the rank whose weights and state are taken.
    """

    def __init__(self, root: int = 0):
        super().__init__()
        self.root = root
        self.done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if there is something to.

        Raises:
            ValueError: the model is compiled with XLA, which can run neither collectives nor codecs.
        """
        if self.model.jit_compile:
            raise ValueError("compile the model with jit_compile=False: XLA can run neither collectives nor codecs")
        if self.model.built:
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that was not possible before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.done:
            return
        for variable in [*self.model.variables, *self.model.optimizer.variables]:
            value = tf.convert_to_tensor(variable)
            dtype = str(variable.dtype)
            sent = value if dtype in _BROADCAST else tf.cast(value, tf.float32 if "float" in dtype else tf.int64)
            name = f"hvdcompress.horovod.keras.broadcast.{variable.path}"
            variable.assign(tf.cast(hvd.broadcast(sent, self.root, name=name), value.dtype))
        self.done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """At the end of each epoch, replaces every metric by its mean over ranks; list it before all that read them."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Average, in name order."""
        for name in sorted(logs or {}):
            value = tf.constant(float(logs[name]), tf.float64)  # type: ignore[index]
            logs[name] = float(hvd.allreduce(value, name=f"hvdcompress.horovod.keras.metric.{name}"))  # type: ignore[index]


class ObserveCallback(keras.callbacks.Callback):
    """Shows the methods each epoch's loss and learning rate, on which some restart their schedule."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Pass them on."""
        metrics = {"learning_rate": float(self.model.optimizer.learning_rate)}
        if logs and "loss" in logs:
            metrics["loss"] = float(logs["loss"])
        self.model.optimizer.compressor.observe(**metrics)
