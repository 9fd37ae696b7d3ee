"""Tests of Horovod for TensorFlow alone: how graphs are traced, called and optimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from tests.ranks.checks import FOLDER, assert_close, summed
from tests.ranks.drivers.tensorflow import TensorFlowDriver, TensorFlowHandle, with_gradient
from tests.ranks.promises.test_failures import Faulty
from tests.ranks.reduced import assert_reduced

pytestmark = pytest.mark.drivers("tensorflow")

SHAPES = TensorFlowDriver.shapes
EQUAL = dict.fromkeys(("backbone", "neck", "head"), (40, 30))  #: tensors that only their variables tell apart
SPARSE = {"density": 0.1, "min_elements": 0}


def constants(gradients):
    return {name: tf.constant(array) for name, array in gradients.items()}


def equal_variables():
    return {name: tf.Variable(tf.zeros(shape)) for name, shape in EQUAL.items()}


def sparse_and_loopback(driver):
    """Return a Compressor without names, and the loopback with its plan."""
    return Compressor("topk", **SPARSE), driver.yardstick("topk", SPARSE)


@dataclass
class Phase:
    """A part of a training that has its own graph.

    Attributes:
        order: the variables that the tape is given.
        frozen: the variables whose gradients are None.
        options: further arguments of ``DistributedGradientTape``.
        eager: there is no graph around the tape.
    """

    order: Sequence[str] = tuple(EQUAL)
    frozen: Sequence[str] = ()
    options: dict[str, Any] | None = None
    eager: bool = False

    def gradients(self, driver: TensorFlowDriver, step: int) -> list[dict]:
        """Return every rank's gradients of the variables that are trained."""
        trained = [name for name in self.order if name not in self.frozen]
        return [{name: one[name] for name in trained} for one in driver.everyone(step, EQUAL)]

    def step(self, comp: Compressor, variables: dict[str, tf.Variable]) -> Callable[[dict], dict]:
        """Return the function that reduces one step's gradients."""

        def step(fed):
            with tf.GradientTape() as tape:
                loss = tf.add_n([with_gradient(variables[name], gradient) for name, gradient in fed.items()])
            tape = hvd.DistributedGradientTape(tape, compression=comp, **(self.options or {}))
            reduced = dict(zip(self.order, tape.gradient(loss, [variables[name] for name in self.order]), strict=True))
            assert all(reduced[name] is None for name in self.frozen)
            return {name: reduced[name] for name in fed}

        return step if self.eager else tf.function(step, autograph=False)


def train_in_phases(driver, comp, phases, what=""):
    """Do a step in each phase, twice. Results must be the loopback's, which knows tensors by name."""
    net, variables = driver.yardstick("topk", SPARSE), equal_variables()
    steps = [phase.step(comp, variables) for phase in phases]
    for number, (phase, step) in enumerate([*zip(phases, steps, strict=True)] * 2):
        everyone = phase.gradients(driver, number)
        got = step(constants(everyone[driver.rank]))
        assert_reduced(driver, got, net, everyone, f"{what}, step {number}")


def test_gradients_are_identified_by_their_variables_in_every_graph(driver):
    """A variable that is frozen at first must not get the residual of another."""
    groups = {"groups": 2}
    for what, phases in {
        "as many of others": [Phase(frozen=["neck"]), Phase(frozen=["backbone"]), Phase()],
        "in groups, in another order": [Phase(frozen=["neck"], options=groups), Phase([*EQUAL][::-1], (), groups)],
        "only the trained ones are given": [Phase(["head"]), Phase(["neck", "head"]), Phase()],
        "eagerly": [Phase(frozen=["backbone"], eager=True), Phase(eager=True), Phase()],
    }.items():
        train_in_phases(driver, Compressor("topk", **SPARSE), phases, what)


def test_saved_state_is_loaded_before_the_next_phase(driver):
    """By another process, which never traces the first phase."""
    comp, net = sparse_and_loopback(driver)
    for number, phase in enumerate((Phase(frozen=["backbone"]), Phase())):
        everyone = phase.gradients(driver, number)
        got = phase.step(comp, equal_variables())(constants(everyone[driver.rank]))
        assert_reduced(driver, got, net, everyone, f"step {number}")
        state, comp = comp.state_dict(), Compressor("topk", **SPARSE)
        comp.load_state_dict(state)
    assert state["steps"] == {"0": 1, "1": 2, "2": 2}


def test_names_are_of_all_variables_or_of_those_with_gradients(driver):
    frozen = Phase(frozen=["backbone"])
    of_all, of_some, of_too_few = (
        Compressor("topk", names=names, **SPARSE) for names in (list(EQUAL), ["neck", "head"], ["neck", "head"])
    )
    train_in_phases(driver, of_all, [frozen, Phase()])
    assert of_all.state_dict()["steps"] == {"backbone": 2, "neck": 4, "head": 4}
    train_in_phases(driver, of_some, [frozen])
    assert of_some.state_dict()["steps"] == {"neck": 2, "head": 2}
    words = ["more gradients", "2 names"]
    driver.must_raise(ValueError, words, lambda: train_in_phases(driver, of_too_few, [frozen, Phase()]), same=False)


