"""Run by every rank, under horovodrun: each case checks one promise of the TensorFlow driver; see ``harness.py``."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import harness
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import NUMBERS, OUT, Skip, case, heavy_tailed
from payloads import LAYOUT_MATTERS, digests
from payloads import VARIANTS as PAYLOADS

import hvdcompress
from hvdcompress import tensorflow as driver
from hvdcompress.loopback import Loopback
from hvdcompress.tensorflow import Compressor
from hvdcompress.tensorflow.segments import PROBE, Segments

# a convolution (height, width, in, out), matrices, and two tensors that are too small to compress
SHAPES = {"a": (37, 41), "b": (3, 5, 7, 16), "c": (5,), "d": (1,), "e": (8, 131)}

# (method, hyper-parameters): every method, and options that change its choreography
VARIANTS = [
    ("none", {}),
    ("none", {"feedback": "plain"}),
    ("fp16", {}),
    ("bf16", {}),
    ("topk", {"density": 0.02}),
    ("topk", {"density": 0.05, "values": "qsgd4"}),
    ("topk", {"density": 0.05, "feedback": "momentum"}),
    ("topk", {"density": 0.05, "warmup": {"steps": 2}, "schedule": {"density": {"steps": {4: 0.01}}}}),
    ("randomk", {"density": 0.02}),
    ("randomk", {"density": 0.05, "values": "rangefloat8"}),
    ("scalecom", {"density": 0.01, "beta": 0.3}),
    ("scalecom", {"density": 0.02, "select": "exact", "values": "fp16"}),
    ("scalecom", {"density": 0.05, "values": "qsgd8", "warmup": {"steps": 2}}),
    ("gaussiank", {"density": 0.02}),
    ("gaussiank", {"density": 0.02, "refine": "paper", "values": "bf16"}),
    ("fft", {}),
    ("fft", {"feedback": "plain", "order": "filters", "block": 64}),
    ("qsgd", {}),
    ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
    ("terngrad", {}),
    ("terngrad", {"clip_factor": 0.0, "route": "scatter"}),
    ("signsgd", {}),
    ("signsgd", {"route": "scatter"}),
    ("gtopk", {"density": 0.02}),
    ("dgc", {"density": 0.02, "clip_norm": 1.0}),
    ("powersgd", {}),
    ("powersgd", {"matrix_rank": 1, "values": "bf16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "feedback": "plain"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 3, "tensors": "all", "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "values": "qsgd8", "dense_values": "qsgd4"}),
]
METHODS = {method: settings for method, settings in reversed(VARIANTS)}  # the first of each


class Reference(Loopback):
    """Loopback that takes four dimensions for TensorFlow's: height, width, in, out."""

    def _specs(self, gradients, op):
        return {name: replace(spec, layout="hwio") for name, spec in super()._specs(gradients, op).items()}


class Model:
    """Variables whose gradients we choose: the loss is their product with what is fed."""

    def __init__(self, comp: Compressor, shapes: dict = SHAPES, dtype=tf.float32, **options):
        self.comp, self.shapes, self.dtype, self.options = comp, shapes, dtype, options
        self.variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in shapes.values()]
        self.step = tf.function(self.reduce)

    def reduce(self, fed):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(self.variables, fed, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=self.comp, **self.options)
        return tape.gradient(loss, self.variables)

    def __call__(self, gradients: dict, step: Callable | None = None) -> dict[str, np.ndarray]:
        fed = [tf.cast(tf.constant(gradients[name]), self.dtype) for name in self.shapes]
        return dict(zip(self.shapes, [g.numpy() for g in (step or self.step)(fed)], strict=True))


def everyone(step: int, shapes: dict = SHAPES) -> list[dict[str, np.ndarray]]:
    """Every rank's gradients of a step."""
    return [heavy_tailed(shapes, step, rank) for rank in range(hvd.size())]


def compressor(method: str, **settings) -> Compressor:
    return Compressor(method, names=list(SHAPES), **settings)


def sums_of_halves(method: str, settings: dict) -> bool:
    """Whether a half-precision sum is among what is sent: of three ranks, it depends on how Horovod fused tensors."""
    return hvd.size() > 2 and "fp16" in (method, settings.get("values"))


