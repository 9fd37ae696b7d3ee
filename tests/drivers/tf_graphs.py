"""Cases of the TensorFlow driver alone: how graphs are traced, called and optimised."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import assert_close, case, summed
from tf_model import SHAPES, Model, compressor, everyone, reference, refused

from hvdcompress.tensorflow import Compressor


@case
def names_are_ordinals_by_default() -> None:
    comp = Compressor("topk", density=0.05)
    model = Model(comp)
    model(everyone(0)[hvd.rank()])
    assert sorted(comp.state_dict()["steps"]) == ["0", "1", "2", "3", "4"]
    assert comp.residual("0").shape == SHAPES["a"] and comp.residual("0").any()
    assert "topk" in comp.describe()


@case
def retraces_and_other_functions_share_one_state() -> None:
    for method, settings in (("scalecom", {"density": 0.02}), ("topk", {"density": 0.02, "warmup": {"steps": 2}})):
        comp = compressor(method, **settings)
        model, net = Model(comp), reference(method, **settings)
        weights = model.variables
        traces: list[tf.TensorShape] = []

        def step(batch, model=model, weights=weights):  # a function of its own
            traces.append(batch.shape)  # noqa: B023
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(w) for w in weights]) * tf.reduce_mean(batch)
            return hvd.DistributedGradientTape(tape, compression=model.compressor).gradient(loss, weights)

        second, evaluate = tf.function(step), tf.function(lambda x: tf.reduce_sum(x))
        for number in range(8):
            inputs = everyone(number)
            if number % 2:  # another function, and a new batch shape every time
                value = 0.5 + number
                got = dict(zip(SHAPES, [g.numpy() for g in second(tf.fill([number, 3], value))], strict=True))
                inputs = [{n: np.full(s, value, np.float32) for n, s in SHAPES.items()} for _ in range(hvd.size())]
            else:
                got = model(inputs[hvd.rank()])
            evaluate(tf.zeros([number + 1]))
            assert_close(got, net.allreduce_many(inputs)[0], summed(hvd.size()), f"{method} step {number}")
        assert len(traces) == 4


@case
def eager_execution() -> None:
    comp = compressor("scalecom", density=0.02)
    model, net = Model(comp), reference("scalecom", density=0.02)
    for step in range(3):
        inputs = everyone(step)
        got = model(inputs[hvd.rank()], model.reduced)  # the tape is outside of any tf.function
        assert_close(got, net.allreduce_many(inputs)[0], summed(hvd.size()), f"step {step}")


@case
def a_gradient_by_itself_needs_a_name() -> None:
    """Reduced eagerly, each call was another tensor, and its residual was never used again."""
    comp, net = compressor("topk", density=0.02), reference("topk", density=0.02)
    first = next(iter(SHAPES))
    reduce = lambda given: hvd.allreduce(tf.constant(given[first]), compression=comp)  # noqa: E731
    refused(ValueError, ["DistributedGradientTape", "naming"], lambda: reduce(everyone(0)[hvd.rank()]))
    for step in range(3):
        inputs = [{first: one[first]} for one in everyone(step)]
        with comp.naming(first):
            got = {first: reduce(inputs[hvd.rank()]).numpy()}
        assert_close(got, net.allreduce_many(inputs)[0], summed(hvd.size()), f"step {step}")


@case
def steps_in_a_loop_inside_one_function() -> None:
    for method, settings in (("topk", {"density": 0.02}), ("scalecom", {"density": 0.02, "warmup": {"steps": 3}})):
        model, net = Model(compressor(method, **settings)), reference(method, **settings)
        count = 40  # its iterations depend on nothing but the exchange, so they overlap where that lets them

        @tf.function
        def loop(fed, model=model, count=count):
            sums = [tf.zeros(shape) for shape in SHAPES.values()]
            for i in tf.range(count):
                reduced = model.reduced([g[i] for g in fed])
                sums = [a + b for a, b in zip(sums, reduced, strict=True)]
            return sums

        for call in range(2):
            steps = [everyone(call * count + i) for i in range(count)]
            fed = [tf.constant(np.stack([step[hvd.rank()][name] for step in steps])) for name in SHAPES]
            got = dict(zip(SHAPES, [g.numpy() for g in loop(fed)], strict=True))
            want = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            for step in steps:
                for name, reduced in net.allreduce_many(step)[0].items():
                    want[name] += reduced
            assert_close(got, want, summed(hvd.size()), f"{method} call {call}")


@case
def constant_gradients_are_exchanged_in_every_step() -> None:
    """TensorFlow computes what depends on constants once, when it optimises a graph, if it may."""
    weights = [tf.Variable(tf.zeros((64, 64))), tf.Variable(tf.zeros((64, 65)))]
    for method in ("topk", "none"):
        comp = Compressor(method)

        @tf.function
        def step(comp=comp):
            with tf.GradientTape() as tape:
                loss = 2 * tf.reduce_sum(weights[0]) + 3 * tf.reduce_sum(weights[1])
            return hvd.DistributedGradientTape(tape, compression=comp).gradient(loss, weights)

        for number in range(3):
            step()
            assert comp.state_dict()["steps"] == {"0": number + 1, "1": number + 1}, comp.state_dict()["steps"]


@case
def several_models_and_optimizers() -> None:
    comps = [compressor("topk", density=0.1), compressor("topk", density=0.1), compressor("scalecom")]
    models = [Model(comp) for comp in comps]

    @tf.function
    def both(fed):
        return [model.reduced(fed) for model in models]

    net = reference("topk", density=0.1)
    for step in range(3):
        inputs = everyone(step)
        first, second, _ = both([tf.constant(inputs[hvd.rank()][name]) for name in SHAPES])
        want = net.allreduce_many(inputs)[0]
        for reduced in (first, second):
            got = dict(zip(SHAPES, [g.numpy() for g in reduced], strict=True))
            assert_close(got, want, summed(hvd.size()), f"step {step}")
    assert len({comp.prefix for comp in comps}) == 3


@case
def variables_without_a_gradient() -> None:
    comp = Compressor("topk", density=0.1)
    used, unused = tf.Variable(tf.ones((40, 40))), tf.Variable(tf.ones((50, 50)))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used * used)
        return hvd.DistributedGradientTape(tape, compression=comp).gradient(loss, [unused, used])

    nothing, gradient = step()
    assert nothing is None and gradient.shape == (40, 40) and list(comp.state_dict()["steps"]) == ["0"]


@case
def two_models_of_equal_shapes_on_one_compressor() -> None:
    """Their tensors would share residuals."""
    comp = compressor("topk", density=0.05)
    Model(comp)(everyone(0)[hvd.rank()])
    other = Model(comp)
    refused(ValueError, ["another model", "one for each"], lambda: other(everyone(1)[hvd.rank()]))
