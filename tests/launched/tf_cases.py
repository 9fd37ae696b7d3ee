"""Cases of the TensorFlow driver alone: the stock tape's options, checkpoints, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.ops import pool
from tests.harness import EXACT, OUT, REORDERED, Skip, assert_close, case, heavy_tailed
from tests.launched.tf_model import (
    SHAPES,
    Model,
    assert_same_on_all_ranks,
    compressor,
    everyone,
    reference,
    refused,
)
from tests.launched.timeline import check_names
from tests.promises.drivers.base import replaced
from tests.promises.drivers.tensorflow import PAIR
from tests.promises.failures import FAULT, Faulty

# TensorFlow makes errors of its own of ours; they carry our words
IN_A_GRAPH = tf.errors.OpError


def against_loopback(method: str, steps: int = 3, **options) -> None:
    """Reduce by Horovod and by loopback, from the same gradients, with options of the stock tape."""
    model, net = Model(compressor(method), autograph=False, **options), reference(method)
    for step in range(steps):
        inputs = everyone(step)
        got = model(inputs[hvd.rank()])
        assert_close(got, net.allreduce_many(inputs)[hvd.rank()], REORDERED, f"{method} step {step}")
        assert_same_on_all_ranks(got, f"{method} step {step}")


@case
def equals_loopback_with_predivide() -> None:
    for method in ("none", "topk", "scalecom"):
        against_loopback(method, gradient_predivide_factor=2.0)


@case
def groups() -> None:
    for method in ("none", "scalecom"):
        against_loopback(method, groups=2)


@case
def sparse_gradients_never_reach_a_compressor_unless_made_dense() -> None:
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


@case
def a_process_set() -> None:
    if hvd.size() < 3:
        raise Skip("needs 3 ranks")
    comp = Compressor("scalecom", names=list(SHAPES), density=0.02, process_set=PAIR) if PAIR.included() else None
    if comp is None:
        return
    model, net = Model(comp, process_set=PAIR), reference("scalecom", world_size=2, density=0.02)
    for step in range(3):
        inputs = [heavy_tailed(SHAPES, step, rank) for rank in range(2)]
        got = model(inputs[PAIR.rank()])
        assert_close(got, net.allreduce_many(inputs)[0], EXACT, f"step {step}")


@case
def a_loss_scale_that_is_a_variable() -> None:
    scale = tf.Variable(1.0)
    plain = Model(compressor("scalecom", density=0.02, beta=0.5))
    scaled = Model(compressor("scalecom", density=0.02, beta=0.5, loss_scale=lambda: float(scale)))
    for step, value in enumerate((1.0, 1024.0, 512.0, 65536.0)):
        scale.assign(value)
        mine = everyone(step)[hvd.rank()]
        got, want = scaled({n: g * np.float32(value) for n, g in mine.items()}), plain(mine)
        assert_close({n: g / np.float32(value) for n, g in got.items()}, want, EXACT, f"scale {value}")
    for name in SHAPES:
        np.testing.assert_array_equal(scaled.compressor.residual(name), plain.compressor.residual(name))


@case
def a_nan_on_one_rank_undoes_no_other_tensor() -> None:
    model = Model(compressor("topk"))
    for step in range(3):
        mine = everyone(step)[hvd.rank()]
        bad = {name: array.copy() for name, array in mine.items()}
        if hvd.rank() == 1:
            bad["a"].flat[3] = np.inf if step % 2 else np.nan
        got = model(bad)
        assert np.isnan(got["a"]).all() and np.isfinite(got["b"]).all(), "only that tensor"
        steps = model.state()["steps"]
        assert steps.get("a", 0) == step and steps["b"] == step * 2 + 1
        model(mine)


@case
def memory_is_used_again_but_not_a_result_that_is_kept() -> None:
    """TensorFlow holds what a piece of Python returns without a copy."""
    shapes = {"a": (300, 500), "b": (400, 300)}  # the memory of less is the allocator's
    counts = {"empty": 0, "aligned": 0}  # arrays that were asked for, and memory that was made for them

    def counting(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def call(*given) -> np.ndarray:
            found = function(*given)
            counts[function.__name__] += found.nbytes >= pool.MIN_BYTES
            return found

        return call

    for method in ("none", "topk", "fp16"):
        pool.clear()
        counts.update(empty=0, aligned=0)
        model, kept = Model(Compressor(method, names=list(shapes)), shapes, autograph=False), []
        for step in range(16):
            mine = everyone(step, shapes)[hvd.rank()]
            with replaced([(pool, "empty"), (pool, "aligned")], counting):
                results = model.step([tf.constant(mine[name]) for name in shapes])
            if step in (2, 3):
                kept.append((results, [result.numpy() for result in results]))
            if step == 0:
                first = counts["empty"]
        for results, before in kept:
            for result, copy in zip(results, before, strict=True):
                np.testing.assert_array_equal(result.numpy(), copy, err_msg=method)
        # a step's, those of two steps that are kept, and what TensorFlow has let go of late
        assert first and counts["aligned"] <= 4 * first, f"{method}: {counts}, {first} in the first step"


@case
def state_goes_through_tensorflows_checkpoints() -> None:
    model = Model(compressor("scalecom", density=0.02))
    prefix = str(OUT / f"checkpoint{hvd.rank()}")  # every rank its own: states differ
    path = None
    for step in range(4):
        if step == 3:
            model.compressor.save(OUT / "state")
            path = tf.train.Checkpoint(comp=model.compressor, weights=model.variables[0]).save(prefix)
        model(everyone(step)[hvd.rank()])
    for how in ("files", "checkpoint", "checkpoint before the first step"):
        other = Model(compressor("scalecom", density=0.02))
        if how != "checkpoint before the first step":
            other(everyone(0)[hvd.rank()])
        if how == "files":
            other.compressor.load(OUT / "state")
        else:
            tf.train.Checkpoint(comp=other.compressor, weights=other.variables[0]).restore(path).assert_consumed()
        other(everyone(3)[hvd.rank()])
        for name in SHAPES:
            np.testing.assert_array_equal(other.compressor.residual(name), model.compressor.residual(name), err_msg=how)
        assert other.compressor.state_dict()["steps"] == dict.fromkeys(SHAPES, 4), how


@case
def the_rank_that_failed_names_the_cause() -> None:
    """The others only know who it was."""
    faulty = Faulty("topk", {"density": 0.05})
    model = Model(compressor(faulty.plan))
    with faulty.failing((1,), 0):
        try:
            model(everyone(0)[hvd.rank()])
        except tf.errors.OpError as error:
            assert (FAULT if hvd.rank() == 1 else "rank 1 failed") in str(error), str(error)
        else:
            raise AssertionError("no error")


@case
def an_error_does_not_end_an_elastic_training_as_if_it_were_done() -> None:
    """hvd.elastic.run returns at an UnknownError that has none of Horovod's words, without an error."""
    faulty = Faulty("topk", {"density": 0.05})
    for elastic, kind in (("0", tf.errors.UnknownError), ("1", tf.errors.InvalidArgumentError)):
        model = Model(compressor(faulty.plan))
        with faulty.failing((1,), 0):
            try:
                os.environ["HOROVOD_ELASTIC"] = elastic
                model(everyone(0)[hvd.rank()])
            except kind as error:
                assert (FAULT if hvd.rank() == 1 else "rank 1 failed") in str(error), str(error)
            else:
                raise AssertionError("no error")
            finally:
                del os.environ["HOROVOD_ELASTIC"]