def assert_close(got: dict, want: dict, exact: bool, what: str) -> None:
    for name in want:
        if exact:
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{what}, {name}")
        else:  # ranks are summed in another order than loopback's
            scale = np.abs(want[name]).max() + 1e-30
            np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=4e-7 * scale, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    found = hvd.allgather_object({name: array.tobytes() for name, array in arrays.items()})
    for name in arrays:
        assert len({one[name] for one in found}) == 1, f"{what}: ranks differ in {name}"


def against_loopback(method: str, settings: dict, op=hvd.Average, steps: int = 6, **options) -> None:
    """Reduce by Horovod and by loopback, from the same gradients; compare results, residuals and bytes."""
    world, rank = hvd.size(), hvd.rank()
    comp = compressor(method, **settings)
    model, net = Model(comp, op=op, **options), Reference(method, world=world, **settings)
    what = f"{method} {settings}"
    # three ranks' sums differ in rounding, and what a method makes of them differs on where it selects by them
    smooth = method not in ("gtopk", "terngrad", "powersgd", "gradiveq", "fft") and "qsgd" not in str(settings)
    sent: dict[str, list[bytes]] = {}
    for step in range(steps):
        inputs = everyone(step)
        with watched(sent):
            got = model(inputs[rank])
        want = net.allreduce_many(inputs, op="sum" if op == hvd.Sum else "average")[rank]
        if world == 2 or (smooth and not sums_of_halves(method, settings)):
            assert_close(got, want, world == 2 and not options, f"{what} step {step}")
        assert_same_on_all_ranks(got, f"{what} step {step}")
    for name in SHAPES if world == 2 and not options else ():
        np.testing.assert_array_equal(comp.residual(name), net.residual(name, rank), err_msg=f"{what} {name}")
    # beyond loopback's bytes: a probe for each tensor and step; plans once
    extra = steps * 4 * PROBE * len(SHAPES) + comp.ledger.tensors()["plan"].sent
    assert comp.ledger.bytes_sent() == net.ledger.bytes_sent(rank) + extra, what
    assert comp.ledger.bytes_sent() == sum(len(payload) for one in sent.values() for payload in one) + extra, what
    assert comp.ledger.steps == steps


@case
def every_method_is_tried() -> None:
    assert set(METHODS) == set(hvdcompress.available())


@case
def equals_loopback() -> None:
    for method, settings in VARIANTS:
        against_loopback(method, settings)


@case
def equals_loopback_with_sum() -> None:
    for method in ("none", "topk", "scalecom", "fp16"):
        against_loopback(method, {}, op=hvd.Sum, steps=3)


@case
def equals_loopback_with_predivide() -> None:
    for method in ("none", "topk", "scalecom"):
        against_loopback(method, {}, steps=3, gradient_predivide_factor=2.0)


@case
def groups() -> None:
    for method in ("none", "scalecom"):
        against_loopback(method, {}, steps=3, groups=2)


@case
def payloads_for_the_other_driver_to_equal() -> None:
    """Not a check of its own: the test compares what both drivers handed to Horovod."""
    for number, (method, settings) in enumerate(PAYLOADS):
        sent: dict[str, list[bytes]] = {}
        with watched(sent):
            turned = method in LAYOUT_MATTERS
            shapes = {n: shape[::-1] if turned else shape for n, shape in PAYLOAD_SHAPES.items()}
            model = Model(Compressor(method, names=list(shapes), **settings), shapes)
            for step in range(5):
                fed = heavy_tailed(PAYLOAD_SHAPES, step, hvd.rank())
                model({n: g.T if turned else g for n, g in fed.items()})
        NUMBERS[f"payloads {number}"] = digests(sent, method)


PAYLOAD_SHAPES = {name: SHAPES[name] for name in ("a", "c", "e")}  # a convolution lies otherwise in torch


