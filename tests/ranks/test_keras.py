"""Tests of the Keras 3 optimizer and callbacks."""

from __future__ import annotations

import os
import time

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
    MetricsCallback,
    load_model,
)
from hvdcompress.horovod.tensorflow import Compressor
from tests.ranks.checks import FOLDER, REORDERED, assert_close, assert_same_on_all_ranks, heavy_tailed, logged
from tests.ranks.drivers.tensorflow import TensorFlowDriver
from tests.ranks.reduced import assert_reduced
from tests.unit.house.pages import run_blocks

pytestmark = pytest.mark.drivers("tensorflow")

SHAPES = TensorFlowDriver.shapes
TOPK = {"density": 0.05}


def distributed(optimizer, method="topk", **settings):
    return DistributedOptimizer(optimizer, method, **{**TOPK, **settings})


def zeros(names, shape):
    return [keras.Variable(np.zeros(shape, np.float32), name=name) for name in names]


def data(driver, samples=64):
    """Return this rank's inputs and targets."""
    x = np.random.default_rng(driver.rank).normal(size=(samples, 32)).astype(np.float32)
    return x, x[:, :1]


def assert_same_variables(driver, variables):
    """Check that variables are equal on all ranks."""
    arrays = {str(number): np.array(variable) for number, variable in enumerate(variables)}
    assert_same_on_all_ranks(arrays, driver.gather, "variables")


