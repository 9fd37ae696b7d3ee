"""The conformance suite on every method, and the golden cases. With ``--slow``: on every variant, backend and world.

The methods and their variants are found, not listed: a new file in ``methods/`` is tested without further work.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hvdcompress
from hvdcompress import registry, testing
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Method, Reduced, Slot, Sparse
from hvdcompress.parts import feedback
from hvdcompress.registry import field_docs
from hvdcompress.testing import CHECKS, Case, Trial, backends, check_method, numbers, variants
from hvdcompress.testing.trial import Grouped, plan_for
from tests import make_golden

BACKENDS = backends()
METHODS = hvdcompress.available()
VARIANTS = {id: variants(registry.classes()[id]) for id in METHODS}
#: checks that depend on the array backend; the golden cases compare its payloads
OF_BACKENDS = (
    testing.check_shapes,
    testing.check_results,
    testing.check_finite,
    testing.check_conservation,
    testing.check_nonfinite,
    testing.check_resume,
    testing.check_state,
    testing.check_wire,
    testing.check_bytes,
)
#: methods with different array ops: selection and statistics, matrices, and random codes in packed fields
DIFFERENT_OPS = ("gaussiank", "powersgd", "terngrad")


def some(*fast: str) -> list[Any]:
    """Return all ids of methods; those that are not ``fast`` are slow."""
    return [pytest.param(id, marks=[] if id in fast else [pytest.mark.slow]) for id in METHODS]


def _all_variants() -> list[Any]:
    """Return all (id, name of the variant). Not slow: defaults, and the first example of a method with phases."""
    found = []
    for id, of_method in VARIANTS.items():
        cls = registry.classes()[id]
        fast = [{}, *(cls.examples[:1] if len(cls.phases) > 1 else ())]
        for name, options in of_method.items():
            found.append(pytest.param(id, name, marks=[] if options in fast else [pytest.mark.slow]))
    return found


def _check(id: str, name: str, world_size: int) -> None:
    method = hvdcompress.get_method(id, **VARIANTS[id][name])
    steps = 3 if len(method.phases) == 1 else 6  # through all phases
    check_method(method, world_sizes=(world_size,), sizes=(0, 1, 97), steps=steps, ops=BACKENDS["numpy"])


@pytest.mark.parametrize("id,name", _all_variants())
def test_variant_conforms(id: str, name: str) -> None:
    _check(id, name, world_size=3)


@pytest.mark.parametrize("world_size", [1, *(pytest.param(p, marks=pytest.mark.slow) for p in (2, 4, 5))])
@pytest.mark.parametrize("id", METHODS)
def test_method_conforms_in_other_worlds(id: str, world_size: int) -> None:
    """The second variant of each method has a low density, or lowpass feedback."""
    _check(id, list(VARIANTS[id])[1], world_size)


@pytest.mark.parametrize("id", some(*DIFFERENT_OPS))
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "numpy"])
def test_method_conforms_on_every_backend(backend: str, id: str) -> None:
    density = {"density": 0.05} if "density" in hvdcompress.get_method(id).hyperparameters() else {}
    method = hvdcompress.get_method(id, **density)
    check_method(method, world_sizes=(3,), sizes=(0, 1, 97), steps=2, ops=BACKENDS[backend], checks=OF_BACKENDS)


def assert_nearly_all_close(a: Any, b: Any, *, method: Method, where: str) -> None:
    """Equal up to float32 rounding, except a few elements where a tiny difference changes a code or a selection."""
    scale = np.abs(a).max(initial=0.0)
    share = np.mean(np.abs(a - b) <= 1e-4 * scale + 1e-38) if a.size else 1.0
    exact_codec = getattr(method, "values", "fp32") == "fp32"
    assert share == 1.0 if exact_codec else np.abs(a - b).max() <= 0.2 * scale, where


# -- hypothesis: random gradients -------------------------------------------------------------------------

LARGE = float(np.float32(1e37))
floats = st.floats(-LARGE, LARGE, width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("id", METHODS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_gradients(id: str, data: st.DataObject) -> None:
    """For any finite floats: results are finite and equal on all ranks, and nothing is lost."""
    name = data.draw(st.sampled_from(list(VARIANTS[id])), "variant")
    method = hvdcompress.get_method(id, **VARIANTS[id][name])
    if getattr(method, "unbiased", False):
        return  # n/k times a huge gradient is beyond float32
    world_size, n = data.draw(st.integers(1, 5), "world_size"), data.draw(st.integers(0, 40), "n")
    shape = Case(method).shape(n)
    net = Trial(method, world_size, ops=BACKENDS["numpy"])
    for step in range(2):
        gradients = [
            data.draw(hnp.arrays(np.float32, shape, elements=floats), f"step {step}, rank {r}")
            for r in range(world_size)
        ]
        before = [g.copy() for g in gradients]
        kept = [net.residual("w", r) for r in range(world_size)] if step else [np.zeros(shape)]
        old = np.sum(kept, axis=0, dtype=np.float64)
        outs = net.allreduce(gradients, "w", op="average")
        assert all(np.isfinite(out).all() for out in outs)
        assert len({out.tobytes() for out in outs}) == 1
        assert all(map(np.array_equal, gradients, before))
        new = np.sum([net.residual("w", r) for r in range(world_size)], axis=0, dtype=np.float64)
        if method.feedback == "plain" and "fp16" not in (id, getattr(method, "values", "")):
            sent = np.sum(gradients, axis=0, dtype=np.float64) + old - new
            # residuals of different ranks may cancel out, what rounding left of each does not
            scale = sum(np.abs(each).max(initial=0) for each in [*gradients, *kept])
            assert np.abs(sent - world_size * outs[0].astype(np.float64)).max(initial=0) <= 1e-5 * scale + 1e-40


@pytest.mark.parametrize("id", METHODS)
@settings(max_examples=4)
@given(data=st.data())
def test_any_tensors_in_one_step(id: str, data: st.DataObject) -> None:
    """Several tensors at once give the same results as each alone (except with scope: global, which joins them)."""
    alone_is_equal = [name for name, options in VARIANTS[id].items() if options.get("scope") != "global"]
    method = hvdcompress.get_method(id, **VARIANTS[id][data.draw(st.sampled_from(alone_is_equal), "variant")])
    world_size = data.draw(st.integers(1, 4), "world_size")
    shapes = data.draw(
        st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.tuples(st.integers(0, 30))), "shapes"
    )
    plan = plan_for(method, seed=5)
    together, alone = Trial(Grouped.of(plan), world_size), Trial(plan, world_size)
    for step in range(2):
        gradients = [{n: numbers(s, rank, step, len(n)) for n, s in shapes.items()} for rank in range(world_size)]
        outs = together.allreduce(gradients)
        for n in shapes:
            expected = alone.allreduce([one[n] for one in gradients], n)
            assert all(np.array_equal(out[n], e) for out, e in zip(outs, expected, strict=True))
            assert all(np.array_equal(together.residual(n, r), alone.residual(n, r)) for r in range(world_size))


# -- the files that belong to a method --------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("id", METHODS)
def test_golden_case(id: str, backend: str) -> None:
    """Payloads, results and residuals are equal to the byte to those recorded in the case."""
    path = make_golden.golden_path(id)
    assert path.exists(), f"make it with: {make_golden.COMMAND} {id}"
    cases = json.loads(path.read_text(encoding="utf-8"))
    assert cases.keys() == make_golden.golden_variants(id).keys(), f"options changed: {make_golden.COMMAND} {id}"
    for name, case in cases.items():
        found = make_golden.record(id, case["settings"], BACKENDS[backend])
        exact = registry.classes()[id].exact  # or it depends on the processor
        for step, (now, then) in enumerate(zip(found["steps"], case["steps"], strict=True)):
            for key in ("collectives", "result", "residual") if exact else ():
                assert now[key] == then[key], f"{id}, {name}, step {step}: other {key} than in the golden case"
            if not exact and "values" not in case["settings"]:
                for tensor, text in then["result"].items():
                    a, b = (np.frombuffer(bytes.fromhex(t), "<f4") for t in (text, now["result"][tensor]))
                    assert_nearly_all_close(
                        a, b, method=hvdcompress.get_method(id, **case["settings"]), where=f"{id}, {name}"
                    )


@pytest.mark.parametrize("id", METHODS)
def test_method_documents_itself(id: str) -> None:
    """The docstring has the sections of a method's page and a doctest; each field has a docstring below it."""
    cls = registry.classes()[id]
    text = registry.docstring(cls)
    for words in ("What is sent:", "Bytes:", "When it loses:", "Departures", ">>> "):
        assert words in text, f"methods/{id}.py: its docstring lacks {words!r}"
    missing = {field.name for field in fields(cls)} - field_docs(cls).keys()
    assert not missing, f"methods/{id}.py: no text below the fields {sorted(missing)}"
    example = doctest.DocTestFinder(recurse=False).find(importlib.import_module(cls.__module__))
    assert any(test.examples for test in example)


