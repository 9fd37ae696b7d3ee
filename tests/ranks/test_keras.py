"""Tests of the Keras 3 optimizer and callbacks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

os.environ["KERAS_BACKEND"] = "tensorflow"

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.horovod.keras import (
    BroadcastCallback,
    DistributedOptimizer,
    MetricAverageCallback,
    ObserveCallback,
    load_model,
)
from hvdcompress.horovod.tensorflow import Compressor
from tests.ranks.checks import FOLDER, REORDERED, assert_close, heavy_tailed
from tests.ranks.tf_model import (
    SHAPES,
    assert_reduced,
    assert_same_on_all_ranks,
    assert_same_variables,
    everyone,
    gradients,
    reference,
    refused,
)

pytestmark = pytest.mark.drivers("tensorflow")


def distributed(optimizer: Any, method: str = "topk", density: float = 0.05, **settings: Any) -> Any:
    return DistributedOptimizer(optimizer, method, density=density, **settings)


def zeros(names: list[str], shape: tuple[int, ...]) -> list[keras.Variable]:
    return [keras.Variable(np.zeros(shape, np.float32), name=name) for name in names]


class Applied:
    """Variables under an optimizer of learning rate 1: what a step takes from them is the reduced gradient."""

    def __init__(self, optimizer: Any):
        self.variables = [keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()]
        optimizer.build(self.variables)
        self.step = tf.function(lambda gradients: optimizer.apply(gradients, self.variables))

    def __call__(self, given: dict[str, np.ndarray], scale: float = 1.0) -> dict[str, np.ndarray]:
        self.step([tf.constant(given[name] * np.float32(scale)) for name in SHAPES])
        reduced = {name: -np.array(variable) for name, variable in zip(SHAPES, self.variables, strict=True)}
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape))
        return reduced


class Slow(Observer):
    """Has each collective wait, so that the optimizer does meanwhile what it does not need gradients for."""

    def sent(self, *args: Any) -> None:
        time.sleep(0.005)


def test_equals_loopback() -> None:
    for method, op, settings in (("none", "average", {}), ("topk", "sum", {"density": 0.05})):
        operation = hvd.Sum if op == "sum" else hvd.Average
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), method, op=operation, **settings)
        assert isinstance(optimizer, keras.optimizers.SGD) and type(optimizer).__name__ == "SGD"
        model, net = Applied(optimizer), reference(method, **settings)
        for step in range(2):
            want = net.allreduce_many(everyone(step), op=op)[0]
            assert_close(model(gradients(step)), want, REORDERED, f"{method} step {step}")
        assert set(optimizer.compressor.state_dict()["steps"]) == set(SHAPES), "names are the variables' paths"


def test_a_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """Also with Nesterov, and a learning rate that a schedule changes; clipping by Keras keeps the momentum."""
    results = {}
    for what, options, rate in (
        ("plain", {}, 0.1),
        ("nesterov", {"momentum": 0.9, "nesterov": True}, 0.01),
        ("clipped", {"momentum": 0.9, "global_clipnorm": 1e9}, 0.01),
        ("kept", {"momentum": 0.9}, 0.01),
    ):
        schedule = keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.7)
        how = {"min_elements": 1, "optimizer_momentum": "keep" if what == "kept" else "cancel"}
        optimizer = distributed(keras.optimizers.SGD(schedule, **options), **how)
        optimizer.compressor.watch(Slow())  # the learning rate of the next step must not come in the meantime
        model, moved = Applied(optimizer), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in range(4):
            for name, change in model(gradients(step)).items():
                moved[name] += change
        results[what] = moved
    for what, want in (("nesterov", "plain"), ("clipped", "kept")):
        assert_close(results[what], results[want], (1e-4, 1e-5), what)


def test_several_backward_passes_per_step() -> None:
    """Keras clips the gradients after they are reduced."""
    optimizer = distributed(keras.optimizers.SGD(1.0, global_clipnorm=1.0), backward_passes_per_step=2)
    model, net = Applied(optimizer), reference("topk", density=0.05)
    for step in range(2):
        first, second = everyone(2 * step), everyone(2 * step + 1)
        assert not any(change.any() for change in model(first[hvd.rank()]).values())
        got = model(second[hvd.rank()])
        both = zip(first, second, strict=True)
        means = [{name: (one[name] + other[name]) / 2 for name in SHAPES} for one, other in both]
        reduced = net.allreduce_many(means)[0]
        norm = np.sqrt(sum(np.square(array).sum() for array in reduced.values()))
        want = {name: array / norm for name, array in reduced.items()}
        assert norm > 1
        assert_close(got, want, (1e-4, 1e-5), f"step {step}")
        assert_same_on_all_ranks(got, f"step {step}")
    assert set(optimizer.compressor.state_dict()["steps"].values()) == {2}


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    inner = keras.optimizers.SGD(1.0)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=2)
    optimizer = distributed(scaled, "scalecom")
    model, net = Applied(optimizer), reference("scalecom", density=0.05)
    for step, scale in enumerate((1024.0, 1024.0, 512.0, 512.0, 1024.0)):
        assert float(tf.convert_to_tensor(optimizer.dynamic_scale)) == scale, step
        given = everyone(step)
        if step == 1:
            given[1] = {name: np.full(shape, np.inf, np.float32) for name, shape in SHAPES.items()}
            assert not any(change.any() for change in model(given[hvd.rank()], scale).values()), "the step is skipped"
        else:
            assert_reduced(model(given[hvd.rank()], scale), net, given, step)
    for name in SHAPES if hvd.size() == 2 else ():  # kept unscaled, and as if the bad step had not been
        np.testing.assert_array_equal(optimizer.compressor.residual(name), net.residual(name, hvd.rank()))


def test_fit_trains_alike_on_all_ranks() -> None:
    """From different weights, with all callbacks; then with another batch size, after evaluation and prediction."""
    keras.utils.set_random_seed(hvd.rank())
    x = np.random.default_rng(hvd.rank()).normal(size=(640, 32)).astype(np.float32)
    y, layers = x[:, :10].argmax(1), keras.layers
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    rate = keras.optimizers.schedules.CosineDecay(0.0, 60, warmup_target=0.1, warmup_steps=10)
    optimizer = distributed(keras.optimizers.SGD(rate, momentum=0.9), "scalecom", beta=1.0, min_elements=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [BroadcastCallback(), MetricAverageCallback(), ObserveCallback()]
    history = model.fit(x, y, 32, epochs=4, verbose=0, validation_data=(x, y), callbacks=callbacks).history
    assert history["val_accuracy"][-1] > 0.7, history
    assert len(set(hvd.allgather_object(str(history["loss"])))) == 1, "metrics are averaged"
    model.evaluate(x[:50], y[:50], verbose=0)
    model.predict(x[:3], verbose=0)
    model.fit(x[:100], y[:100], 33, verbose=0)
    assert_same_variables(model.trainable_variables, "after all")
    assert set(optimizer.compressor.state_dict()["steps"].values()) == {4 * 20 + 4}


def test_broadcast_makes_ranks_alike() -> None:
    """Also a model that is built in its first step, with batch normalization, and the optimizer's variables."""
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Dense(64), keras.layers.Dropout(0.1), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(distributed(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
    x = np.random.default_rng(hvd.rank()).normal(size=(64, 32)).astype(np.float32)
    model.fit(x, x[:, :1], verbose=0, callbacks=[BroadcastCallback()], batch_size=16)
    assert_same_variables([*model.trainable_variables, *model.optimizer.variables], "model and optimizer")


def test_auto_takes_beta1_out_of_adam() -> None:
    for method, options, beta1 in (
        ("auto", {}, 0.0),
        (Compressor("auto"), {}, 0.0),
        ("auto", {"without_beta1": False}, 0.9),
        ("topk", {}, 0.9),
    ):
        assert DistributedOptimizer(keras.optimizers.Adam(1e-3), method, **options).beta_1 == beta1


def test_metrics_are_averaged() -> None:
    logs = {"loss": float(hvd.rank()), "accuracy": 0.5}
    MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2, "accuracy": 0.5}


def test_embeddings_must_be_made_dense() -> None:
    (table,) = zeros(["table"], (200, 16))
    gradient = tf.IndexedSlices(tf.ones((2, 16)), tf.constant([1, 3 + hvd.rank()]), tf.constant((200, 16)))
    optimizer, dense = (distributed(keras.optimizers.SGD(1.0), sparse_as_dense=as_dense) for as_dense in (False, True))
    step = tf.function(lambda: optimizer.apply([gradient], [table]))
    refused(ValueError, ["table", "sparse_as_dense=True"], step)
    dense.build([table])
    tf.function(lambda: dense.apply([gradient], [table]))()
    assert np.array(table).any()
    assert_same_variables([table], "dense")


class Twisted(keras.optimizers.SGD):
    """A program's own optimizer, whose configuration lacks its own argument."""

    def __init__(self, twist=2.0, **more):
        super().__init__(**more)
        self.twist = twist

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(learning_rate * self.twist * gradient)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration, as in TensorFlow's tutorial on transformers."""

    def __call__(self, step):
        return 1.0 / (1.0 + tf.cast(step, tf.float32))


def test_the_optimizer_is_the_programs_own_object() -> None:
    """What its configuration does not say is kept; a schedule or a function need not have one."""
    for plain, factors in (
        (Twisted(twist=3.0, learning_rate=1.0), (3.0, 3.0)),
        (keras.optimizers.SGD(Falling()), (1.0, 0.5)),
        (keras.optimizers.SGD(lambda: 0.25), (0.25, 0.25)),
    ):
        optimizer = DistributedOptimizer(plain, "none")
        assert optimizer is plain
        applied, net = Applied(optimizer), reference("none")
        for step, factor in enumerate(factors):
            got = {name: array / np.float32(factor) for name, array in applied(gradients(step)).items()}
            assert_reduced(got, net, everyone(step), step, REORDERED)
    reducing = DistributedOptimizer(keras.optimizers.SGD(0.1), "none")
    refused(ValueError, ["takes it once"], lambda: DistributedOptimizer(reducing, "none"))


def test_variables_with_one_path_have_residuals_of_their_own() -> None:
    """As two backbones in one model have; also where one is frozen in some steps, and twice in one trace."""
    names, shape, net = ["kernel", "kernel#2", "kernel#3"], (64, 32), reference("topk", density=0.05)
    variables = zeros(["kernel"] * 3, shape)
    assert len({variable.path for variable in variables}) == 1
    optimizer = distributed(keras.optimizers.SGD(1.0))
    optimizer.build(variables)

    @tf.function
    def frozen_at_first(last_two, all_three):
        optimizer.apply([None, *last_two], variables)
        optimizer.apply(all_three, variables)

    for step in range(3):
        before = [np.array(variable) for variable in variables]
        drawn = [
            [heavy_tailed(dict.fromkeys(trained, shape), 2 * step + number, rank) for rank in range(hvd.size())]
            for number, trained in enumerate((names[1:], names))
        ]
        frozen_at_first(*([tf.constant(array) for array in given[hvd.rank()].values()] for given in drawn))
        first, second = (net.allreduce_many(given)[0] for given in drawn)
        for name, variable, start in zip(names, variables, before, strict=True):
            want = start - first.get(name, np.float32(0)) - second[name]
            assert_close({name: np.array(variable)}, {name: want}, REORDERED, f"step {step}")


def test_misuse_is_refused() -> None:
    used, sgd = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    used.build(zeros(["w"], (3,)))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for word, optimizer, method, settings in (
        ("used already", used, "topk", {}),
        ("density", sgd, Compressor("topk"), {"density": 0.1}),
        ("density", sgd, "topk", {"density": 7.0}),
        ("backward_passes_per_step", scaled, "topk", {"backward_passes_per_step": 2}),
    ):
        given = (optimizer, method)
        refused(ValueError, [word], lambda given=given, settings=settings: DistributedOptimizer(*given, **settings))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(distributed(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    x = np.zeros((4, 3), np.float32)
    refused(
        ValueError, ["jit_compile=False"], lambda: model.fit(x, x[:, :1], verbose=0, callbacks=[BroadcastCallback()])
    )


def test_a_training_goes_on_with_a_loaded_model_and_state() -> None:
    """Keras leaves the model's name out of the paths of a Sequential's variables when it is loaded. With a plain
    optimizer, it would train each rank by itself."""
    x = np.random.default_rng(hvd.rank()).normal(size=(64, 32)).astype(np.float32)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    for name, plain in (("adam", keras.optimizers.Adam(1e-3)), ("scaled", scaled)):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(1)], name="outer")
        model.compile(distributed(plain, min_elements=0), "mse", jit_compile=False)
        model.fit(x, x[:, :1], verbose=0, batch_size=32, shuffle=False)
        path, folder = str(FOLDER / f"{name}-{hvd.rank()}.keras"), FOLDER / name
        model.save(path)
        model.optimizer.compressor.save(folder)
        refused(ValueError, ["hvdcompress.horovod.keras.load_model"], lambda p=path: keras.saving.load_model(p))
        assert keras.saving.load_model(path, compile=False).count_params() == model.count_params()
        again = load_model(path, "topk", density=0.05, min_elements=0)
        assert type(again.optimizer).__name__ == type(plain).__name__
        for mine, its in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.array(mine), np.array(its), err_msg=mine.path)
        again.jit_compile = False
        again.optimizer.compressor.load(folder)
        for one in (model, again):
            one.fit(x, x[:, :1], verbose=0, batch_size=32, shuffle=False)
        assert set(again.optimizer.compressor.state_dict()["steps"].values()) == {4}
        for mine, its in zip(model.trainable_variables, again.trainable_variables, strict=True):
            np.testing.assert_array_equal(np.array(mine), np.array(its), err_msg=its.path)