def test_tensors_of_a_tape_are_identified_by_their_order(driver):
    """Each trace has other tensors."""
    comp, net = sparse_and_loopback(driver)

    @tf.function(autograph=False)
    def step(parameters, fed, batch):
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            loss = tf.add_n([with_gradient(*pair) for pair in zip(parameters, fed, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=comp)
        return [gradient * tf.reduce_mean(batch) for gradient in tape.gradient(loss, parameters)]

    for number in range(2):
        everyone = driver.everyone(number, EQUAL)
        fed = [tf.constant(everyone[driver.rank][name]) for name in EQUAL]
        got = step([tf.zeros_like(one) for one in fed], fed, tf.ones(number + 1))
        assert_reduced(driver, dict(zip(EQUAL, got, strict=True)), net, everyone, number)
    assert comp.state_dict()["steps"] == dict.fromkeys("012", 2)


def test_variable_that_the_tape_is_given_twice_has_two_residuals(driver):
    """Horovod reduces its gradient twice, and returns the second result."""
    comp, net = sparse_and_loopback(driver)
    phase = Phase(["neck", "head", "neck"], eager=True)
    step = phase.step(comp, equal_variables())
    for number in range(2):
        everyone = phase.gradients(driver, number)
        assert_reduced(driver, step(constants(everyone[driver.rank])), net, everyone, number)
    assert comp.state_dict()["steps"] == dict.fromkeys("012", 2)


def test_gradient_that_two_variables_share(driver):
    """The tape has one tensor for both arguments of a sum. Each variable has a residual."""
    comp, net = sparse_and_loopback(driver)
    variables, names = equal_variables(), ["neck", "head"]

    @tf.function
    def step(gradient):
        with tf.GradientTape() as tape:
            loss = with_gradient(tf.add_n([variables["neck"] + variables["head"]]), gradient)
        tape = hvd.DistributedGradientTape(tape, compression=comp)
        return dict(zip(names, tape.gradient(loss, [variables[name] for name in names]), strict=True))

    alone = Phase(names, ["neck"]).step(comp, variables)
    for number in range(4):
        trained = ["head"] if number % 2 else names
        everyone = [dict.fromkeys(trained, one["head"]) for one in driver.everyone(number, EQUAL)]
        mine = tf.constant(everyone[driver.rank]["head"])
        assert_reduced(driver, alone({"head": mine}) if number % 2 else step(mine), net, everyone, number)


def test_several_steps_and_models_in_one_function(driver):
    """The steps of a model share residuals. Each model has its own Compressor."""
    comp, net = sparse_and_loopback(driver)
    other, other_net = sparse_and_loopback(driver)
    one, two = (Phase(eager=True).step(each, equal_variables()) for each in (comp, other))
    together = tf.function(lambda first, second: (one(first), one(second), two(first)))
    for call in range(2):
        first, second = (driver.everyone(2 * call + i, EQUAL) for i in range(2))
        results = together(constants(first[driver.rank]), constants(second[driver.rank]))
        for got, its_net, everyone in zip(results, (net, net, other_net), (first, second, first), strict=True):
            assert_reduced(driver, got, its_net, everyone, f"call {call}")
    assert comp.state_dict()["steps"] == dict.fromkeys("012", 4) and comp.prefix != other.prefix


def test_error_after_a_phase_with_fewer_variables_is_raised_in_its_step(driver):
    """It was raised one step later, since the exchanges of the frozen variables had ended less often."""
    faulty = Faulty("topk", SPARSE)
    comp, variables = Compressor(faulty.plan, names=["a", "b", "c"]), equal_variables()
    mine = constants(driver.gradients(0, EQUAL))
    Phase(frozen=["backbone"]).step(comp, variables)({name: mine[name] for name in ("neck", "head")})
    with faulty.failing((1,), 0):
        run = lambda: Phase().step(comp, variables)(mine)  # noqa: E731
        driver.must_raise(tf.errors.OpError, ["rank 1"], run, same=False)


def test_retraces_and_other_functions_share_one_state(driver):
    """Of a Compressor whose tensors are named by their positions."""
    settings = {"density": 0.02, "warmup": {"steps": 2}}
    comp, net = Compressor("topk", **settings), driver.yardstick("topk", settings)
    handle, traces = TensorFlowHandle(comp, SHAPES), []

    @tf.function
    def second(batch):
        traces.append(batch.shape)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w) for w in handle.variables]) * tf.reduce_mean(batch)
        return hvd.DistributedGradientTape(tape, compression=comp).gradient(loss, handle.variables)

    for number in range(5):
        everyone = driver.everyone(number, SHAPES)
        if number % 2:  # another function, and a new batch shape every time
            got = dict(zip(SHAPES, second(tf.fill([number, 3], 0.5 + number)), strict=True))
            everyone = [{n: np.full(s, 0.5 + number, "f") for n, s in SHAPES.items()}] * driver.world_size
        else:
            got = handle.reduce(everyone[driver.rank])
        assert_reduced(driver, got, net, everyone, number)
    assert len(traces) == 2
    assert sorted(comp.state_dict()["steps"]) == list("0123")
    assert comp.residual("0").shape == SHAPES["a"] and comp.residual("0").any()


