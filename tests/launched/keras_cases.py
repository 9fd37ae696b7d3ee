"""Run by every rank of a launch: each case checks one promise of the Keras 3 optimizer and callbacks."""

from __future__ import annotations

import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
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
from tests.harness import OUT, REORDERED, assert_close, case, heavy_tailed, summed
from tests.launched.tf_model import SHAPES, assert_same_on_all_ranks, reference, refused


class Applied:
    """Variables under an optimizer of learning rate 1: what a step takes from them is the reduced gradient."""

    def __init__(self, optimizer):
        self.variables = [keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()]
        self.optimizer = optimizer
        optimizer.build(self.variables)
        self.step = tf.function(lambda gradients: optimizer.apply(gradients, self.variables))

    def __call__(self, gradients: dict[str, np.ndarray], scale: float = 1.0) -> dict[str, np.ndarray]:
        before = self.values()
        self.step([tf.constant(gradients[name] * np.float32(scale)) for name in SHAPES])
        after = self.values()
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape))
        return {name: before[name] - after[name] for name in SHAPES}

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(variable) for name, variable in zip(SHAPES, self.variables, strict=True)}


def everyone(step: int) -> list[dict[str, np.ndarray]]:
    return [heavy_tailed(SHAPES, step, rank) for rank in range(hvd.size())]


class Slow(Observer):
    """Has each collective wait, so that the optimizer does meanwhile what it does not need gradients for."""

    def sent(self, *args) -> None:
        time.sleep(0.005)


@case
def equals_loopback() -> None:
    for method, settings in (("none", {}), ("topk", {"density": 0.05}), ("scalecom", {"density": 0.02})):
        for op in (hvd.Average, hvd.Sum):
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), method, op=op, **settings)
            assert isinstance(optimizer, keras.optimizers.SGD) and type(optimizer).__name__ == "SGD"
            model, net = Applied(optimizer), reference(method, **settings)
            for step in range(3):
                got = model(everyone(step)[hvd.rank()])
                want = net.allreduce_many(everyone(step), op="sum" if op == hvd.Sum else "average")[0]
                assert_close(got, want, summed(hvd.size()), f"{method} step {step}")
            assert set(optimizer.compressor.state_dict()["steps"]) == set(SHAPES), (
                "tensors are known by their variables' paths"
            )


@case
def a_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """Heavy ball and Nesterov, with a learning rate that a schedule changes; clipping by Keras keeps the momentum."""
    results = {}
    for what, options, rate in (
        ("plain", {}, 0.1),
        ("heavy ball", {"momentum": 0.9}, 0.01),
        ("nesterov", {"momentum": 0.9, "nesterov": True}, 0.01),
        ("clipped", {"momentum": 0.9, "global_clipnorm": 1e9}, 0.01),
        ("kept", {"momentum": 0.9}, 0.01),
    ):
        schedule = keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.7)
        how = {"optimizer_momentum": "keep" if what == "kept" else "cancel"}
        optimizer = keras.optimizers.SGD(schedule, **options)
        optimizer = DistributedOptimizer(optimizer, "topk", density=0.05, min_elements=1, **how)
        optimizer.compressor.watch(Slow())  # the learning rate of the next step must not come in the meantime
        model, moved = Applied(optimizer), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in range(6):
            for name, change in model(everyone(step)[hvd.rank()]).items():
                moved[name] += change
        results[what] = moved
    for what, want in (("heavy ball", "plain"), ("nesterov", "plain"), ("clipped", "kept")):
        assert_close(results[what], results[want], (1e-4, 1e-5), what)


@case
def several_backward_passes_per_step() -> None:
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topk", density=0.05, backward_passes_per_step=3)
    model, net = Applied(optimizer), reference("topk", density=0.05)
    for step in range(2):
        means = [{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(hvd.size())]
        for part in range(3):
            for rank, gradients in enumerate(everyone(3 * step + part)):
                for name, gradient in gradients.items():
                    means[rank][name] += gradient
            got = model(everyone(3 * step + part)[hvd.rank()])
            if part < 2:
                assert not any(change.any() for change in got.values())
        want = net.allreduce_many([{n: g / 3 for n, g in mean.items()} for mean in means])[0]
        assert_close(got, want, REORDERED, f"step {step}")
    assert set(optimizer.compressor.state_dict()["steps"].values()) == {2}


@case
def gradients_are_clipped_after_they_are_reduced() -> None:
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0), "topk", density=0.05)
    got = Applied(optimizer)(everyone(0)[hvd.rank()])
    assert_same_on_all_ranks(got, "clipped")
    norm = np.sqrt(sum(float((change**2).sum()) for change in got.values()))
    assert abs(norm - 1.0) < 1e-4, norm


