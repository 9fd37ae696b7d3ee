"""Cases of the TensorFlow driver alone: how graphs are traced, called and optimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from tests.harness import assert_close, case, summed
from tests.launched.tf_model import SHAPES, Model, compressor, everyone, reference, refused
from tests.promises.drivers.tensorflow import with_gradient
from tests.promises.failures import Faulty

EQUAL = dict.fromkeys(("backbone", "neck", "head"), (40, 30))  #: tensors that nothing but their variables tells apart


@dataclass
class Phase:
    """A part of a training that has a graph of its own.

    Attributes:
        order: the variables that the tape is given.
        frozen: those of them whose gradients are None.
        options: further arguments of ``DistributedGradientTape``.
        eager: there is no graph around the tape.
    """

    order: Sequence[str]
    frozen: Sequence[str] = ()
    options: dict[str, Any] | None = None
    eager: bool = False

    def step(
        self, comp: Compressor, variables: dict[str, tf.Variable], autograph: bool = False
    ) -> Callable[[dict], dict]:
        """The function that reduces one step's gradients."""
        trained = [name for name in self.order if name not in self.frozen]

        def step(fed):
            with tf.GradientTape() as tape:
                loss = tf.add_n([with_gradient(variables[name], fed[name]) for name in trained])
            tape = hvd.DistributedGradientTape(tape, compression=comp, **(self.options or {}))
            reduced = dict(zip(self.order, tape.gradient(loss, [variables[name] for name in self.order]), strict=True))
            assert all(reduced[name] is None for name in self.frozen)
            return {name: reduced[name] for name in trained}

        return step if self.eager else tf.function(step, autograph=autograph)


def equal_variables() -> dict[str, tf.Variable]:
    return {name: tf.Variable(tf.zeros(shape)) for name, shape in EQUAL.items()}


def train_in_phases(comp: Compressor, phases: Sequence[Phase], what: str) -> None:
    """Go through the phases twice, a step in each: every tensor gets what loopback, which knows names, gives it."""
    net, variables = reference("topk", density=0.1, min_elements=0), equal_variables()
    steps = [phase.step(comp, variables) for phase in phases]
    for number, (phase, step) in enumerate([*zip(phases, steps, strict=True)] * 2):
        trained = [name for name in phase.order if name not in phase.frozen]
        inputs = [{name: given[name] for name in trained} for given in everyone(number, EQUAL)]
        got = step({name: tf.constant(inputs[hvd.rank()][name]) for name in trained})
        want = net.allreduce_many(inputs)[0]
        assert_close({n: g.numpy() for n, g in got.items()}, want, summed(hvd.size()), f"{what}, step {number}")


@case
def a_frozen_backbone_stands_still_in_the_next_phase() -> None:
    """At first its gradients are None, and then zero: it must not get what other variables have left to send."""
    comp, variables = Compressor("topk", density=0.1, min_elements=0), equal_variables()
    first = Phase(list(EQUAL), ["backbone"]).step(comp, variables, autograph=True)
    second = Phase(list(EQUAL)).step(comp, variables, autograph=True)
    for number in range(2):
        given = everyone(number, EQUAL)[hvd.rank()]
        first({name: tf.constant(given[name]) for name in ("neck", "head")})
    for _ in range(3):
        reduced = second({name: tf.zeros(shape) for name, shape in EQUAL.items()})
        assert not reduced["backbone"].numpy().any(), f"moved by {np.abs(reduced['backbone']).max()}"
        assert reduced["neck"].numpy().any() and reduced["head"].numpy().any()


@case
def gradients_are_known_by_their_variables_in_every_graph() -> None:
    everything, backbone_last = ["backbone", "neck", "head"], ["head", "neck", "backbone"]
    thawed = Phase(everything)
    for what, phases in {
        "frozen first": [Phase(everything, ["backbone"]), thawed],
        "frozen later": [thawed, Phase(everything, ["backbone"])],
        "as many of others": [Phase(everything, ["neck"]), Phase(everything, ["backbone"])],
        "in another order": [thawed, Phase(backbone_last)],
        "only the trained ones are given": [Phase(["head"]), Phase(["neck", "head"]), thawed],
        "one is added": [Phase(everything[:2]), thawed],
        "one is left out": [thawed, Phase(everything[1:])],
        "in groups": [Phase(everything, ["neck"], {"groups": 2}), Phase(backbone_last, (), {"groups": 2})],
        "eagerly": [Phase(everything, ["backbone"], eager=True), Phase(everything, eager=True), thawed],
    }.items():
        train_in_phases(Compressor("topk", density=0.1, min_elements=0), phases, what)


