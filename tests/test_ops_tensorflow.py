"""The TensorFlow verbs: buffers, where they wait for the device, and whole methods run on them.

Each verb is compared with the reference in test_ops.py and its kin, like every backend's.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import test_ops
from test_ops import Put, get, vector

import hvdcompress
from hvdcompress import testing
from hvdcompress.method import Sparse
from hvdcompress.ops import numpy as reference
from hvdcompress.testing import Case, Trial, check_method, numbers

tf = pytest.importorskip("tensorflow")
ops = importlib.import_module("hvdcompress.ops.tensorflow")
Buffer = ops.Buffer


# -- buffers ------------------------------------------------------------------------------------------------


def test_a_buffer_reads_as_its_tensor() -> None:
    x = np.float32([1, -2, 3, 0])
    buffer = Buffer(x)
    assert (len(buffer), buffer.nbytes, buffer.shape, buffer.dtype) == (4, 16, (4,), tf.float32)
    for read in (
        lambda b: b[1:3], lambda b: -b, lambda b: b * 2.0, lambda b: np.float32(2) * b, lambda b: 1.0 - b,
        lambda b: b / 2.0, lambda b: b == 3, lambda b: b < 0, lambda b: abs(b), lambda b: b - b,
    ):  # fmt: skip
        assert get(read(buffer)) == get(read(x)) and not isinstance(read(buffer), Buffer)
    assert get(tf.reverse(buffer, [0])) == get(x[::-1])
    assert np.asarray(buffer).tolist() == x.tolist() and np.array(buffer, np.float64).dtype == np.float64
    whole = Buffer(np.uint8([1, 6]))
    assert get(~whole & 0xF) == get(~np.uint8([1, 6]) & 0xF) and get(whole // 2) == get(np.uint8([1, 6]) // 2)


def test_what_was_read_of_a_buffer_stays() -> None:
    buffer, array = ops.zeros(3, "float32", like=tf.zeros(1)), np.float32([1, 2, 3])
    read, part, joined = buffer.value, buffer[:2], ops.concat([buffer])
    ops.write(buffer, array, 2.0)
    array[:] = 9
    assert np.asarray(buffer).tolist() == [2, 4, 6]
    assert not np.asarray(read).any() and not np.asarray(part).any() and not np.asarray(joined).any()
    made = Buffer(array)
    array[:] = 7
    assert np.asarray(made).tolist() == [9, 9, 9]


@pytest.mark.parametrize("wrong", [np.zeros(2, np.float32), np.zeros(3, np.float64)])
def test_a_buffer_keeps_its_shape_and_dtype(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"float32 \(3,\) cannot hold"):
        Buffer(np.zeros(3, np.float32)).assign(wrong)


def test_variables_serve_as_buffers() -> None:
    x, r = vector("normal", 50), vector("normal", 50, seed=1)
    share = Sparse(tf.range(0, 50, 3), tf.constant(r[::3]))
    for write in (
        lambda out: ops.accumulate(tf.constant(x), tf.Variable(r), 0.5, out),
        lambda out: ops.blend(out, tf.constant(r), 0.3),
        lambda out: ops.subtract(out, share, 0.5),
        lambda out: ops.subtract(out, out, 0.5),
        lambda out: ops.zero_where(out, share),
        lambda out: ops.zero_where(out, tf.constant(r * (r > 0))),
        lambda out: ops.write(out, share, 0.5),
        lambda out: ops.fill(out, 3.0),
    ):
        variable, buffer = tf.Variable(x), Buffer(x)
        write(variable)
        write(buffer)
        assert get(variable) == get(buffer) != get(x)
    assert get(ops.sort(tf.Variable(x))) == get(np.sort(x))


# -- the device ---------------------------------------------------------------------------------------------


def test_nothing_else_asks_for_a_tensors_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by ``if``, ``int``, ``float`` or numpy either, which a search of the source would not find."""
    tensor, asked = next(c for c in type(tf.zeros(1)).__mro__ if "numpy" in vars(c)), []

    def watched(name: str, original: Any) -> Any:
        def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_globals["__name__"].startswith("hvdcompress.ops") and frame.f_code.co_name != "host":
                asked.append(f"{name} in {frame.f_code.co_name}")
            return original(self, *args, **kwargs)

        return ask

    for name in ("numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__iter__"):
        monkeypatch.setattr(tensor, name, watched(name, getattr(tensor, name)))
    assert [bool(tf.ones(())), float(tf.ones(())), *asked] == [True, 1.0]
    for n in (0, 1, 1000):
        for calls in test_ops.CALLS.values():
            for function in calls:
                with np.errstate(all="ignore"):
                    function(ops, Put(ops), vector("normal", n), vector("normal", n, seed=1))
    assert not asked