@case
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    inner = keras.optimizers.SGD(1.0)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=3)
    optimizer = DistributedOptimizer(scaled, "scalecom", density=0.02)
    model, net = Applied(optimizer), reference("scalecom", density=0.02)
    scale = 1024.0
    for step in range(6):
        gradients = everyone(step)
        bad = step == 1
        if bad and hvd.rank() == 1:
            gradients[1] = {name: np.full(shape, np.inf, np.float32) for name, shape in SHAPES.items()}
        got = model(gradients[hvd.rank()], scale)
        if bad:
            assert not any(change.any() for change in got.values()), "the step is skipped"
            scale /= 2
        else:
            assert_close(got, net.allreduce_many(gradients)[0], summed(hvd.size()), f"step {step}")
            scale *= 2 if step == 4 else 1
        assert float(tf.convert_to_tensor(optimizer.dynamic_scale)) == scale, step
    for name in SHAPES if hvd.size() == 2 else ():  # kept unscaled, and as if the bad step had not been
        np.testing.assert_array_equal(optimizer.compressor.residual(name), net.residual(name, hvd.rank()))


def digits() -> tuple[np.ndarray, ...]:
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    x, y = (raw.images[order, :, :, None] / 16 - 0.3).astype(np.float32), raw.target[order]
    return x[:1347][hvd.rank() :: hvd.size()], y[:1347][hvd.rank() :: hvd.size()], x[1347:], y[1347:]


def net(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


@case
def fit_on_digits_with_scalecom_ends_near_none() -> None:
    x, y, x_held_out, y_held_out = digits()
    loss, ends = keras.losses.SparseCategoricalCrossentropy(from_logits=True), {}
    for method, settings in (("none", {}), ("scalecom", {"density": 0.05, "beta": 1.0})):
        model = net(seed=hvd.rank())  # the callback makes them alike
        rate = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=0.1, warmup_steps=10)
        optimizer = DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), method, **settings)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
        callbacks = [BroadcastCallback(), MetricAverageCallback(), ObserveCallback()]
        given = {"batch_size": 32, "epochs": 5, "verbose": 0, "shuffle": True}
        history = model.fit(x, y, validation_data=(x_held_out, y_held_out), callbacks=callbacks, **given)
        assert_same_on_all_ranks({v.path: np.array(v) for v in model.trainable_variables}, method)
        assert len(set(hvd.allgather_object(str(history.history["loss"])))) == 1, "metrics are averaged"
        ends[method] = 100 * history.history["val_accuracy"][-1]
    assert ends["none"] > 95 and ends["scalecom"] > ends["none"] - 1.0, ends


@case
def broadcast_makes_ranks_alike() -> None:
    for built in (True, False):
        keras.utils.set_random_seed(hvd.rank())
        layers = [keras.layers.Dense(64), keras.layers.Dropout(0.1), keras.layers.BatchNormalization()]
        model = keras.Sequential(([keras.Input((32,))] if built else []) + [*layers, keras.layers.Dense(1)])
        if built:
            first = hvd.allgather_object(np.array(model.variables[0]).tobytes())
            assert len(set(first)) == hvd.size(), "ranks start apart"
        optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3), "topk", density=0.1)
        model.compile(optimizer, "mse", jit_compile=False)
        x = np.random.default_rng(hvd.rank()).normal(size=(64, 32)).astype(np.float32)
        model.fit(x, x[:, :1], verbose=0, callbacks=[BroadcastCallback()], batch_size=16)
        found = {f"{i}": np.array(v) for i, v in enumerate([*model.trainable_variables, *optimizer.variables])}
        assert_same_on_all_ranks(found, f"built {built}")


@case
def auto_takes_beta1_out_of_adam() -> None:
    assert DistributedOptimizer(keras.optimizers.Adam(1e-3), "auto").beta_1 == 0.0
    assert DistributedOptimizer(keras.optimizers.Adam(1e-3), Compressor("auto")).beta_1 == 0.0
    assert DistributedOptimizer(keras.optimizers.Adam(1e-3), "auto", without_beta1=False).beta_1 == 0.9
    assert DistributedOptimizer(keras.optimizers.Adam(1e-3), "topk").beta_1 == 0.9


