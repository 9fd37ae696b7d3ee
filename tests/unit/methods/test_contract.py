"""Every method, with every option, on every array backend, in worlds of 1 to 5: what all of them must do.

The methods and their variants are found, not listed: a new file in ``methods/`` is tested the day it comes.
"""

from __future__ import annotations

import doctest
import importlib
import json
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
from hvdcompress.method import Method, Sparse
from hvdcompress.parts import feedback
from hvdcompress.registry import field_docs
from hvdcompress.testing import CHECKS, Case, Trial, backends, check_method, numbers, variants
from hvdcompress.testing.trial import Grouped, plan_for
from tests import make_golden

BACKENDS = backends()
METHODS = hvdcompress.available()
VARIANTS = [(id, name, options) for id in METHODS for name, options in variants(registry.classes()[id]).items()]
WORLD_SIZES = (1, 2, 3, 4, 5)
SIZES = (0, 1, 7, 97)
# checks that depend on the array backend; another test compares its payloads with the reference's
OF_BACKENDS = (
    testing.check_shapes,
    testing.check_results,
    testing.check_finite,
    testing.check_conservation,
    testing.check_nonfinite,
    testing.check_resume,
    testing.check_state,
    testing.check_wire,
)


def _is_second(number: int) -> bool:
    return sum(1 for other, *_ in VARIANTS[:number] if other == VARIANTS[number][0]) == 1


def _variants() -> list[Any]:
    """All variants; of every nine in a row, eight are slow: what they send is checked under MPI anyway."""
    return [
        pytest.param(n, id, name, marks=[] if _is_second(n) or n % 9 == 0 else [pytest.mark.slow])
        for n, (id, name, _) in enumerate(VARIANTS)
    ]


def _second_variants() -> list[Any]:
    return [pytest.param(n, id, name) for n, (id, name, _) in enumerate(VARIANTS) if _is_second(n)]


#: the reference is tried in every world; of a backend's kernels, few know how many ranks there are
WORLD_SIZES_OF_BACKENDS = [
    pytest.param(world_size, marks=[] if world_size == 3 else [pytest.mark.slow]) for world_size in WORLD_SIZES
]
KINDS = ("normal", "heavy", "constant", "sparse", "denormal", "zero", "shifted", "mixed", "huge")


@pytest.mark.parametrize("number,id,name", _variants())
def test_variant_holds_on_the_reference(number: int, id: str, name: str) -> None:
    """Each variant runs in one of the worlds, a method's second variant in three of the five, some with fewer sizes;
    the next test has all of them, and MPI tries every variant in a world of two."""
    # whether a method has 4 or 5 ranks is as good as chance: half of them have 4
    several = {1: (1, 97), 3: SIZES, **({4: (7, 97)} if len(id) % 2 else {5: (1, 97)})}
    _check(number, id, several if _is_second(number) else {number % 5 + 1: SIZES})


@pytest.mark.slow
@pytest.mark.parametrize("number,id,name", _second_variants())
def test_variant_holds_in_every_world(number: int, id: str, name: str) -> None:
    _check(number, id, {1: SIZES, 2: SIZES, 3: SIZES, 4: SIZES, 5: SIZES})


def _check(number: int, id: str, sizes_in: dict[int, tuple[int, ...]]) -> None:
    method = hvdcompress.get(id, **VARIANTS[number][2])
    steps = 3 if len(method.phases) == 1 else 6  # through all phases
    for world_size, sizes in sizes_in.items():
        check_method(method, world_sizes=(world_size,), sizes=sizes, steps=steps, ops=BACKENDS["numpy"])


@pytest.mark.parametrize("id", METHODS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "numpy"])
@pytest.mark.parametrize("world_size", WORLD_SIZES_OF_BACKENDS)
def test_method_holds_on_every_backend(backend: str, world_size: int, id: str) -> None:
    density = {"density": 0.05} if "density" in hvdcompress.get(id).hyperparameters() else {}
    method = hvdcompress.get(id, **density)
    check_method(
        method, world_sizes=(world_size,), sizes=(0, 1, 97), steps=2, ops=BACKENDS[backend], checks=OF_BACKENDS
    )