def test_no_index_is_added_to_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU TensorFlow takes duplicates in any order (on a CPU in theirs, so sums would not show it)."""
    calls, add, scatter = [], tf.tensor_scatter_nd_add, tf.scatter_nd

    def note(index: Any, values: Any) -> None:
        calls.append(np.bincount(np.asarray(index)[np.asarray(values) != 0, 0]).max(initial=0))

    def watch_add(out: Any, index: Any, values: Any) -> Any:
        note(index, values)
        return add(out, index, values)

    def watch_scatter(index: Any, values: Any, shape: Any) -> Any:
        note(index, values)
        return scatter(index, values, shape)

    monkeypatch.setattr(tf, "tensor_scatter_nd_add", watch_add)
    monkeypatch.setattr(tf, "scatter_nd", watch_scatter)
    index = tf.constant([0, 2, 5, 5, 5, 2, 5, 7, 0, 1, 2, 2])
    values = tf.constant([1.0, 2, 3, 0, 0, 4, 5, 6, 7, 8, 9, 0])
    out = Buffer(np.ones(8, np.float32))
    ops.write(out, Sparse(index, values), 1.0)
    assert np.asarray(out).tolist() == [8, 8, 15, 0, 0, 8, 0, 6]
    assert calls == [1, 1, 1, 1]  # the third for index 2, which three ranks sent; the last puts the sums in place


def test_denormal_numbers_are_chosen_by_their_bits() -> None:
    """TensorFlow's kernels would compare them as zeros, and another backend's ranks choose others."""
    x = np.float32([0, 1e-45, -3e-45, 0, 2.5e-39, -1e-40])
    assert not (tf.constant(x) > 0).numpy().any()
    for verb, arguments in (
        ("top_k", (3,)), ("chunk_argmax", (2,)), ("max_abs", ()), ("count_above", (1e-45,)), ("first_above", (0.0, 9)),
        ("first_equal", (np.float32(1e-45), 9)), ("kth_magnitude", (2,)), ("float_bounds", ()), ("to_bf16", ()),
    ):  # fmt: skip
        assert get(getattr(ops, verb)(tf.constant(x), *arguments)) == get(getattr(reference, verb)(x, *arguments)), verb


# -- methods ------------------------------------------------------------------------------------------------

CHOSEN: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("fp16", {"feedback": "plain"}),
    ("bf16", {}),
    ("topk", {"density": 0.06, "values": "fp16"}),
    ("topk", {"density": 0.3, "values": "rangefloat10", "feedback": "lowpass", "beta": 0.3}),
    ("topk", {"density": 0.06, "values": "qsgd4"}),
    ("randomk", {"density": 0.06, "values": "bf16"}),
    ("gaussiank", {"density": 0.06}),
    ("gaussiank", {"density": 0.06, "refine": "paper", "feedback": "momentum"}),
    ("scalecom", {"density": 0.06}),
    ("scalecom", {"density": 0.06, "select": "exact", "values": "fp16"}),
    ("dgc", {"density": 0.06, "clip_norm": 1.0}),
    ("gtopk", {"density": 0.06}),
]


def named(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("number,id,options", [(i, *case) for i, case in enumerate(CHOSEN)], ids=map(named, CHOSEN))
def test_methods_send_the_reference_bytes(number: int, id: str, options: dict[str, Any]) -> None:
    method, world = hvdcompress.get(id, **options), number % 2 + 2
    nets = [Trial(method, world, ops=backend, seed=3) for backend in (reference, ops)]
    for step, kind in enumerate(("heavy", "constant", "sparse", "zero")):
        for n in (1, 1030):
            shape = Case(method).shape(n)
            gradients = [numbers(shape, rank, step, n, kind=kind) for rank in range(world)]  # type: ignore[arg-type]
            outs = [net.allreduce(gradients, f"w{n}")[0] for net in nets]
            residuals = [net.residual(f"w{n}", world - 1) for net in nets]
            assert get(outs[0]) == get(outs[1]) and get(residuals[0]) == get(residuals[1]), f"{kind} data, n = {n}"
            assert nets[0].log == nets[1].log, f"{kind} data, n = {n}"


OF_BACKENDS = (testing.check_conservation, testing.check_nonfinite, testing.check_resume, testing.check_wire)
METHODS = hvdcompress.available()


@pytest.mark.parametrize("id", METHODS)
def test_every_method_runs(id: str) -> None:
    density = {"density": 0.05} if "density" in hvdcompress.get(id).hyperparameters() else {}
    check_method(hvdcompress.get(id, **density), worlds=(2,), sizes=(97,), steps=2, ops=ops, checks=OF_BACKENDS)