# -- third parties ----------------------------------------------------------------------------------------


def _third_party(**methods: Any) -> Method:
    """An unregistered method: it sends every other element of the gradient."""

    class Half(Method):
        needs_feedback = True
        paper, sends = "none", "every other value, summed"
        feedback: Any = "plain"

        def num_bytes(self, spec: Any, world_size: int) -> int:
            return 4 * ((spec.size + 1) // 2)

        def exchange(self, x: Any, state: Any, ctx: Any, work: Any) -> Any:
            ops = work.ops
            index = ops.top_k(x, ctx.spec.size)[::2]
            own = ops.take(x, index)
            total = yield AllReduce(own)
            return Reduced(total=Sparse(index, total), own=Sparse(index, own))

    for name, value in methods.items():
        setattr(Half, name, value)
    return registry.method(Half)()


def test_check_method_passes_an_unregistered_method() -> None:
    check_method(_third_party(), world_sizes=(1, 3), sizes=(0, 1, 8), steps=2)


def test_check_method_passes_a_method_with_state_and_no_feedback() -> None:
    """Without feedback, state of the method's own does not change the scale of gradients and results."""

    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        total = yield AllReduce(x)
        return Reduced(total=total, state={"last": total + 0})

    method = _third_party(
        state=lambda self, spec: {"last": Slot((spec.size,), scope="shared", merge="keep")},
        num_bytes=lambda self, spec, world_size: 4 * spec.size,
        exchange=exchange,
    )
    check_method(type(method)(feedback="none"), world_sizes=(1, 3), sizes=(0, 1, 8), steps=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_check_method_gives_methods_arrays_of_the_ops_library(backend: str) -> None:
    """As drivers do: a method may use operators on the gradient and the results of array ops together."""

    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        share = work.ops.scaled(x, 0.25)
        rest = x - share
        total = yield AllReduce(rest)
        return Reduced(total=total, own=rest)

    made = _third_party(num_bytes=lambda self, spec, world_size: 4 * spec.size, exchange=exchange)
    for feedback_name in ("none", "plain"):
        method = type(made)(feedback=feedback_name)
        check_method(method, world_sizes=(1, 3), sizes=(0, 1, 8), steps=2, ops=BACKENDS[backend])


def test_loopback_takes_an_unregistered_method() -> None:
    """Third parties can try a method without registering it."""
    outs = Loopback(_third_party(), world_size=2, min_elements=1).allreduce([np.float32([2, 4])] * 2)
    assert outs[0].tolist() == [2, 0]


def test_check_method_names_method_check_and_fault() -> None:
    wrong = _third_party(num_bytes=lambda self, spec, world_size: 5)
    with pytest.raises(AssertionError, match=r"Half.*fails check_bytes with 2 ranks.*returns 5"):
        check_method(wrong, world_sizes=(2,), sizes=(8,), steps=2)


def test_checks_run_under_python_o() -> None:
    """hvdcompress.testing has no ``assert`` statements, which ``python -O`` removes."""
    files = sorted(Path(testing.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], file.name


def test_every_check_is_listed() -> None:
    written = {value for name, value in vars(testing).items() if name.startswith("check_") and name != "check_method"}
    assert written == set(CHECKS)
    assert all(check.__doc__ for check in CHECKS)


# -- large tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", some("topk", "randomk"))
def test_beyond_two_to_the_24_elements(id: str) -> None:
    """Beyond the range of float32 integers and 24-bit counters, neighbouring indices are still distinct."""
    settings: dict[str, Any] = {}
    if hvdcompress.get_method(id).feedback == "none" and id not in ("none", "fp16", "bf16"):
        settings["feedback"] = "plain"  # so that nothing is lost
    if registry.classes()[id].sparse:
        settings["density"] = 2.0**-21 if id != "arctopk" else 2.0**-15  # it sends rows
    method = hvdcompress.get_method(id, **settings)
    shape = Case(method).shape(2**24 + 2**14)
    g = np.zeros(math.prod(shape), np.float32)
    g[[5, 2**24 - 1, 2**24 + 1, 2**24 + 2, -1]] = [1, 2, 3, 4, 5]
    net = Loopback(method, world_size=1)
    out = net.allreduce([g.reshape(shape)], "w")[0].ravel()
    kept = net.residual("w", 0).ravel() / np.float32(feedback.beta(method))
    np.testing.assert_allclose(out + kept, g, rtol=1e-6, atol=1e-6)
    if method.sparse:
        sent = np.flatnonzero(out)
        assert (out[sent] == g[sent]).all() and np.count_nonzero(kept) + len(sent) == 5
        assert id == "randomk" or (sent[-1] == len(g) - 1 and len(sent) >= 3)  # it chooses at random