@contextmanager
def watched(sent: dict[str, list[bytes]]) -> Iterator[None]:
    """Inside, ``sent`` gets every payload of every tensor that goes into Horovod."""
    begin, send = Segments.begin, Segments.send

    def watched_begin(self, bucket, gradient, rides):
        stock = begin(self, bucket, gradient, rides)
        sent.setdefault(bucket.spec.name, []).append(stock[:-PROBE].tobytes())
        return stock

    def watched_send(self, bucket, number, planned):
        out = send(self, bucket, number, planned)
        sent[bucket.spec.name].append(out[0].tobytes())
        return out

    Segments.begin, Segments.send = watched_begin, watched_send
    try:
        yield
    finally:
        Segments.begin, Segments.send = begin, send


# -- graphs ------------------------------------------------------------------------------------------------


@case
def denormal_numbers_are_kept() -> None:
    """TensorFlow's threads take them for zeros in what they compute; the codecs must not."""
    gradients = [np.float32([1e-40 * (rank + 1), 3e-42, 1e-38, 2.0] * 300) for rank in range(hvd.size())]
    for method, settings in (("none", {}), ("topk", {"density": 0.2}), ("scalecom", {"density": 0.3})):
        comp, net = compressor(method, **settings), Reference(method, world=hvd.size(), **settings)
        reduce = tf.function(lambda x, comp=comp: hvd.allreduce(x, compression=comp))
        for step in range(3):
            got = reduce(tf.constant(gradients[hvd.rank()])).numpy()
            want = net.allreduce(gradients, name="a")[0]
            if hvd.size() == 2:
                np.testing.assert_array_equal(got, want, err_msg=f"{method} step {step}")
        if hvd.size() == 2:
            np.testing.assert_array_equal(comp.residual("a"), net.residual("a", hvd.rank()))


@case
def names_are_ordinals_by_default() -> None:
    comp = Compressor("topk", density=0.05)
    model = Model(comp)
    model(everyone(0)[hvd.rank()])
    assert list(comp.buckets) == ["0", "1", "2", "3", "4"]
    assert comp.residual("0").shape == SHAPES["a"] and comp.residual("0").any()
    assert "topk" in comp.describe() and "5" not in comp.buckets


@case
def retraces_and_other_functions_share_one_state() -> None:
    for method, settings in (("scalecom", {"density": 0.02}), ("topk", {"density": 0.02, "warmup": {"steps": 2}})):
        comp = compressor(method, **settings)
        model, net = Model(comp), Reference(method, world=hvd.size(), **settings)
        weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES.values()]
        traces = []

        def step(batch, model=model, weights=weights):  # a function of its own
            traces.append(batch.shape)  # noqa: B023
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(w) for w in weights]) * tf.reduce_mean(batch)
            return hvd.DistributedGradientTape(tape, compression=model.comp).gradient(loss, weights)

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
            assert_close(got, net.allreduce_many(inputs)[0], hvd.size() == 2, f"{method} step {number}")
        assert len(traces) == 4


@case
def eager_execution() -> None:
    comp = compressor("scalecom", density=0.02)
    model, net = Model(comp), Reference("scalecom", world=hvd.size(), density=0.02)
    for step in range(3):
        inputs = everyone(step)
        got = model(inputs[hvd.rank()], model.reduce)  # the tape is outside of any tf.function
        assert_close(got, net.allreduce_many(inputs)[0], hvd.size() == 2, f"step {step}")


@case
def steps_in_a_loop_inside_one_function() -> None:
    for method, settings in (("topk", {"density": 0.02}), ("scalecom", {"density": 0.02, "warmup": {"steps": 3}})):
        model, net = Model(compressor(method, **settings)), Reference(method, world=hvd.size(), **settings)
        count = 4

        @tf.function
        def loop(fed, model=model, count=count):
            sums = [tf.zeros(shape) for shape in SHAPES.values()]
            for i in tf.range(count):
                reduced = model.reduce([g[i] for g in fed])
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
            assert_close(got, want, hvd.size() == 2, f"{method} call {call}")


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
            assert comp.worker.steps == {"0": number + 1, "1": number + 1}, comp.worker.steps