class Variables:
    """Variables under an optimizer of learning rate 1, whose steps subtract the reduced gradient."""

    def __init__(self, optimizer):
        self.variables = [keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()]
        optimizer.build(self.variables)
        self.step = tf.function(lambda gradients: optimizer.apply(gradients, self.variables))

    def reduce(self, gradients, scale=1.0):
        """Do a step from zero; return what it has subtracted."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape))
        self.step([tf.constant(gradients[name] * np.float32(scale)) for name in SHAPES])
        return {name: -np.array(variable) for name, variable in zip(SHAPES, self.variables, strict=True)}


class SlowCollectives(Observer):
    """Each collective waits, while the optimizer does what needs no gradients."""

    def sent(self, *_):
        time.sleep(0.005)


def test_blocks_of_the_guides(driver):
    optimizer = distributed(keras.optimizers.SGD(0.1))
    names = {"optimizer": optimizer, "compressor": optimizer.compressor}
    run_blocks("docs/guides/keras.md", names)
    run_blocks("docs/guides/tensorflow.md", names)


@pytest.mark.parametrize("method,op,settings", [("none", "average", {}), ("topk", "sum", {"density": 0.05})])
def test_results_equal_the_loopback(driver, method, op, settings):
    operation = hvd.Sum if op == "sum" else hvd.Average
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), method, op=operation, **settings)
    assert isinstance(optimizer, keras.optimizers.SGD) and type(optimizer).__name__ == "SGD"
    model, net = Variables(optimizer), driver.yardstick(method, settings)
    for step in range(2):
        everyone = driver.everyone(step, SHAPES)
        assert_reduced(driver, model.reduce(everyone[driver.rank]), net, everyone, f"step {step}", REORDERED, op)
    assert set(optimizer.compressor.state_dict()["steps"]) == set(SHAPES), "names are the variables' paths"


@pytest.mark.parametrize(
    "options,plain",
    [
        ({"momentum": 0.9, "nesterov": True}, {"learning_rate": 0.1}),
        ({"momentum": 0.9, "global_clipnorm": 1e-3}, {"learning_rate": 0.1, "global_clipnorm": 1e-3}),
    ],
)
def test_cancelled_momentum_trains_as_an_optimizer_without_momentum(driver, options, plain):
    """Also if a schedule changes the learning rate, and with gradients that Keras has clipped."""
    results = []
    for given in (options, plain):
        given = {"learning_rate": 0.01, **given}
        given["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(given["learning_rate"], 2, 0.7)
        optimizer = distributed(keras.optimizers.SGD(**given), min_elements=1, optimizer_momentum="cancel")
        optimizer.compressor.add_observer(SlowCollectives())  # the next step's learning rate must not be read meanwhile
        model = Variables(optimizer)
        moves = [model.reduce(driver.gradients(step, SHAPES)) for step in range(4)]
        results.append({name: sum(move[name] for move in moves) for name in SHAPES})
    assert_close(*results, (1e-4, 1e-5), "as without momentum")


def test_several_backward_passes_per_step(driver):
    """Keras clips the gradients after they are reduced."""
    optimizer = distributed(keras.optimizers.SGD(1.0, global_clipnorm=1.0), backward_passes_per_step=2)
    model, net = Variables(optimizer), driver.yardstick("topk", TOPK)
    for step in range(2):
        first, second = driver.everyone(2 * step, SHAPES), driver.everyone(2 * step + 1, SHAPES)
        assert not any(change.any() for change in model.reduce(first[driver.rank]).values())
        got = model.reduce(second[driver.rank])
        both = zip(first, second, strict=True)
        means = [{name: (one[name] + other[name]) / 2 for name in SHAPES} for one, other in both]
        reduced = net.allreduce(means)[driver.rank]
        norm = np.sqrt(sum(np.square(array).sum() for array in reduced.values()))
        assert norm > 1
        assert_close(got, {name: array / norm for name, array in reduced.items()}, (1e-4, 1e-5), f"step {step}")
        assert_same_on_all_ranks(got, driver.gather, f"step {step}")
    assert set(optimizer.compressor.state_dict()["steps"].values()) == {2}


def test_overflow_on_one_rank_skips_the_step_on_all(driver):
    """Residuals are kept unscaled, and as if the skipped step had not been."""
    inner = keras.optimizers.SGD(1.0)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=2)
    optimizer = distributed(scaled, "scalecom")
    model, net = Variables(optimizer), driver.yardstick("scalecom", TOPK)
    for step, scale in enumerate((1024.0, 1024.0, 512.0, 512.0, 1024.0)):
        assert float(tf.convert_to_tensor(optimizer.dynamic_scale)) == scale, step
        everyone = driver.everyone(step, SHAPES)
        if step == 1:
            everyone[1] = {name: np.full(shape, np.inf, np.float32) for name, shape in SHAPES.items()}
            assert not any(change.any() for change in model.reduce(everyone[driver.rank], scale).values())
        else:
            assert_reduced(driver, model.reduce(everyone[driver.rank], scale), net, everyone, f"step {step}")
    for name in SHAPES if driver.exact else ():
        np.testing.assert_array_equal(optimizer.compressor.residual(name), net.residual(name, driver.rank))


def test_fit_with_all_callbacks(driver):
    """Ranks begin with different weights. Another batch size follows, after evaluation and prediction."""
    keras.utils.set_random_seed(driver.rank)
    x, _ = data(driver, 640)
    y, layers = x[:, :10].argmax(1), keras.layers
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    rate = keras.optimizers.schedules.CosineDecay(0.0, 60, warmup_target=0.1, warmup_steps=10)
    optimizer = distributed(keras.optimizers.SGD(rate, momentum=0.9), "scalecom", beta=1.0, min_elements=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [BroadcastCallback(), MetricAverageCallback(), MetricsCallback()]
    history = model.fit(x, y, 32, epochs=4, verbose=0, validation_data=(x, y), callbacks=callbacks).history
    assert history["val_accuracy"][-1] > 0.7, history
    assert len(set(driver.gather(str(history["loss"])))) == 1, "metrics are averaged"
    model.evaluate(x[:50], y[:50], verbose=0)
    model.predict(x[:3], verbose=0)
    model.fit(x[:100], y[:100], 33, verbose=0)
    assert_same_variables(driver, model.trainable_variables)
    assert set(optimizer.compressor.state_dict()["steps"].values()) == {4 * 20 + 4}


def test_broadcast_callback_makes_all_variables_equal(driver):
    """Also of a model that is built in its first step, with batch normalization, and of the optimizer."""
    keras.utils.set_random_seed(driver.rank)
    layers = [keras.layers.Dense(64), keras.layers.Dropout(0.1), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(distributed(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
    model.fit(*data(driver), verbose=0, callbacks=[BroadcastCallback()], batch_size=16)
    assert_same_variables(driver, [*model.trainable_variables, *model.optimizer.variables])


@pytest.mark.parametrize("name,accumulates", [("Adam", False), ("AdamW", True), ("Adamax", False)])
def test_late_gradients_leave_nothing_in_the_average_of_adam(driver, name, accumulates):
    """All elements are sent. The first step equals that of the plain optimizer, and beta_1 is not changed."""
    options = {"gradient_accumulation_steps": 2} if accumulates else {}
    optimizer = distributed(getattr(keras.optimizers, name)(0.1, **options), density=1.0, min_elements=1)
    model = Variables(optimizer)
    for step in range(4):
        moved = model.reduce(driver.gradients(step, SHAPES))
        if accumulates and step % 2 == 0:
            continue
        first = optimizer._m if name == "Adamax" else optimizer._momentums
        for average in first:
            np.testing.assert_allclose(np.array(average), 0.0, atol=1e-6)
        assert all(np.abs(array).max() > 0 for array in moved.values())
    assert optimizer.beta_1 == 0.9


def test_optimizers_whose_momentum_is_not_known_are_warned_about(driver):
    with logged() as lines:
        distributed(keras.optimizers.Nadam(0.1))
        distributed(keras.optimizers.RMSprop(0.1))
    assert len([line for line in lines if "Nadam: momentum on top of residuals" in line]) == (driver.rank == 0)
    assert not any("RMSprop" in line for line in lines)


def test_metrics_are_averaged(driver):
    logs = {"loss": float(driver.rank), "accuracy": 0.5}
    MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (driver.world_size - 1) / 2, "accuracy": 0.5}


def test_gradients_of_embeddings_must_be_made_dense(driver):
    (table,) = zeros(["table"], (200, 16))
    gradient = tf.IndexedSlices(tf.ones((2, 16)), tf.constant([1, 3 + driver.rank]), tf.constant((200, 16)))
    optimizer, dense = (distributed(keras.optimizers.SGD(1.0), sparse_as_dense=as_dense) for as_dense in (False, True))
    step = tf.function(lambda: optimizer.apply([gradient], [table]))
    driver.must_raise(ValueError, ["table", "sparse_as_dense=True"], step, same=False)
    dense.build([table])
    tf.function(lambda: dense.apply([gradient], [table]))()
    assert np.array(table).any()
    assert_same_variables(driver, [table])


class OwnSGD(keras.optimizers.SGD):
    """A program's own optimizer, whose configuration lacks its own argument."""

    def __init__(self, factor=2.0, **more):
        super().__init__(**more)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(learning_rate * self.factor * gradient)


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration, as in TensorFlow's tutorial on transformers."""

    def __call__(self, step):
        return 1.0 / (1.0 + tf.cast(step, tf.float32))


