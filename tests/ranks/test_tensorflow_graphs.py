"""Tests of the TensorFlow driver alone: how graphs are traced, called and optimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from tests.ranks.checks import assert_close, summed
from tests.ranks.drivers.tensorflow import with_gradient
from tests.ranks.promises.test_failures import Faulty
from tests.ranks.tf_model import (
    SHAPES,
    SPARSE,
    Model,
    assert_reduced,
    compressor,
    everyone,
    gradients,
    reference,
    refused,
)

pytestmark = pytest.mark.drivers("tensorflow")

EQUAL = dict.fromkeys(("backbone", "neck", "head"), (40, 30))  #: tensors that nothing but their variables tells apart

Variables = dict[str, tf.Variable]


def constants(given: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in given.items()}


def equal_variables() -> Variables:
    return {name: tf.Variable(tf.zeros(shape)) for name, shape in EQUAL.items()}


def tape_and_loss(variables: Variables, fed: dict[str, tf.Tensor]) -> tuple[tf.GradientTape, tf.Tensor]:
    """Return a tape, and a loss that has these gradients."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([with_gradient(variables[name], gradient) for name, gradient in fed.items()])
    return tape, loss


@dataclass
class Phase:
    """A part of a training that has a graph of its own.

    Attributes:
        order: the variables that the tape is given.
        frozen: those of them whose gradients are None.
        options: further arguments of ``DistributedGradientTape``.
        eager: there is no graph around the tape.
    """

    order: Sequence[str] = tuple(EQUAL)
    frozen: Sequence[str] = ()
    options: dict[str, Any] | None = None
    eager: bool = False

    def trained(self, inputs: list[dict]) -> list[dict]:
        """Return the gradients of the variables that are trained."""
        return [{name: one[name] for name in self.order if name not in self.frozen} for one in inputs]

    def step(self, comp: Compressor, variables: Variables) -> Callable[[dict], dict]:
        """Return the function that reduces one step's gradients."""

        def step(fed):
            tape, loss = tape_and_loss(variables, fed)
            tape = hvd.DistributedGradientTape(tape, compression=comp, **(self.options or {}))
            reduced = dict(zip(self.order, tape.gradient(loss, [variables[name] for name in self.order]), strict=True))
            assert all(reduced[name] is None for name in self.frozen)
            return {name: reduced[name] for name in fed}

        return step if self.eager else tf.function(step, autograph=False)


def train_in_phases(comp: Compressor, phases: Sequence[Phase], what: str, times: int = 2) -> None:
    """Go through the phases, a step in each: every tensor gets what the loopback, which knows names, gives it."""
    net, variables = reference("topk", **SPARSE), equal_variables()
    steps = [phase.step(comp, variables) for phase in phases]
    for number, (phase, step) in enumerate([*zip(phases, steps, strict=True)] * times):
        inputs = phase.trained(everyone(number, EQUAL))
        assert_reduced(step(constants(inputs[hvd.rank()])), net, inputs, f"{what}, step {number}")


def test_gradients_are_known_by_their_variables_in_every_graph() -> None:
    """A variable that is frozen at first must not get what others have left to send."""
    groups = {"groups": 2}
    for what, phases in {
        "frozen first": [Phase(frozen=["backbone"]), Phase()],
        "as many of others": [Phase(frozen=["neck"]), Phase(frozen=["backbone"])],
        "in groups, in another order": [Phase(frozen=["neck"], options=groups), Phase([*EQUAL][::-1], (), groups)],
        "only the trained ones are given": [Phase(["head"]), Phase(["neck", "head"]), Phase()],
        "eagerly": [Phase(frozen=["backbone"], eager=True), Phase(eager=True), Phase()],
    }.items():
        train_in_phases(Compressor("topk", **SPARSE), phases, what)


def test_a_saved_state_goes_on_in_the_next_phase() -> None:
    """Another process never traces the first one."""
    comp, net = Compressor("topk", **SPARSE), reference("topk", **SPARSE)
    for number, phase in enumerate((Phase(frozen=["backbone"]), Phase())):
        inputs = phase.trained(everyone(number, EQUAL))
        got = phase.step(comp, equal_variables())(constants(inputs[hvd.rank()]))
        assert_reduced(got, net, inputs, f"step {number}")
        state, comp = comp.state_dict(), Compressor("topk", **SPARSE)
        comp.load_state_dict(state)
    assert state["steps"] == {"0": 1, "1": 2, "2": 2}