def test_model_is_exported_after_training_steps(driver):
    """A SavedModel contains all traced functions of its object, also the training step."""

    class Model(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.ones((40, 30)))
            self.b = tf.Variable(tf.ones((30,)))  # Horovod reduces it itself

        @tf.function
        def __call__(self, x):
            return x @ self.w + self.b

        @tf.function
        def step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self(x) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=comp)
            return tape.gradient(loss, [self.w, self.b])

    comp, model = Compressor("topk", density=0.1, min_elements=100), Model()
    before = model.step(tf.ones((2, 40)))
    folder = str(FOLDER / f"exported-{driver.rank}")
    model(tf.ones((2, 40)))
    tf.saved_model.save(model, folder)
    loaded = tf.saved_model.load(folder)
    np.testing.assert_allclose(loaded(tf.ones((2, 40))), model(tf.ones((2, 40))))
    after = model.step(tf.ones((2, 40)))
    assert comp.state_dict()["steps"] == {"0": 2, "1": 2}
    np.testing.assert_allclose(after[1], before[1])


@pytest.mark.also("gloo")
def test_eager_execution(driver):
    """The tape is outside of any ``tf.function``."""
    handle, net = driver.make("scalecom", {"density": 0.02}, SHAPES), driver.yardstick("scalecom", {"density": 0.02})
    for step in range(2):
        everyone = driver.everyone(step, SHAPES)
        assert_reduced(driver, handle.reduce(everyone[driver.rank], handle.reduced), net, everyone, step)


@pytest.mark.parametrize("is_eager", [True, False])
def test_gradient_without_a_variable_needs_a_name(driver, is_eager):
    """Without one, nothing tells whose residual it gets."""
    comp, net = sparse_and_loopback(driver)

    def exchange(gradient):
        return hvd.allreduce(gradient, compression=comp)

    def reduce(step):
        run = exchange if is_eager else tf.function(exchange)
        return run(tf.constant(driver.gradients(step, SHAPES)["a"]))

    driver.must_raise(ValueError, ["DistributedGradientTape", "naming"], lambda: reduce(0), same=False)
    for step in range(2):
        everyone = [{"a": one["a"]} for one in driver.everyone(step, SHAPES)]
        with comp.naming("a"):
            assert_reduced(driver, {"a": reduce(step)}, net, everyone, step)


@pytest.mark.also("gloo")
def test_steps_in_a_loop_inside_one_function(driver):
    """Iterations depend on nothing but the exchange, so they could overlap."""
    settings, count = {"density": 0.02, "warmup": {"steps": 3}}, 12
    handle, net = driver.make("scalecom", settings, SHAPES), driver.yardstick("scalecom", settings)

    @tf.function
    def loop(fed):
        sums = [tf.zeros(shape) for shape in SHAPES.values()]
        for i in tf.range(count):
            reduced = handle.reduced([g[i] for g in fed])
            sums = [a + b for a, b in zip(sums, reduced, strict=True)]
        return sums

    for call in range(2):
        steps = [driver.everyone(call * count + i, SHAPES) for i in range(count)]
        fed = [tf.constant(np.stack([step[driver.rank][name] for step in steps])) for name in SHAPES]
        got = {name: array.numpy() for name, array in zip(SHAPES, loop(fed), strict=True)}
        reduced = [net.allreduce(step)[driver.rank] for step in steps]
        want = {name: sum(one[name] for one in reduced) for name in SHAPES}
        assert_close(got, want, summed(driver.world_size), f"call {call}")


@pytest.mark.parametrize("method", ["topk", "none"])
def test_constant_gradients_are_exchanged_in_every_step(driver, method):
    """TensorFlow's optimiser computes what depends on constants once, where it may."""
    weights = [tf.Variable(tf.zeros((64, 64))), tf.Variable(tf.zeros((64, 65)))]
    comp = Compressor(method)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = 2 * tf.reduce_sum(weights[0]) + 3 * tf.reduce_sum(weights[1])
        return hvd.DistributedGradientTape(tape, compression=comp).gradient(loss, weights)

    for number in range(3):
        step()
        assert comp.state_dict()["steps"] == {"0": number + 1, "1": number + 1}