@case
def several_models_and_optimizers() -> None:
    comps = [compressor("topk", density=0.1), compressor("topk", density=0.1), compressor("scalecom")]
    models = [Model(comp) for comp in comps]

    @tf.function
    def both(fed):
        return [model.reduce(fed) for model in models]

    net = Reference("topk", world=hvd.size(), density=0.1)
    for step in range(3):
        inputs = everyone(step)
        first, second, _ = both([tf.constant(inputs[hvd.rank()][name]) for name in SHAPES])
        want = net.allreduce_many(inputs)[0]
        for reduced in (first, second):
            got = dict(zip(SHAPES, [g.numpy() for g in reduced], strict=True))
            assert_close(got, want, hvd.size() == 2, f"step {step}")
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
    assert nothing is None and gradient.shape == (40, 40) and list(comp.buckets) == ["0"]


@case
def other_dtypes() -> None:
    for dtype in (tf.float64, tf.float16, tf.bfloat16):
        for method in ("none", "fp16", "topk", "scalecom"):
            comp = compressor(method)
            model, net = Model(comp, dtype=dtype), Reference(method, world=hvd.size())
            for step in range(2):
                inputs = everyone(step)
                got, want = model(inputs[hvd.rank()]), net.allreduce_many(inputs)[0]
                for name in SHAPES:
                    assert got[name].dtype == dtype.as_numpy_dtype
                    if hvd.size() == 2:
                        rounded = tf.cast(tf.constant(want[name]), dtype).numpy()
                        np.testing.assert_array_equal(got[name], rounded, err_msg=f"{method} {dtype} {name}")


@case
def a_large_float64_stays_float64_under_none() -> None:
    model = Model(compressor("none"), dtype=tf.float64)
    model.dtype = tf.float64
    got = model({name: np.full(shape, 1e300) for name, shape in SHAPES.items()})
    assert all((g == 1e300).all() for g in got.values())


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
        assert bool(comp.buckets) is as_dense  # Horovod gathers sparse ones itself, uncompressed


@case
def a_process_set() -> None:
    if hvd.size() < 3:
        raise Skip("needs 3 ranks")
    comp = Compressor("scalecom", names=list(SHAPES), density=0.02, process_set=PAIR) if PAIR.included() else None
    if comp is None:
        return
    model, net = Model(comp, process_set=PAIR), Reference("scalecom", world=2, density=0.02)
    for step in range(3):
        inputs = [heavy_tailed(SHAPES, step, rank) for rank in range(2)]
        got = model(inputs[PAIR.rank()])
        assert_close(got, net.allreduce_many(inputs)[0], True, f"step {step}")


# -- loss scales, and numbers that are none ---------------------------------------------------------------------


@case
def a_changing_loss_scale() -> None:
    scale = tf.Variable(1.0)
    plain = Model(compressor("scalecom", density=0.02, beta=0.5))
    scaled = Model(compressor("scalecom", density=0.02, beta=0.5, loss_scale=lambda: float(scale)))
    for step, value in enumerate((1.0, 1024.0, 512.0, 65536.0)):
        scale.assign(value)
        mine = everyone(step)[hvd.rank()]
        got, want = scaled({n: g * np.float32(value) for n, g in mine.items()}), plain(mine)
        assert_close({n: g / np.float32(value) for n, g in got.items()}, want, True, f"scale {value}")
    for name in SHAPES:
        np.testing.assert_array_equal(scaled.comp.residual(name), plain.comp.residual(name))


@case
def a_nan_on_one_rank_undoes_that_tensor_everywhere() -> None:
    for method in ("none", "topk", "scalecom", "dgc", "gradiveq"):
        settings = METHODS[method]
        model, control = Model(compressor(method, **settings)), Model(compressor(method, **settings))
        for step in range(3):
            mine = everyone(step)[hvd.rank()]
            bad = {n: g.copy() for n, g in mine.items()}
            if hvd.rank() == 1:
                bad["a"].flat[3] = np.inf if step % 2 else np.nan
            before = model.comp.state_dict()
            got = model(bad)
            assert np.isnan(got["a"]).all(), "NaN on every rank"
            assert np.isfinite(got["b"]).all(), "only that tensor"
            after = model.comp.state_dict()
            assert after["steps"]["a"] == before["steps"].get("a", 0) and after["steps"]["b"] == step * 2 + 1
            for slot, array in before["state"].get("a", {}).items():
                np.testing.assert_array_equal(array, after["state"]["a"][slot], err_msg=f"{method} {slot}")
            got, want = model(mine), control(mine)
            if not sums_of_halves(method, settings):
                np.testing.assert_array_equal(got["a"], want["a"], err_msg=method)