@case
def metrics_are_averaged() -> None:
    logs = {"loss": float(hvd.rank()), "accuracy": 0.5}
    MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2, "accuracy": 0.5}


@case
def evaluate_and_other_batches_between_epochs() -> None:
    model = net(0)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01), "scalecom", density=0.02, warmup={"steps": 3})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    x, y, x_held_out, y_held_out = digits()
    for size in (16, 7, 33):
        model.fit(x[:100], y[:100], batch_size=size, verbose=0)
        model.evaluate(x_held_out[:50], y_held_out[:50], verbose=0)
        model.predict(x_held_out[:3], verbose=0)
    assert_same_on_all_ranks({v.path: np.array(v) for v in model.trainable_variables}, "after all")
    assert set(optimizer.compressor.state_dict()["steps"].values()) == {7 + 15 + 4}


@case
def embeddings_must_be_made_dense() -> None:
    table = keras.Variable(np.ones((200, 16), np.float32), name="table")
    for as_dense in (False, True):
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topk", density=0.5, sparse_as_dense=as_dense)
        rows, shape = tf.constant([1, 3 + hvd.rank()]), tf.constant((200, 16))
        gradient = tf.IndexedSlices(tf.ones((2, 16)), rows, shape)
        step = tf.function(lambda g, optimizer=optimizer: optimizer.apply([g], [table]))
        if as_dense:
            optimizer.build([table])
            step(gradient)
            assert_same_on_all_ranks({"table": np.array(table)}, "dense")
        else:
            refused(ValueError, ["table", "sparse_as_dense=True"], lambda s=step, g=gradient: s(g))


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


@case
def the_optimizer_is_the_programs_own_object() -> None:
    """What its configuration does not say is kept; a schedule or a function need not have one."""
    world_size = hvd.size()
    for make, factors in (
        (lambda: Twisted(twist=3.0, learning_rate=1.0), (3.0, 3.0)),
        (lambda: keras.optimizers.SGD(Falling()), (1.0, 0.5)),
        (lambda: keras.optimizers.SGD(lambda: 0.25), (0.25, 0.25)),
    ):
        plain = make()
        optimizer = DistributedOptimizer(plain, "none")
        assert optimizer is plain
        applied, net = Applied(optimizer), reference("none")
        for step, factor in enumerate(factors):
            given = everyone(step)
            want = net.allreduce_many(given)[0]
            got = applied(given[hvd.rank()])
            assert_close(
                got, {n: np.float32(factor) * a for n, a in want.items()}, REORDERED, f"{world_size} ranks, {step}"
            )
    reducing = DistributedOptimizer(keras.optimizers.SGD(0.1), "none")
    refused(ValueError, ["takes it once"], lambda: DistributedOptimizer(reducing, "none"))


@case
def variables_with_one_path_have_residuals_of_their_own() -> None:
    """As two backbones in one model have; in another order, too, and twice in one trace."""
    shape, rank = (64, 32), hvd.rank()
    variables = [keras.Variable(np.zeros(shape, np.float32), name="kernel") for _ in range(3)]
    assert len({variable.path for variable in variables}) == 1
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topk", density=0.05)
    optimizer.build(variables)
    names = ["kernel", "kernel#2", "kernel#3"]
    net = reference("topk", density=0.05)

    @tf.function
    def twice(first, second):
        optimizer.apply(first, variables)
        optimizer.apply(second, variables)

    for step in range(3):
        steps = [
            [heavy_tailed(dict.fromkeys(names, shape), 2 * step + i, r) for r in range(hvd.size())] for i in (0, 1)
        ]
        before = [np.array(variable) for variable in variables]
        twice(*([tf.constant(given[rank][name]) for name in names] for given in steps))
        sums = [net.allreduce_many(given)[0] for given in steps]
        for name, variable, start in zip(names, variables, before, strict=True):
            want = start - sums[0][name] - sums[1][name]
            assert_close({name: np.array(variable)}, {name: want}, REORDERED, f"step {step}")


