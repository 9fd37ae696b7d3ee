"""Tests of Horovod for TensorFlow alone: options of the stock tape, checkpoints, memory, and what is refused."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.ops import pool
from tests.ranks.checks import EXACT, FOLDER, REORDERED, assert_close
from tests.ranks.drivers.base import replaced
from tests.ranks.drivers.tensorflow import PAIR, TensorFlowDriver, TensorFlowHandle
from tests.ranks.promises.test_failures import FAULT, Faulty
from tests.ranks.reduced import assert_reduced

pytestmark = pytest.mark.drivers("tensorflow")

SHAPES = TensorFlowDriver.shapes


def handle_of(method, options, **settings):
    """Return variables whose gradients a tape with these options reduces."""
    return TensorFlowHandle(Compressor(method, names=list(SHAPES), **settings), SHAPES, **options)


@pytest.mark.parametrize(
    "method,options",
    [
        ("none", {"gradient_predivide_factor": 2.0}),  # Horovod reduces tensors of method none itself
        ("none", {"groups": 2}),
        ("scalecom", {"gradient_predivide_factor": 2.0, "groups": 2}),
    ],
)
def test_options_of_the_stock_tape_do_not_change_results(driver, method, options):
    handle, net = handle_of(method, options), driver.yardstick(method, {})
    for step in range(2):
        everyone = driver.everyone(step, SHAPES)
        assert_reduced(driver, handle.reduce(everyone[driver.rank]), net, everyone, f"step {step}", REORDERED)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_compressed_only_as_dense_ones(driver, as_dense):
    """Otherwise Horovod gathers them itself, uncompressed."""
    comp, table = Compressor("topk", density=0.1), tf.Variable(tf.ones((200, 16)))

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        tape = hvd.DistributedGradientTape(tape, compression=comp, sparse_as_dense=as_dense)
        return tape.gradient(loss, [table])[0]

    gradient = step(tf.constant([1, 3 + driver.rank]))
    assert isinstance(gradient, tf.IndexedSlices) is not as_dense
    assert bool(comp.state_dict()["steps"]) is as_dense


@pytest.mark.only("three ranks")
def test_process_set(driver):
    if not PAIR.included():
        return
    handle = handle_of("scalecom", {"process_set": PAIR}, density=0.02, process_set=PAIR)
    net = driver.yardstick("scalecom", {"density": 0.02}, 2)
    for step in range(3):
        everyone = driver.everyone(step, SHAPES)[:2]
        got, want = handle.reduce(everyone[PAIR.rank()]), net.allreduce(everyone)[PAIR.rank()]
        assert_close(got, want, EXACT, f"step {step}")


def test_nan_on_one_rank_undoes_its_tensor_alone(driver):
    handle = driver.make("topk", {}, SHAPES)
    for step, value in enumerate((np.nan, np.inf)):
        bad = driver.gradients(step, SHAPES)
        if driver.rank == 1:
            bad["a"].flat[3] = value
        got = handle.reduce(bad)
        assert np.isnan(got["a"]).all() and np.isfinite(got["b"]).all()
        steps = handle.state()["steps"]
        assert steps.get("a", 0) == step and steps["b"] == step * 2 + 1
        handle.reduce(driver.gradients(step, SHAPES))


@pytest.mark.parametrize("method", ["none", "topk"])
def test_memory_is_reused_except_of_results_that_are_kept(driver, method):
    """TensorFlow uses an array that Python returns without a copy."""
    shapes = {"a": (300, 500), "b": (400, 300)}  # smaller arrays do not come from the pool
    counts = {"empty": 0, "aligned": 0}  # requests for an array, and allocations

    def counting(function):
        def call(*given):
            found = function(*given)
            counts[function.__name__] += found.nbytes >= pool.MIN_BYTES
            return found

        return call

    pool.clear()
    handle, kept, requests = driver.make(method, {}, shapes), [], []
    with replaced([(pool, "empty"), (pool, "aligned")], counting):
        for step in range(12):
            gradients = driver.gradients(step, shapes)
            results = handle.step([tf.constant(gradients[name]) for name in shapes])
            requests.append(counts["empty"])
            if step in (2, 3):
                kept += [(result, result.numpy().copy()) for result in results]
    for result, before in kept:
        np.testing.assert_array_equal(result.numpy(), before)
    # one step's arrays, those of two steps that are kept, and those that TensorFlow releases late
    assert requests[0] and counts["aligned"] <= 4 * requests[0], (counts, requests)


@pytest.mark.parametrize("is_used", [True, False])
def test_state_in_a_tensorflow_checkpoint(driver, is_used):
    """Restored into a Compressor that has done steps, or none."""
    handle, other = (driver.make("scalecom", {"density": 0.02}, SHAPES) for _ in range(2))
    handle.reduce(driver.gradients(0, SHAPES))
    prefix = str(FOLDER / f"checkpoint{driver.rank}")  # states differ between ranks
    path = tf.train.Checkpoint(comp=handle.compressor, weights=handle.variables[0]).save(prefix)
    if is_used:
        other.reduce(driver.gradients(1, SHAPES))
    tf.train.Checkpoint(comp=other.compressor, weights=other.variables[0]).restore(path).assert_consumed()
    got, want = (one.reduce(driver.gradients(2, SHAPES)) for one in (other, handle))
    assert_close(got, want, EXACT if driver.exact else REORDERED, "after restore")
    for name in SHAPES:
        np.testing.assert_array_equal(other.residual(name), handle.residual(name), err_msg=name)
    assert other.state_dict()["steps"] == dict.fromkeys(SHAPES, 2)


@pytest.mark.parametrize("elastic,kind", [("0", "UnknownError"), ("1", "InvalidArgumentError")])
def test_error_does_not_end_an_elastic_training_silently(driver, elastic, kind, monkeypatch):
    """``hvd.elastic.run`` returns at an UnknownError without Horovod's words. Other ranks name the rank that failed."""
    faulty = Faulty("topk", {"density": 0.05})
    handle = driver.make(faulty.plan, {}, SHAPES)
    monkeypatch.setenv("HOROVOD_ELASTIC", elastic)
    words = FAULT if driver.rank == 1 else "rank 1 failed"
    with faulty.failing((1,), 0), pytest.raises(getattr(tf.errors, kind), match=words):
        handle.reduce(driver.gradients(0, SHAPES))