# -- state -----------------------------------------------------------------------------------------------------


def continues_alike(first: Model, second: Model, steps: range, what: str) -> None:
    for step in steps:
        mine = everyone(step)[hvd.rank()]
        want, got = first(mine), second(mine)
        assert_close(got, want, True, f"{what} step {step}")
    for name in SHAPES:
        np.testing.assert_array_equal(second.comp.residual(name), first.comp.residual(name), err_msg=what)


@case
def state_is_restored_bit_exactly_before_and_after_the_first_trace() -> None:
    for method, settings in METHODS.items():
        if sums_of_halves(method, settings):
            continue
        model = Model(compressor(method, **settings))
        for step in range(3):
            model(everyone(step)[hvd.rank()])
        saved = model.comp.state_dict()
        fresh = Model(compressor(method, **settings))
        fresh.comp.load_state_dict(saved)
        continues_alike(model, fresh, range(3, 6), f"{method}, fresh")
        used = Model(compressor(method, **settings))
        used(everyone(9)[hvd.rank()])
        used.comp.load_state_dict(model.comp.state_dict())
        continues_alike(model, used, range(6, 8), f"{method}, used")


@case
def state_goes_through_files_and_checkpoints() -> None:
    model = Model(compressor("scalecom", density=0.02))
    prefix = str(OUT / f"checkpoint{hvd.rank()}")  # every rank its own: states differ
    path = None
    for step in range(4):
        if step == 3:
            model.comp.save(OUT / "state")
            path = tf.train.Checkpoint(comp=model.comp, weights=model.variables[0]).save(prefix)
        model(everyone(step)[hvd.rank()])
    for how in ("files", "checkpoint", "checkpoint before the first step"):
        other = Model(compressor("scalecom", density=0.02))
        if how != "checkpoint before the first step":
            other(everyone(0)[hvd.rank()])
        if how == "files":
            other.comp.load(OUT / "state")
        else:
            tf.train.Checkpoint(comp=other.comp, weights=other.variables[0]).restore(path).assert_consumed()
        other(everyone(3)[hvd.rank()])
        for name in SHAPES:
            np.testing.assert_array_equal(other.comp.residual(name), model.comp.residual(name), err_msg=how)
        assert other.comp.worker.steps == dict.fromkeys(SHAPES, 4), how


@case
def a_state_that_does_not_fit_is_refused() -> None:
    model = Model(compressor("topk"))
    model(everyone(0)[hvd.rank()])
    saved = model.comp.state_dict()
    for changed, word in (({"rank": hvd.rank() + 1}, "rank"), ({"steps": {"stranger": 1}}, "stranger")):
        refused(ValueError, [word], lambda changed=changed: model.comp.load_state_dict({**saved, **changed}))


# -- triggers ----------------------------------------------------------------------------------------------------


@case
def a_trigger_on_one_rank_restarts_all() -> None:
    settings = {"dense_steps": 2, "compressed_steps": 4}
    model, net = Model(compressor("gradiveq", **settings)), Reference("gradiveq", world=hvd.size(), **settings)
    for step in range(9):
        if step in (0, 4):
            net.trigger()
            if hvd.rank() == hvd.size() - 1:
                model.comp.trigger()
        if step == 7:
            net.observe(learning_rate=1.0)
            net.observe(learning_rate=0.1)
            if hvd.rank() == 0:
                model.comp.observe(learning_rate=1.0)
                model.comp.observe(learning_rate=0.1)
        inputs = everyone(step)
        got, want = model(inputs[hvd.rank()]), net.allreduce_many(inputs)[0]
        phases = {model.comp.worker.phase_now(model.comp.buckets["b"])[0]}
        assert phases == {net.ranks[0].phase_now(net.ranks[0].buckets["b"])[0]}, step
        if hvd.size() == 2:
            assert_close(got, want, True, f"step {step}")
    assert model.comp.worker.triggers["b"] == 3


# -- errors: on all ranks, and no hang -------------------------------------------------------------------------------