@case
def variables_that_are_frozen_at_first_keep_their_own_residuals() -> None:
    shape, names = (64, 32), ["kernel", "kernel#2"]
    variables = [keras.Variable(np.zeros(shape, np.float32), name="kernel") for _ in names]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topk", density=0.05)
    optimizer.build(variables)
    net = reference("topk", density=0.05)
    frozen = tf.function(lambda gradient: optimizer.apply([None, gradient], variables))
    thawed = tf.function(lambda *gradients: optimizer.apply(list(gradients), variables))
    for step in range(4):
        trained, apply = (names, thawed) if step % 2 else (names[1:], frozen)
        inputs = [heavy_tailed(dict.fromkeys(trained, shape), step, rank) for rank in range(hvd.size())]
        before = [np.array(variable) for variable in variables]
        apply(*(tf.constant(inputs[hvd.rank()][name]) for name in trained))
        reduced = net.allreduce_many(inputs)[0]
        for name, variable, start in zip(names, variables, before, strict=True):
            want = start - reduced.get(name, np.float32(0))
            assert_close({name: np.array(variable)}, {name: want}, REORDERED, f"step {step}")


@case
def misuse_is_refused() -> None:
    used = keras.optimizers.SGD(0.1)
    used.build([keras.Variable(np.zeros(3))])
    refused(ValueError, ["used already"], lambda: DistributedOptimizer(used, "topk"))
    comp = Compressor("topk")
    refused(ValueError, ["density"], lambda: DistributedOptimizer(keras.optimizers.SGD(0.1), comp, density=0.1))
    refused(ValueError, ["density"], lambda: DistributedOptimizer(keras.optimizers.SGD(0.1), "topk", density=7.0))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    words = ["backward_passes_per_step"]
    refused(ValueError, words, lambda: DistributedOptimizer(scaled, "topk", backward_passes_per_step=2))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), "topk"), "mse", jit_compile=True)
    x = np.zeros((4, 3), np.float32)
    refused(
        ValueError, ["jit_compile=False"], lambda: model.fit(x, x[:, :1], verbose=0, callbacks=[BroadcastCallback()])
    )


@case
def a_saved_model_is_not_loaded_with_a_plain_optimizer() -> None:
    """It would train each rank by itself."""
    x, loss = np.random.default_rng(hvd.rank()).normal(size=(64, 32)).astype(np.float32), "mse"
    for number, plain in enumerate(
        (keras.optimizers.Adam(1e-3), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    ):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(plain, "topk", density=0.1), loss, jit_compile=False)
        model.fit(x, x[:, :1], verbose=0, batch_size=32)
        path = str(OUT / f"model-{number}-{hvd.rank()}.keras")
        model.save(path)
        refused(ValueError, ["hvdcompress.horovod.keras.load_model"], lambda p=path: keras.saving.load_model(p))
        assert keras.saving.load_model(path, compile=False).count_params() == model.count_params()
        again = load_model(path, "topk", density=0.1)
        assert type(again.optimizer).__name__ == type(plain).__name__
        for mine, its in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.array(mine), np.array(its), err_msg=mine.path)
        again.jit_compile = False
        again.fit(x, x[:, :1], verbose=0, batch_size=32)
        assert set(again.optimizer.compressor.state_dict()["steps"].values()) == {2}
        assert_same_on_all_ranks({v.path: np.array(v) for v in again.trainable_variables}, path)


@case
def a_training_goes_on_with_a_loaded_model_and_state() -> None:
    """Keras leaves the model's name out of the paths of a Sequential's variables when it is loaded."""
    x, loss = np.random.default_rng(hvd.rank()).normal(size=(64, 32)).astype(np.float32), "mse"
    settings = {"density": 0.1, "min_elements": 0}
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(1)], name="outer")
    plain = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(DistributedOptimizer(plain, "topk", **settings), loss, jit_compile=False)

    def train(one: keras.Model) -> None:
        one.fit(x, x[:, :1], verbose=0, batch_size=16, shuffle=False)

    train(model)
    path = str(OUT / f"goes-on-{hvd.rank()}.keras")
    model.save(path)
    model.optimizer.compressor.save(OUT / "goes-on")
    hvd.allreduce(tf.zeros(1), name="both.saved")
    train(model)
    again = load_model(path, "topk", **settings)
    again.jit_compile = False
    again.optimizer.compressor.load(OUT / "goes-on")
    train(again)
    assert set(again.optimizer.compressor.state_dict()["steps"].values()) == {8}
    for mine, its in zip(model.trainable_variables, again.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(its), err_msg=its.path)