def test_names_are_of_all_variables_or_of_those_with_gradients() -> None:
    frozen = Phase(frozen=["backbone"])
    comp = Compressor("topk", names=list(EQUAL), **SPARSE)
    train_in_phases(comp, [frozen, Phase()], "of all")
    assert comp.state_dict()["steps"] == {"backbone": 2, "neck": 4, "head": 4}
    comp = Compressor("topk", names=["neck", "head"], **SPARSE)
    train_in_phases(comp, [frozen], "of some")
    assert comp.state_dict()["steps"] == {"neck": 2, "head": 2}
    comp = Compressor("topk", names=["neck", "head"], **SPARSE)
    words = ["more gradients", "2 names"]
    refused(ValueError, words, lambda: train_in_phases(comp, [frozen, Phase()], "of too few"))


def test_a_tape_of_tensors_knows_them_by_their_order() -> None:
    """Every trace has other ones."""
    comp, net = (make("topk", **SPARSE) for make in (Compressor, reference))

    @tf.function(autograph=False)
    def step(parameters, fed, batch):
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            loss = tf.add_n([with_gradient(*pair) for pair in zip(parameters, fed, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=comp)
        return [gradient * tf.reduce_mean(batch) for gradient in tape.gradient(loss, parameters)]

    for number in range(2):
        inputs = everyone(number, EQUAL)
        fed = list(constants(inputs[hvd.rank()]).values())
        got = step([tf.zeros_like(one) for one in fed], fed, tf.ones(number + 1))
        assert_reduced(dict(zip(EQUAL, got, strict=True)), net, inputs, number)
    assert comp.state_dict()["steps"] == dict.fromkeys(("0", "1", "2"), 2)


def test_a_variable_that_the_tape_is_given_twice_has_two_residuals() -> None:
    """Horovod reduces its gradient twice, and returns what came last."""
    comp, net = (make("topk", **SPARSE) for make in (Compressor, reference))
    step = Phase(["neck", "head", "neck"], eager=True).step(comp, equal_variables())
    for number in range(2):
        inputs = Phase(["neck", "head"]).trained(everyone(number, EQUAL))
        got = step(constants(inputs[hvd.rank()]))
        assert_reduced(got, net, inputs, number)
    assert comp.state_dict()["steps"] == dict.fromkeys(("0", "1", "2"), 2)


def test_a_gradient_that_two_variables_share_is_of_both() -> None:
    """The tape has one tensor for a sum's two arguments."""
    comp, net = (make("topk", **SPARSE) for make in (Compressor, reference))
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
        inputs = [dict.fromkeys(trained, given["head"]) for given in everyone(number, EQUAL)]
        mine = tf.constant(inputs[hvd.rank()]["head"])
        assert_reduced(alone({"head": mine}) if number % 2 else step(mine), net, inputs, number)


def test_steps_written_out_in_one_function_share_residuals() -> None:
    for method, settings in (("topk", SPARSE), ("none", {})):
        comp, net = Compressor(method, **settings), reference(method, **settings)
        one = Phase(eager=True).step(comp, equal_variables())
        twice = tf.function(lambda first, second, one=one: (one(first), one(second)))
        for call in range(2):
            steps = [everyone(2 * call + i, EQUAL) for i in range(2)]
            results = twice(*(constants(step[hvd.rank()]) for step in steps))
            for step, got in zip(steps, results, strict=True):
                assert_reduced(got, net, step, f"{method} call {call}")
        assert comp.state_dict()["steps"] == dict.fromkeys(("0", "1", "2"), 4), comp.state_dict()["steps"]


def test_gradients_without_variables_are_refused_where_their_number_changes() -> None:
    """hvd.allreduce in a graph is given no variable: then a gradient is known by its position."""
    inputs = everyone(0, EQUAL)
    mine = constants(inputs[hvd.rank()])
    words = ["DistributedGradientTape", "tf.function", "naming"]
    for others in (["neck", "head"], [*EQUAL, "head"]):
        comp, net = (make("topk", **SPARSE) for make in (Compressor, reference))

        def reducing(names: Sequence[str], comp=comp) -> Callable[[dict], list]:
            return tf.function(lambda fed: [hvd.allreduce(fed[name], compression=comp) for name in names])

        for step in range(2):  # another graph of as many
            got = reducing(list(EQUAL))(mine)
            assert_reduced(dict(zip(EQUAL, got, strict=True)), net, inputs, step)
        reduce = reducing(others)
        refused(tf.errors.OpError, words, lambda reduce=reduce: reduce(mine))


def test_a_step_that_fails_raises_at_its_end_after_a_phase_without_some_variables() -> None:
    """It raised one step later, as the exchanges of these had ended less often."""
    faulty = Faulty("topk", SPARSE)
    comp, variables = Compressor(faulty.plan, names=["a", "b", "c"]), equal_variables()
    mine = constants(gradients(0, EQUAL))
    trained = {name: mine[name] for name in ("neck", "head")}
    Phase(frozen=["backbone"]).step(comp, variables)(trained)
    with faulty.failing((1,), 0):
        refused(tf.errors.OpError, ["rank 1"], lambda: Phase().step(comp, variables)(mine))


def test_retraces_and_other_functions_share_one_state() -> None:
    """Of a Compressor whose tensors have no names but their positions."""
    settings = {"density": 0.02, "warmup": {"steps": 2}}
    comp, net = Compressor("topk", **settings), reference("topk", **settings)
    model, traces = Model(comp), []

    def step(batch):  # a function of its own
        traces.append(batch.shape)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w) for w in model.variables]) * tf.reduce_mean(batch)
        return hvd.DistributedGradientTape(tape, compression=comp).gradient(loss, model.variables)

    second = tf.function(step)
    for number in range(5):
        inputs = everyone(number)
        if number % 2:  # another function, and a new batch shape every time
            got = dict(zip(SHAPES, second(tf.fill([number, 3], 0.5 + number)), strict=True))
            inputs = [{n: np.full(s, 0.5 + number, np.float32) for n, s in SHAPES.items()} for _ in range(hvd.size())]
        else:
            got = model(inputs[hvd.rank()])
        assert_reduced(got, net, inputs, number)
    assert len(traces) == 2
    assert sorted(comp.state_dict()["steps"]) == ["0", "1", "2", "3", "4"]
    assert comp.residual("0").shape == SHAPES["a"] and comp.residual("0").any()
    refused(ValueError, ["another model", "one Compressor for each"], lambda: Model(comp)(gradients(1)))