@case
def other_operations_are_refused() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product):
        for method in ("none", "topk"):
            model = Model(compressor(method), autograph=False, op=op)
            refused(IN_A_GRAPH, ["Average", "Sum", "refused"], lambda m=model: m(everyone(0)[hvd.rank()]))


@case
def bad_arguments_are_refused() -> None:
    refused(ValueError, ["same name", "'a'"], lambda: Compressor("topk", names=["a", "b", "a"]))
    refused(ValueError, ["density"], lambda: Compressor("none", density=0.1))
    few = Model(Compressor("topk", names=["a", "b"]))
    refused(ValueError, ["more gradients", "2 names"], lambda: few(everyone(0)[0]))
    comp = compressor("topk")
    Model(comp)(everyone(0)[hvd.rank()])
    other = {name: (*shape, 2) for name, shape in SHAPES.items()}
    refused(ValueError, ["serves another model"], lambda: Model(comp, other)(everyone(0, other)[0]))
    model = Model(compressor("topk", loss_scale=0.0))
    refused(IN_A_GRAPH, ["loss_scale"], lambda: model(everyone(0)[hvd.rank()]))


@case
def names_in_horovods_timeline() -> None:
    comp = compressor("scalecom", density=0.05)
    model = Model(comp)
    assert re.fullmatch(r"HorovodAllreduce\.hvdcompress\.tf\.set0\.compressor\d+", comp.prefix)

    def steps() -> None:
        for step in range(3):
            model(everyone(step)[hvd.rank()])

    check_names(hvd, steps, {f"{comp.prefix}.a.{name}" for name in ("round0.Broadcast", "round1.AllReduce")})