def refused(kind: type[BaseException] | tuple, words: list[str], run: Callable[[], object]) -> None:
    """``run`` raises on every rank, with these words in its message."""
    try:
        run()
        message = "no error"
    except kind as error:
        message = str(error)
    messages = hvd.allgather_object(message)
    for rank, text in enumerate(messages):
        for word in words:
            assert word in text, f"rank {rank}: {word!r} is not in {text!r}"


# TensorFlow makes errors of its own of ours; they carry our words
IN_A_GRAPH = tf.errors.OpError
WHILE_TRACING = Exception


@case
def different_plans() -> None:
    first = hvd.rank() == 0
    model = Model(compressor("topk", density=0.01 if first else 0.02))
    refused(WHILE_TRACING, ["PeerError", "density", "0.01", "0.02", "rank 1"], lambda: model(everyone(0)[0]))
    model = Model(compressor("scalecom" if first else "topk"))
    refused(WHILE_TRACING, ["PeerError", "'method'", "topk", "scalecom"], lambda: model(everyone(0)[0]))
    model = Model(Compressor("topk", names=list(SHAPES) if first else list(SHAPES)[::-1]))
    refused(WHILE_TRACING, ["PeerError", "names", "rank 1"], lambda: model(everyone(0)[0]))


@case
def a_rank_that_raises_inside_the_codec() -> None:
    for method in ("topk", "scalecom", "qsgd"):
        for step_of_failure in (0, 2):
            model = Model(compressor(method))
            for step in range(step_of_failure):
                model(everyone(step)[hvd.rank()])
            start = driver.Worker.start

            def fail(self, bucket, *rest, start=start):
                if bucket.spec.name == "b" and hvd.rank() == 1:
                    raise FloatingPointError("a fault made by the test")
                return start(self, bucket, *rest)

            driver.Worker.start = fail
            try:
                mine = everyone(step_of_failure)[hvd.rank()]
                refused(IN_A_GRAPH, ["every rank stops", "'b'", "rank 1"], lambda m=model, g=mine: m(g))
                refused(IN_A_GRAPH, ["every rank stops", "'b'"], lambda m=model, g=mine: m(g))  # and it stays so
            finally:
                driver.Worker.start = start
            if hvd.rank() == 1:
                assert "a fault made by the test" in str(model.comp._segments.failure)
    against_loopback("topk", {}, steps=2)  # nothing is left behind


@case
def other_operations_are_refused() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product):
        for method in ("none", "topk"):
            model = Model(compressor(method), op=op)
            refused(IN_A_GRAPH, ["Average", "Sum", "refused"], lambda m=model: m(everyone(0)[hvd.rank()]))


@case
def bad_arguments_are_refused() -> None:
    refused(ValueError, ["bucket_elements"], lambda: Compressor("topk", bucket_elements=4096))
    refused(ValueError, ["one name", "'a'"], lambda: Compressor("topk", names=["a", "b", "a"]))
    refused(ValueError, ["density"], lambda: Compressor("topk", density=2.0))
    refused(ValueError, ["density"], lambda: Compressor("none", density=0.1))
    everything = Model(compressor("gaussiank", scope="global"))
    refused(ValueError, ["scope", "tensor"], lambda: everything(everyone(0)[0]))
    few = Model(Compressor("topk", names=["a", "b"]))
    refused(ValueError, ["more gradients", "2 names"], lambda: few(everyone(0)[0]))
    comp = compressor("topk")
    Model(comp)(everyone(0)[hvd.rank()])
    other = {name: (*shape, 2) for name, shape in SHAPES.items()}
    refused(ValueError, ["'a'", "(37, 41)", "(37, 41, 2)"], lambda: Model(comp, other)(everyone(0, other)[0]))
    model = Model(compressor("topk", loss_scale=0.0))
    refused(IN_A_GRAPH, ["loss_scale"], lambda: model(everyone(0)[hvd.rank()]))


PAIR = hvd.ProcessSet([0, 2])


def main() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    world = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)
    hvd.init(process_sets=[PAIR] if world > 2 else None)
    harness.run(hvd.rank(), lambda: hvd.allgather_object(0))


if __name__ == "__main__":
    main()