@pytest.mark.parametrize("id", METHODS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "numpy"])
def test_backends_send_the_same_bytes(backend: str, id: str) -> None:
    """Payloads are equal to the byte for all kinds of data: normal, heavy tails, ties, denormals, zeros.

    A method's defaults meet every kind and size, each of its variants three kinds, the next three, and two sizes.
    Where a method is not ``exact``, as FFT and matrix products round differently, lengths are equal, and results to
    about the rounding of float32.
    """
    for number, (name, options) in enumerate(variants(registry.classes()[id]).items()):
        method = hvdcompress.get(id, **options)
        world_size = number % 4 + 1
        nets = [Trial(method, world_size, ops=BACKENDS[which], seed=3) for which in ("numpy", backend)]
        kinds = KINDS if not number else [KINDS[(3 * number + i) % len(KINDS)] for i in range(3)]
        for step, kind in enumerate(kinds if method.exact else ("normal", "smooth")):
            for n in (1, 5, 1030) if not number else ((1, 5)[number % 2], 1030):
                shape = Case(method).shape(n)
                gradients = [numbers(shape, rank, step, n, kind=kind) for rank in range(world_size)]  # type: ignore[arg-type]
                outs = [net.allreduce(gradients, f"w{n}")[0] for net in nets]
                where = f"{id} {name}, world {world_size}, {kind} data, n = {n}: {backend} differs from numpy"
                if method.exact:
                    residuals = [net.residual(f"w{n}", world_size - 1) for net in nets]
                    assert np.array_equal(*outs) and np.array_equal(*residuals), where
                    assert nets[0].log[-3:] == nets[1].log[-3:], where
                else:
                    assert_nearly_all_close(*outs, method=method, where=where)
        assert [c.num_bytes for c in nets[0].log] == [c.num_bytes for c in nets[1].log]


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
@settings(max_examples=25)
@given(data=st.data())
def test_any_gradients(id: str, data: st.DataObject) -> None:
    """For any finite floats: results are finite and equal on all ranks, and nothing is lost."""
    name = data.draw(st.sampled_from(list(variants(registry.classes()[id]))), "variant")
    method = hvdcompress.get(id, **variants(registry.classes()[id])[name])
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
@settings(max_examples=15)
@given(data=st.data())
def test_any_tensors_in_one_step(id: str, data: st.DataObject) -> None:
    """Several tensors at once give the same results as each alone (except with scope: global, which joins them)."""
    found = variants(registry.classes()[id])
    name = data.draw(st.sampled_from([v for v, o in found.items() if o.get("scope") != "global"]), "variant")
    method = hvdcompress.get(id, **found[name])
    world_size = data.draw(st.integers(1, 4), "world_size")
    shapes = data.draw(
        st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.tuples(st.integers(0, 30))), "shapes"
    )
    plan = plan_for(method, seed=5)
    together, alone = Trial(Grouped.of(plan), world_size), Trial(plan, world_size)
    for step in range(2):
        gradients = [{n: numbers(s, rank, step, len(n)) for n, s in shapes.items()} for rank in range(world_size)]
        outs = together.allreduce_many(gradients)
        for n in shapes:
            expected = alone.allreduce([one[n] for one in gradients], n)
            assert all(np.array_equal(out[n], e) for out, e in zip(outs, expected, strict=True))
            assert all(np.array_equal(together.residual(n, r), alone.residual(n, r)) for r in range(world_size))


# -- the files that belong to a method --------------------------------------------------------------------


@pytest.mark.parametrize("id", METHODS)
def test_method_has_its_golden_case(id: str) -> None:
    path = make_golden.golden_path(id)
    command = f"make it with:  {make_golden.COMMAND} {id}"
    assert path.exists(), f"method {id!r} has no {path.relative_to(make_golden.ROOT)}; {command}"


