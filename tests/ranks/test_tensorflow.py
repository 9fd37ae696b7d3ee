"""Tests of the TensorFlow driver alone: the stock tape's options, checkpoints, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.ops import pool
from tests.ranks.checks import EXACT, FOLDER, REORDERED, assert_close, heavy_tailed
from tests.ranks.drivers.base import replaced
from tests.ranks.drivers.tensorflow import PAIR
from tests.ranks.promises.test_failures import FAULT, Faulty
from tests.ranks.tf_model import (
    SHAPES,
    Model,
    assert_reduced,
    compressor,
    everyone,
    gradients,
    reference,
    refused,
)
from tests.ranks.timeline import check_names

pytestmark = pytest.mark.drivers("tensorflow")

# TensorFlow makes errors of its own of ours; they carry our words
IN_A_GRAPH = tf.errors.OpError


def test_options_of_the_stock_tape_change_nothing() -> None:
    """Also with method none, whose tensors Horovod reduces itself."""
    for method, options in (
        ("none", {"gradient_predivide_factor": 2.0}),
        ("none", {"groups": 2}),
        ("scalecom", {"gradient_predivide_factor": 2.0, "groups": 2}),
    ):
        model, net = Model(compressor(method), autograph=False, **options), reference(method)
        for step in range(2):
            assert_reduced(model(gradients(step)), net, everyone(step), f"{method} {options}", REORDERED)


def test_sparse_gradients_never_reach_a_compressor_unless_made_dense() -> None:
    for as_dense in (False, True):
        comp = Compressor("topk", density=0.1)
        table = tf.Variable(tf.ones((200, 16)))

        @tf.function
        def step(rows, comp=comp, table=table, as_dense=as_dense):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows))
            tape = hvd.DistributedGradientTape(tape, compression=comp, sparse_as_dense=as_dense)
            return tape.gradient(loss, [table])[0]

        gradient = step(tf.constant([1, 3 + hvd.rank()]))
        assert isinstance(gradient, tf.IndexedSlices) is not as_dense
        assert bool(comp.state_dict()["steps"]) is as_dense  # Horovod gathers sparse ones itself, uncompressed


@pytest.mark.only("three ranks")
def test_a_process_set() -> None:
    if not PAIR.included():
        return
    model = Model(compressor("scalecom", density=0.02, process_set=PAIR), process_set=PAIR)
    net = reference("scalecom", world_size=2, density=0.02)
    for step in range(3):
        inputs = [heavy_tailed(SHAPES, step, rank) for rank in range(2)]
        assert_close(model(inputs[PAIR.rank()]), net.allreduce_many(inputs)[0], EXACT, f"step {step}")


def test_a_nan_on_one_rank_undoes_no_other_tensor() -> None:
    model = Model(compressor("topk"))
    for step, value in enumerate((np.nan, np.inf)):
        bad = gradients(step)
        if hvd.rank() == 1:
            bad["a"].flat[3] = value
        got = model(bad)
        assert np.isnan(got["a"]).all() and np.isfinite(got["b"]).all(), "only that tensor"
        steps = model.state()["steps"]
        assert steps.get("a", 0) == step and steps["b"] == step * 2 + 1
        model(gradients(step))


def test_memory_is_used_again_but_not_a_result_that_is_kept() -> None:
    """TensorFlow holds what a piece of Python returns without a copy."""
    shapes = {"a": (300, 500), "b": (400, 300)}  # the memory of less is the allocator's
    counts = {"empty": 0, "aligned": 0}  # arrays that were asked for, and memory that was made for them

    def counting(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def call(*given) -> np.ndarray:
            found = function(*given)
            counts[function.__name__] += found.nbytes >= pool.MIN_BYTES
            return found

        return call

    for method in ("none", "topk"):
        pool.clear()
        counts.update(empty=0, aligned=0)
        model, kept = Model(Compressor(method, names=list(shapes)), shapes, autograph=False), []
        for step in range(12):
            fed = [tf.constant(array) for array in gradients(step, shapes).values()]
            with replaced([(pool, "empty"), (pool, "aligned")], counting):
                results = model.step(fed)
            if step in (2, 3):
                kept += [(result, result.numpy().copy()) for result in results]
            if step == 0:
                first = counts["empty"]
        for result, before in kept:
            np.testing.assert_array_equal(result.numpy(), before, err_msg=method)
        # a step's, those of two steps that are kept, and what TensorFlow has let go of late
        assert first and counts["aligned"] <= 4 * first, f"{method}: {counts}, {first} in the first step"


def test_state_goes_through_tensorflows_checkpoints() -> None:
    """Into a Compressor that was used, and one that was not."""
    model = Model(compressor("scalecom", density=0.02))
    for step in range(2):
        model(gradients(step))
    prefix = str(FOLDER / f"checkpoint{hvd.rank()}")  # every rank its own: states differ
    path = tf.train.Checkpoint(comp=model.compressor, weights=model.variables[0]).save(prefix)
    model(gradients(2))
    for is_used in (True, False):
        other = Model(compressor("scalecom", density=0.02))
        if is_used:
            other(gradients(0))
        tf.train.Checkpoint(comp=other.compressor, weights=other.variables[0]).restore(path).assert_consumed()
        other(gradients(2))
        for name in SHAPES:
            got, want = other.compressor.residual(name), model.compressor.residual(name)
            np.testing.assert_array_equal(got, want, err_msg=name)
        assert other.compressor.state_dict()["steps"] == dict.fromkeys(SHAPES, 3)


def test_an_error_does_not_end_an_elastic_training_as_if_it_were_done() -> None:
    """hvd.elastic.run returns at an UnknownError that has none of Horovod's words, without an error.

    The rank that failed names the cause. The others only know who it was.
    """
    faulty = Faulty("topk", {"density": 0.05})
    for elastic, kind in (("0", tf.errors.UnknownError), ("1", tf.errors.InvalidArgumentError)):
        model = Model(compressor(faulty.plan))
        words = FAULT if hvd.rank() == 1 else "rank 1 failed"
        with pytest.MonkeyPatch.context() as patch, faulty.failing((1,), 0), pytest.raises(kind, match=words):
            patch.setenv("HOROVOD_ELASTIC", elastic)
            model(gradients(0))


def test_other_operations_are_refused() -> None:
    for op, method in ((hvd.Min, "none"), (hvd.Max, "topk"), (hvd.Product, "topk")):
        model = Model(compressor(method), autograph=False, op=op)
        refused(IN_A_GRAPH, ["Average", "Sum", "refused"], lambda m=model: m(gradients(0)))


def test_bad_arguments_are_refused() -> None:
    refused(ValueError, ["same name", "'a'"], lambda: Compressor("topk", names=["a", "b", "a"]))
    refused(ValueError, ["density"], lambda: Compressor("none", density=0.1))
    comp, other = compressor("topk"), {name: (*shape, 2) for name, shape in SHAPES.items()}
    Model(comp)(gradients(0))
    refused(ValueError, ["serves another model"], lambda: Model(comp, other)(gradients(0, other)))
    model = Model(compressor("topk", loss_scale=0.0))
    refused(IN_A_GRAPH, ["loss_scale"], lambda: model(gradients(0)))


def test_names_in_horovods_timeline() -> None:
    comp = compressor("scalecom", density=0.05)
    model = Model(comp)
    assert re.fullmatch(r"HorovodAllreduce\.hvdcompress\.tf\.set0\.compressor\d+", comp.prefix)

    def steps() -> None:
        for step in range(2):
            model(gradients(step))

    check_names(hvd, steps, {f"{comp.prefix}.a.{name}" for name in ("round0.Broadcast", "round1.AllReduce")})