def test_optimizer_is_changed_in_place(driver):
    """So attributes that its configuration lacks are kept, and its schedule needs no configuration."""
    for plain, factors in (
        (OwnSGD(factor=3.0, learning_rate=1.0), (3.0, 3.0)),
        (keras.optimizers.SGD(OwnSchedule()), (1.0, 0.5)),
        (keras.optimizers.SGD(lambda: 0.25), (0.25, 0.25)),
    ):
        assert DistributedOptimizer(plain, "none") is plain
        model, net = Variables(plain), driver.yardstick("none", {})
        for step, factor in enumerate(factors):
            everyone = driver.everyone(step, SHAPES)
            got = {name: array / np.float32(factor) for name, array in model.reduce(everyone[driver.rank]).items()}
            assert_reduced(driver, got, net, everyone, f"step {step}", REORDERED)
    reducing = DistributedOptimizer(keras.optimizers.SGD(0.1), "none")
    driver.must_raise(ValueError, ["takes it once"], lambda: DistributedOptimizer(reducing, "none"), same=False)


def test_variables_with_equal_paths_have_their_own_residuals(driver):
    """As two backbones in one model; also if one is frozen in some steps, and twice in one trace."""
    names, shape, net = ["kernel", "kernel#2", "kernel#3"], (64, 32), driver.yardstick("topk", TOPK)
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
        first, second = (
            [heavy_tailed(dict.fromkeys(trained, shape), 2 * step + number, rank) for rank in range(driver.world_size)]
            for number, trained in enumerate((names[1:], names))
        )
        frozen_at_first(*([tf.constant(array) for array in one[driver.rank].values()] for one in (first, second)))
        one, two = (net.allreduce(everyone)[driver.rank] for everyone in (first, second))
        want = {n: start - one.get(n, np.float32(0)) - two[n] for n, start in zip(names, before, strict=True)}
        got = {name: np.array(variable) for name, variable in zip(names, variables, strict=True)}
        assert_close(got, want, REORDERED, f"step {step}")


def test_wrong_optimizers_and_settings_are_refused(driver):
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
        driver.must_raise(ValueError, [word], lambda g=given, s=settings: DistributedOptimizer(*g, **s), same=False)


def test_jit_compile_is_refused(driver):
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    model.compile(distributed(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    run = lambda: model.fit(*data(driver, 4), verbose=0, callbacks=[BroadcastCallback()])  # noqa: E731
    driver.must_raise(ValueError, ["jit_compile=False"], run, same=False)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_training_continues_with_a_loaded_model_and_state(driver, is_scaled):
    """Loaded, the variables of a Sequential lack the model's name in their paths. Keras's own ``load_model`` would make
    a plain optimizer, which trains each rank by itself: it is refused."""
    plain = keras.optimizers.Adam(1e-3)
    if is_scaled:
        plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    (x, y), fit = data(driver), {"verbose": 0, "batch_size": 32, "shuffle": False}
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(1)], name="outer")
    model.compile(distributed(plain, min_elements=0), "mse", jit_compile=False)
    model.fit(x, y, **fit)
    path, folder = str(FOLDER / f"{is_scaled}-{driver.rank}.keras"), FOLDER / f"scaled-{is_scaled}"
    model.save(path)
    model.optimizer.compressor.save(folder)
    words = ["hvdcompress.horovod.keras.load_model"]
    driver.must_raise(ValueError, words, lambda: keras.saving.load_model(path), same=False)
    assert keras.saving.load_model(path, compile=False).count_params() == model.count_params()
    again = load_model(path, "topk", density=0.05, min_elements=0)
    assert type(again.optimizer).__name__ == type(plain).__name__
    for mine, its in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(its), err_msg=mine.path)
    again.jit_compile = False
    again.optimizer.compressor.load(folder)
    for one in (model, again):
        one.fit(x, y, **fit)
    assert set(again.optimizer.compressor.state_dict()["steps"].values()) == {4}
    for mine, its in zip(model.trainable_variables, again.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(its), err_msg=its.path)