def test_missing_golden_case_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(make_golden, "golden_path", lambda id: tmp_path / "cases.json")
    monkeypatch.setattr(make_golden, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="python tests/make_golden.py topk"):
        test_method_has_its_golden_case("topk")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("id", METHODS)
def test_golden_case(id: str, backend: str) -> None:
    """Payloads, results and residuals are equal to the byte to those recorded in the case."""
    cases = json.loads(make_golden.golden_path(id).read_text(encoding="utf-8"))
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
                    assert_nearly_all_close(a, b, method=hvdcompress.get(id, **case["settings"]), where=f"{id}, {name}")


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
            from hvdcompress.method import AllReduce, Reduced

            ops = work.ops
            index = ops.index_range(ctx.spec.size, like=x)[::2]
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
    from hvdcompress.method import AllReduce, Reduced, Slot

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
    from hvdcompress.method import AllReduce, Reduced

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
    import ast

    files = sorted(Path(testing.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], file.name


def test_every_check_is_listed() -> None:
    written = {value for name, value in vars(testing).items() if name.startswith("check_") and name != "check_method"}
    assert written == set(CHECKS)
    assert all(check.__doc__ for check in CHECKS)
    assert Case(hvdcompress.get("none")).world_size == 2


# -- worlds beyond five -----------------------------------------------------------------------------------


@pytest.mark.parametrize("id", METHODS)
def test_world_of_64(id: str) -> None:
    method = with_feedback(id)
    net, shape = Loopback(method, world_size=64, min_elements=1), Case(method).shape(130)
    gradients = [numbers(shape, rank) for rank in range(64)]
    outs = net.allreduce(gradients, "w")
    assert len({out.tobytes() for out in outs}) == 1
    kept = np.sum([net.residual("w", rank) for rank in range(64)], axis=0, dtype=np.float64)
    kept /= feedback.beta(net.plan.program.main)
    expected = np.sum(gradients, axis=0, dtype=np.float64)
    assert np.allclose(64 * outs[0].astype(np.float64) + kept, expected, atol=64 * 2.0**-8)


def with_feedback(id: str, **settings: Any) -> Method:
    """Return the method with its defaults, but with a residual, so that nothing is lost."""
    lossy = hvdcompress.get(id).feedback == "none" and id not in ("none", "fp16", "bf16")
    return hvdcompress.get(id, **settings, **({"feedback": "plain"} if lossy else {}))


@pytest.mark.parametrize("id", METHODS)
def test_beyond_two_to_the_24_elements(id: str) -> None:
    """Beyond the range of float32 integers and 24-bit counters, neighbouring indices are still distinct."""
    density = 2.0**-21 if id != "arctopk" else 2.0**-15  # it sends rows
    settings = {"density": density} if registry.classes()[id].sparse else {}
    method = with_feedback(id, **settings)
    shape = Case(method).shape(2**24 + 2**14)
    n = int(np.prod(shape))
    places = [5, 2**24 - 1, 2**24 + 1, 2**24 + 2, n - 1]
    g = np.zeros(n, np.float32)
    g[places] = [1, 2, 3, 4, 5]
    net = Loopback(method, world_size=1)
    out = net.allreduce([g.reshape(shape)], "w")[0].ravel()
    kept = net.residual("w", 0).ravel() / np.float32(feedback.beta(method))
    if not method.sparse:
        np.testing.assert_allclose(out + kept, g, rtol=1e-6, atol=1e-6)
        return
    found = np.flatnonzero(out)
    assert set(found.tolist()) <= set(places) and (out[found] == g[found]).all()
    if id != "randomk":  # which chooses positions at random
        assert found[-1] == n - 1 and len(found) >= 3
    assert np.count_nonzero(kept) + len(found) == 5
    np.testing.assert_allclose(out[places] + kept[places], g[places], rtol=1e-6)