@case
def a_saved_state_goes_on_in_the_next_phase() -> None:
    """Another process never traces the first one."""
    net = reference("topk", density=0.1, min_elements=0)
    state = None
    for number, frozen in enumerate((["backbone"], [])):
        comp = Compressor("topk", density=0.1, min_elements=0)
        if state:
            comp.load_state_dict(state)
        trained = [name for name in EQUAL if name not in frozen]
        inputs = [{name: given[name] for name in trained} for given in everyone(number, EQUAL)]
        step = Phase(list(EQUAL), frozen).step(comp, equal_variables())
        got = step({name: tf.constant(inputs[hvd.rank()][name]) for name in trained})
        want = net.allreduce_many(inputs)[0]
        assert_close({n: g.numpy() for n, g in got.items()}, want, summed(hvd.size()), f"step {number}")
        state = comp.state_dict()
    assert state["steps"] == {"0": 1, "1": 2, "2": 2}


@case
def names_are_of_all_variables_or_of_those_with_gradients() -> None:
    settings = {"density": 0.1, "min_elements": 0}
    phases = [Phase(list(EQUAL), ["backbone"]), Phase(list(EQUAL))]
    comp = Compressor("topk", names=list(EQUAL), **settings)
    train_in_phases(comp, phases, "of all")
    assert comp.state_dict()["steps"] == {"backbone": 2, "neck": 4, "head": 4}
    comp = Compressor("topk", names=["neck", "head"], **settings)
    train_in_phases(comp, phases[:1], "of some")
    assert comp.state_dict()["steps"] == {"neck": 2, "head": 2}
    few = Compressor("topk", names=["neck", "head"], **settings)
    refused(ValueError, ["more gradients", "2 names"], lambda: train_in_phases(few, phases, "too few"))


