"""A distributed optimizer for Keras 3 that averages compressed gradients, and callbacks for distributed training.

Horovod's own ``DistributedOptimizer`` does not work with Keras 3 variables. With Keras 2 (``tf_keras``), use Horovod's
optimizer with ``hvdcompress.horovod.tensorflow.Compressor``. ::

    import horovod.tensorflow as hvd
    from hvdcompress.horovod.keras import BroadcastCallback, DistributedOptimizer, MetricAverageCallback

    hvd.init()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), "scalecom", density=0.01)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    model.fit(x, y, callbacks=[BroadcastCallback(), MetricAverageCallback()])
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdcompress.engine.telemetry import log
from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.method import Method
from hvdcompress.parts.momentum import Moment, adapts, corrected_average, heavy_ball
from hvdcompress.plan import Plan

__all__ = ["BroadcastCallback", "DistributedOptimizer", "MetricAverageCallback", "MetricsCallback", "load_model"]

#: {class whose momentum is adapted: its attribute with the first moments}
ADAPTED = {"SGD": "momentums", "Adam": "_momentums", "Adamax": "_m"}
#: dtypes that Horovod can broadcast; others, such as the uint32 of random seeds, are cast
_BROADCAST = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    method: str | Method | Plan | Mapping[str, Any] | Compressor = "auto",
    *,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    **settings: Any,
) -> keras.optimizers.Optimizer:
    """Make a Keras optimizer reduce its gradients over all ranks before it applies them.

    Args:
        optimizer: a new Keras 3 optimizer. It may be a ``LossScaleOptimizer`` around a plain optimizer.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file; or a
            Compressor.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: number of batches whose gradients each rank averages before they are exchanged.
        sparse_as_dense: convert the sparse gradients of embeddings to dense ones. Without it, they are an error.
        process_set: the Horovod process set to reduce over.
        settings: hyper-parameters and plan keys, if ``method`` is not a Compressor.

    Returns:
        The same optimizer object, with a subclass of its class, and the Compressor as attribute ``compressor``.

    Raises:
        ValueError: the optimizer was used before, or already reduces gradients; the backend is not TensorFlow; the
            plan is wrong.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"the Keras backend is {keras.backend.backend()}: set KERAS_BACKEND=tensorflow")
    if optimizer.built:
        raise ValueError("the optimizer has been used already: give DistributedOptimizer a new one")
    if isinstance(optimizer, _Reduction):
        raise ValueError(
            "the optimizer reduces its gradients already: DistributedOptimizer takes it once, so give it a new one"
        )
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if isinstance(method, Compressor):
        if settings:
            raise ValueError(f"method is a Compressor, so give its settings to it: {', '.join(settings)}")
        compressor = method
    else:
        compressor = Compressor(method, process_set=process_set, **settings)

    if backward_passes_per_step > 1:
        if scaled or getattr(optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "backward_passes_per_step must be 1: this optimizer scales the loss or accumulates gradients itself"
            )
        optimizer.gradient_accumulation_steps = backward_passes_per_step
    # Change the class of this object: a new optimizer from get_config() would lose all attributes
    # that a program's own optimizer class does not put into its configuration
    _mix_in(_ReducesScaled if scaled else _Reduces, optimizer)
    optimizer.compressor = compressor
    optimizer.reduction = op
    optimizer.sparse_as_dense = sparse_as_dense
    compressor.all_names = lambda: list(optimizer._names(()).values())
    compressor.is_adapted = True  # as far as possible; a warning says where it is not
    inner = optimizer.inner_optimizer if scaled else optimizer
    if scaled:
        _mix_in(_Adapts, inner)
        compressor.loss_scale = lambda: float(
            tf.convert_to_tensor(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
        )
    # Not setattr(), and no strong reference: Keras would save the optimizer as a part of itself
    vars(inner)["_reducing"] = weakref.ref(optimizer)
    inner._warn_if_not_adapted()
    return optimizer


def _mix_in(mixin: type, optimizer: keras.optimizers.Optimizer) -> None:
    """Make the class of an optimizer a subclass of ``mixin`` and of its present class."""
    cls = type(optimizer)
    object.__setattr__(optimizer, "__class__", type(cls.__name__, (mixin, cls), {"__module__": cls.__module__}))


#: A key in the configuration of an optimizer that reduces gradients. Keras does not know it as an argument, so loading
#: such an optimizer fails, and some of Keras's error messages show only this key: hence its name
_REDUCES = "hvdcompress.horovod.keras.load_model"
_REFUSED = (
    "the saved optimizer averages gradients over ranks, and with a plain one the ranks would drift apart: load the "
    "model with this function, or with compile=False"
)


def load_model(
    filepath: Any,
    method: str | Method | Plan | Mapping[str, Any] | Compressor = "auto",
    *,
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
) -> keras.Model:
    """Load a saved model that was compiled with a :func:`DistributedOptimizer`.

    ``keras.saving.load_model`` refuses such a model, unless it is called with ``compile=False``.

    Args:
        filepath: the file of the model.
        method: as for :func:`DistributedOptimizer`. The saved model does not contain residuals; the Compressor
            saves them.
        custom_objects: the program's own classes and functions by name.
        options: further arguments of :func:`DistributedOptimizer`.

    Returns:
        The model, compiled with the saved optimizer in its saved state. The optimizer reduces gradients again.

    Raises:
        ValueError: see :func:`DistributedOptimizer`.
    """
    given = dict(custom_objects or {})

    def stand_in(cls: Any) -> Any:
        """Return a class whose ``from_config`` makes a distributed optimizer, for Keras to use in place of ``cls``."""

        def from_config(config: Mapping[str, Any], *more: Any, **named: Any) -> Any:
            plain = {key: value for key, value in config.items() if key != _REDUCES}
            optimizer = cls.from_config(plain, *more, **named)
            return DistributedOptimizer(optimizer, method, **options) if _REDUCES in config else optimizer

        return type(cls.__name__, (), {"from_config": staticmethod(from_config)})

    classes = {**vars(keras.optimizers), **given}.items()
    optimizers = {
        name: stand_in(each)
        for name, each in classes
        if isinstance(each, type) and issubclass(each, keras.optimizers.Optimizer)
    }
    return keras.saving.load_model(filepath, custom_objects={**given, **optimizers})


class _Reduction:
    """Base of the mixins that make an optimizer reduce its gradients over ranks."""

    compressor: Compressor
    reduction: Any
    sparse_as_dense: bool

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the plain optimizer, with a key that makes loading it fail.

        Otherwise a saved model would be loaded with a plain optimizer, which does not reduce gradients.
        """
        return {**super().get_config(), _REDUCES: _REFUSED}  # type: ignore[misc]

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of the variables, in the same order."""
        process_set = self.compressor.process_set
        if process_set.size() == 1 or not process_set.included():
            return list(gradients)
        names = self._names(variables)
        pairs = zip(gradients, variables, strict=True)
        return [self._reduce_one(gradient, variable, names[id(variable)]) for gradient, variable in pairs]

    def _names(self, variables: Sequence[Any]) -> dict[int, str]:
        """Return the names of the optimizer's variables by ``id()``.

        A name is the variable's path. Paths need not be unique, so "#2" is appended to the second variable with the
        same path, and so on.

        Args:
            variables: the variables to name if the optimizer is not built yet.
        """
        optimizer: Any = getattr(self, "inner_optimizer", self)
        seen: Counter[str] = Counter()
        names = {}
        for variable in optimizer._trainable_variables or variables:
            seen[variable.path] += 1
            suffix = f"#{seen[variable.path]}" if seen[variable.path] > 1 else ""
            names[id(variable)] = f"{variable.path}{suffix}"
        return names

    def _reduce_one(self, gradient: Any, variable: Any, name: str) -> Any:
        """Return the reduced gradient of a variable; None if it has no gradient."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            if not self.sparse_as_dense:
                raise ValueError(
                    f"the gradient of {variable.path!r} is sparse: give DistributedOptimizer sparse_as_dense=True"
                )
            # The conversion loses the static shape, which the Compressor needs
            gradient = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
        with self.compressor.naming(name):
            return hvd.allreduce(
                gradient, op=self.reduction, compression=self.compressor, process_set=self.compressor.process_set
            )


class _Adapts:
    """Mixin that adapts the momentum of an optimizer to gradients that have waited in residuals.

    Attributes:
        _reducing: returns the optimizer that reduces the gradients: this one, or the ``LossScaleOptimizer`` around it.
    """

    _reducing: Any

    def _algorithm(self) -> str:
        """Return the name of the class whose step is used."""
        return next((cls.__name__ for cls in type(self).__mro__ if "update_step" in vars(cls)), "")

    def _first_moments(self) -> tuple[str, Moment] | None:
        """Return the attribute that has the first moments, and how they are used; None if they are not known."""
        this: Any = self
        name = self._algorithm()
        if name == "SGD":
            rate = -tf.cast(this.learning_rate, tf.float32)
            return ADAPTED[name], heavy_ball(this.momentum, rate, this.nesterov)
        if name in ADAPTED:
            correction = 1.0 - tf.pow(float(this.beta_1), tf.cast(this.iterations + 1, tf.float32))
            return ADAPTED[name], corrected_average(this.beta_1, correction)
        return None

    def _warn_if_not_adapted(self) -> None:
        momentum = getattr(self, "beta_1", getattr(self, "momentum", 0.0))
        compressor = self._reducing().compressor
        methods = compressor.plan.methods
        if (
            momentum
            and compressor.rank_state.rank == 0
            and any(map(adapts, methods))
            and self._algorithm() not in ADAPTED
        ):
            log.warn_once(
                f"{type(self).__name__}: momentum on top of residuals costs accuracy, and that of this optimizer is "
                "not adapted; use SGD, Adam or AdamW, or less momentum. optimizer_momentum: keep hides this warning"
            )

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        found = self._first_moments()
        context: Any = nullcontext()
        if found and found[1].decay:
            names = self._reducing()._names(trainable_variables)
            moments = getattr(self, found[0])
            index = self._get_variable_index  # type: ignore[attr-defined]
            buffers = {names[id(each)]: moments[index(each)] for each in trainable_variables}
            gradients = {names[id(each)]: grad for each, grad in zip(trainable_variables, grads, strict=True)}
            context = self._reducing().compressor._adapting(buffers, gradients, found[1])
        with context:
            super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]


class _Reduces(_Adapts, _Reduction):
    """Mixin that reduces gradients just before Keras clips and applies them, after accumulation and unscaling."""

    _reduced: Any

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # Not setattr(): Keras tracks variables in attributes, and would take these for the optimizer's own
        vars(self)["_reduced"] = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._reduce(grads, self._reduced))  # type: ignore[misc]


class _ReducesScaled(_Reduction):
    """Mixin for ``LossScaleOptimizer`` that reduces gradients while they are still scaled.

    A non-finite gradient on one rank is then non-finite on all ranks, so all of them skip the same steps.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer  # type: ignore[attr-defined]
        variables = trainable_variables or inner._trainable_variables
        super().apply(self._reduce(grads, variables), trainable_variables)  # type: ignore[misc]


class BroadcastCallback(keras.callbacks.Callback):
    """Broadcast the weights and the optimizer state of one rank to all ranks, once.

    The broadcast happens before the first batch. If the model is not built by then, it happens after the first batch.

    Args:
        root: the rank whose weights and optimizer state all ranks get.
    """

    def __init__(self, root: int = 0):
        super().__init__()
        self.root = root
        self.done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model is built.

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
        """Broadcast after the first batch, if the model was not built before it."""
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
    """Replace every metric by its mean over ranks at the end of each epoch.

    List this callback before all callbacks that read metrics, such as ``EarlyStopping``.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Average the metrics in ``logs``, in place."""
        # In sorted order: collectives of one name wait for each other, and dicts may differ in order between ranks
        for name in sorted(logs or {}):
            value = tf.constant(float(logs[name]), tf.float64)  # type: ignore[index]
            logs[name] = float(hvd.allreduce(value, name=f"hvdcompress.horovod.keras.metric.{name}"))  # type: ignore[index]


class MetricsCallback(keras.callbacks.Callback):
    """Pass the loss and the learning rate of each epoch to the Compressor; some methods restart their schedule then."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Call ``Compressor.report_metrics`` with the loss and the learning rate."""
        metrics = {"learning_rate": float(self.model.optimizer.learning_rate)}
        if logs and "loss" in logs:
            metrics["loss"] = float(logs["loss"])
        self.model.optimizer.compressor.report_metrics(**metrics)