@pytest.mark.parametrize("op,method", [("Min", "none"), ("Max", "topk"), ("Product", "topk")])
def test_other_operations_are_refused(driver, op, method):
    handle = handle_of(method, {"op": getattr(hvd, op)})
    words = ["Average", "Sum", "refused"]
    driver.must_raise(tf.errors.OpError, words, lambda: handle.reduce(driver.gradients(0, SHAPES)), same=False)


def test_wrong_arguments_are_refused(driver):
    driver.must_raise(ValueError, ["same name", "'a'"], lambda: Compressor("topk", names=["a", "b", "a"]))
    driver.must_raise(ValueError, ["density"], lambda: Compressor("none", density=0.1))
    handle = driver.make("topk", {}, SHAPES, loss_scale=0.0)
    run = lambda: handle.reduce(driver.gradients(0, SHAPES))  # noqa: E731
    driver.must_raise(tf.errors.OpError, ["loss_scale"], run, same=False)


def test_compressor_of_another_model_is_refused(driver):
    handle = driver.make("topk", {}, SHAPES)
    handle.reduce(driver.gradients(0, SHAPES))
    shapes = {name: (*shape, 2) for name, shape in SHAPES.items()}
    other = TensorFlowHandle(handle.compressor, shapes)
    words = ["more gradients", "one Compressor for each model"]
    driver.must_raise(ValueError, words, lambda: other.reduce(driver.gradients(0, shapes)), same=False)