@pytest.mark.also("gloo")
def test_eager_execution() -> None:
    model, net = Model(compressor("scalecom", density=0.02)), reference("scalecom", density=0.02)
    for step in range(2):
        inputs = everyone(step)
        # the tape is outside of any tf.function
        assert_reduced(model(inputs[hvd.rank()], model.reduced), net, inputs, step)


def test_a_gradient_by_itself_needs_a_name() -> None:
    """Reduced eagerly, each call was another tensor, and its residual was never used again."""
    comp, net = compressor("topk", density=0.02), reference("topk", density=0.02)

    def reduce(step: int) -> tf.Tensor:
        return hvd.allreduce(tf.constant(gradients(step)["a"]), compression=comp)

    refused(ValueError, ["DistributedGradientTape", "naming"], lambda: reduce(0))
    for step in range(2):
        with comp.naming("a"):
            assert_reduced({"a": reduce(step)}, net, [{"a": one["a"]} for one in everyone(step)], step)


@pytest.mark.also("gloo")
def test_steps_in_a_loop_inside_one_function() -> None:
    settings = {"density": 0.02, "warmup": {"steps": 3}}
    model, net = Model(compressor("scalecom", **settings)), reference("scalecom", **settings)
    count = 12  # its iterations depend on nothing but the exchange, so they overlap where that lets them

    @tf.function
    def loop(fed):
        sums = [tf.zeros(shape) for shape in SHAPES.values()]
        for i in tf.range(count):
            reduced = model.reduced([g[i] for g in fed])
            sums = [a + b for a, b in zip(sums, reduced, strict=True)]
        return sums

    for call in range(2):
        steps = [everyone(call * count + i) for i in range(count)]
        fed = [tf.constant(np.stack([step[hvd.rank()][name] for step in steps])) for name in SHAPES]
        got = {name: array.numpy() for name, array in zip(SHAPES, loop(fed), strict=True)}
        want = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in steps:
            for name, reduced in net.allreduce_many(step)[0].items():
                want[name] += reduced
        assert_close(got, want, summed(hvd.size()), f"call {call}")


def test_constant_gradients_are_exchanged_in_every_step() -> None:
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


def test_several_models_in_one_function() -> None:
    """Each has a Compressor of its own."""
    comps = [compressor("topk", density=0.1), compressor("topk", density=0.1)]
    models = [Model(comp) for comp in comps]
    both = tf.function(lambda fed: [model.reduced(fed) for model in models])
    nets = [reference("topk", density=0.1) for _ in comps]
    for step in range(2):
        inputs = everyone(step)
        results = both([tf.constant(inputs[hvd.rank()][name]) for name in SHAPES])
        for net, reduced in zip(nets, results, strict=True):
            assert_reduced(dict(zip(SHAPES, reduced, strict=True)), net, inputs, step)
    assert len({comp.prefix for comp in comps}) == 2