@case
def a_tape_of_tensors_knows_them_by_their_order() -> None:
    """Every trace has other ones."""
    comp, net = (make("topk", density=0.1, min_elements=0) for make in (Compressor, reference))

    @tf.function(autograph=False)
    def step(parameters, fed, batch):
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            loss = tf.add_n([with_gradient(*pair) for pair in zip(parameters, fed, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=comp)
        return [gradient * tf.reduce_mean(batch) for gradient in tape.gradient(loss, parameters)]

    for number in range(3):
        inputs = everyone(number, EQUAL)
        fed = [tf.constant(inputs[hvd.rank()][name]) for name in EQUAL]
        got = step([tf.zeros_like(one) for one in fed], fed, tf.ones(number + 1))
        want = net.allreduce_many(inputs)[0]
        assert_close({n: g.numpy() for n, g in zip(EQUAL, got, strict=True)}, want, summed(hvd.size()), f"{number}")
    assert comp.state_dict()["steps"] == dict.fromkeys(("0", "1", "2"), 3)


@case
def a_variable_that_the_tape_is_given_twice_has_two_residuals() -> None:
    """Horovod reduces its gradient twice, and returns what came last."""
    comp, net = (make("topk", density=0.1, min_elements=0) for make in (Compressor, reference))
    step = Phase(["neck", "head", "neck"], eager=True).step(comp, equal_variables())
    for number in range(3):
        inputs = [{name: given[name] for name in ("neck", "head")} for given in everyone(number, EQUAL)]
        got = step({name: tf.constant(array) for name, array in inputs[hvd.rank()].items()})
        want = net.allreduce_many([{**given, "neck": 2 * given["neck"]} for given in inputs])[0]
        assert_close({n: g.numpy() for n, g in got.items()}, want, summed(hvd.size()), f"step {number}")
    assert comp.state_dict()["steps"] == dict.fromkeys(("0", "1", "2"), 3)


@case
def a_gradient_that_two_variables_share_is_of_both() -> None:
    """The tape has one tensor for a sum's two arguments."""
    comp, net = (make("topk", density=0.1, min_elements=0) for make in (Compressor, reference))
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
        got = alone({"head": mine}) if number % 2 else step(mine)
        want = net.allreduce_many(inputs)[0]
        assert_close({n: g.numpy() for n, g in got.items()}, want, summed(hvd.size()), f"step {number}")


@case
def steps_written_out_in_one_function_share_residuals() -> None:
    sparse = {"density": 0.1, "min_elements": 0}
    for method, settings in (("topk", sparse), ("scalecom", sparse), ("none", {})):
        comp, net, variables = Compressor(method, **settings), reference(method, **settings), equal_variables()
        one = Phase(list(EQUAL), eager=True).step(comp, variables)

        @tf.function
        def twice(first, second, one=one):
            return one(first), one(second)

        for call in range(2):
            steps = [everyone(2 * call + i, EQUAL) for i in range(2)]
            fed = [{name: tf.constant(array) for name, array in step[hvd.rank()].items()} for step in steps]
            for step, got in zip(steps, twice(*fed), strict=True):
                want = net.allreduce_many(step)[0]
                assert_close({n: g.numpy() for n, g in got.items()}, want, summed(hvd.size()), f"{method} call {call}")
        assert comp.state_dict()["steps"] == dict.fromkeys(("0", "1", "2"), 4), comp.state_dict()["steps"]


@case
def gradients_without_variables_are_refused_where_their_number_changes() -> None:
    """hvd.allreduce in a graph is given no variable: then a gradient is known by its place."""
    inputs = everyone(0, EQUAL)
    mine = {name: tf.constant(array) for name, array in inputs[hvd.rank()].items()}
    words = ["DistributedGradientTape", "tf.function", "naming"]
    for others in (["neck", "head"], [*EQUAL, "head"]):
        comp, net = (make("topk", density=0.1, min_elements=0) for make in (Compressor, reference))

        def reducing(names: Sequence[str], comp=comp) -> Callable[[dict], list]:
            return tf.function(lambda fed: [hvd.allreduce(fed[name], compression=comp) for name in names])

        for step, reduce in enumerate([reducing(list(EQUAL)), reducing(list(EQUAL))]):  # another graph of as many
            got = {name: array.numpy() for name, array in zip(EQUAL, reduce(mine), strict=True)}
            assert_close(got, net.allreduce_many(inputs)[0], summed(hvd.size()), f"step {step}")
        reduce = reducing(others)
        refused(tf.errors.OpError, words, lambda reduce=reduce: reduce(mine))


@case
def a_step_that_fails_raises_at_its_end_after_a_phase_without_some_variables() -> None:
    """It raised one step later, as the exchanges of these had ended less often."""
    faulty = Faulty("topk", {"density": 0.1, "min_elements": 0})
    comp, variables = Compressor(faulty.plan, names=["a", "b", "c"]), equal_variables()
    mine = {name: tf.constant(array) for name, array in everyone(0, EQUAL)[hvd.rank()].items()}
    Phase(list(EQUAL), ["backbone"]).step(comp, variables)(mine)
    with faulty.failing((1,), 0):
        refused(tf.errors.OpError, ["rank 1"], lambda: Phase(list(EQUAL)).step(comp, variables)(mine))


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
        for number in range(5):
            inputs = everyone(number)
            if number % 2:  # another function, and a new batch shape every time
                value = 0.5 + number
                got = dict(zip(SHAPES, [g.numpy() for g in second(tf.fill([number, 3], value))], strict=True))
                inputs = [{n: np.full(s, value, np.float32) for n, s in SHAPES.items()} for _ in range(hvd.size())]
            else:
                got = model(inputs[hvd.rank()])
            evaluate(tf.zeros([number + 1]))
            assert_close(got, net.allreduce_many(inputs)[0], summed(hvd.size()), f"{method} step {number}")
        assert len(traces) == 2


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
        count = 16  # its iterations depend on nothing but the exchange, so they overlap where that lets them

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
    assert nothing is None and gradient.shape == (40, 40) and list(comp.state_dict()["steps"]) == ["1"]


@case
def two_models_of_equal_shapes_on_one_compressor() -> None:
    """Their tensors would share residuals."""
    comp = compressor("topk", density=0.05)
    Model(comp)(everyone(0)[hvd.rank()])
    other = Model(comp)
    refused(ValueError, ["another model", "one Compressor for each"], lambda: other(everyone(1)[hvd.rank()]))
