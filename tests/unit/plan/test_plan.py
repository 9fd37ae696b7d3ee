"""Plans: which tensor gets which method, and which tensors form a bucket."""

from __future__ import annotations

import pytest

from hvdcompress import get_method, load_plan
from hvdcompress.method import TensorSpec
from hvdcompress.plan import Plan


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


# -- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor,id,density",
    [
        (spec("conv1.weight", 64, 64, 3, 3), "none", None),
        (spec("conv2.weight", 64, 64, 3, 3), "scalecom", 0.004),
        (spec("conv2.weight", 8, 8, 3, 3), "topk", 0.01),
        (spec("fc.bias", 500), "fp16", None),
        (spec("fc.bias", 501), "scalecom", 0.01),
        (spec("fc.weight", 50, 10), "scalecom", 0.01),
        (spec("Conv1.weight", 9, 9), "scalecom", 0.01),  # patterns are case-sensitive
    ],
)
def test_the_first_matching_rule_applies(tensor: TensorSpec, id: str, density: float | None) -> None:
    rules = [
        {"match": {"name": "conv1.*"}, "method": "none"},
        {"match": {"ndim": 4, "min_size": 10_000}, "density": 0.004},
        {"match": {"ndim": 4}, "method": "topk"},
        {"match": {"max_size": 500, "ndim": 1}, "method": "fp16"},
    ]
    method = load_plan({"method": "scalecom", "density": 0.01, "rules": rules}).program_of(tensor).main
    assert (method.id, getattr(method, "density", None)) == (id, density)


@pytest.mark.parametrize(
    "pattern,name,matches",
    [
        ("*.bias", "layer.0.bias", True),
        ("*.bias", "bias", False),
        ("layer.?.weight", "layer.3.weight", True),
        ("layer.[0-3].*", "layer.4.weight", False),
        ("*", "anything", True),
    ],
)
def test_patterns_of_names(pattern: str, name: str, matches: bool) -> None:
    plan = load_plan({"method": "topk", "rules": [{"match": {"name": pattern}, "method": "none"}]})
    assert (plan.program_of(spec(name, 9)).main.id == "none") == matches


def test_a_rule_inherits_settings_unless_it_has_another_method() -> None:
    rules = [{"match": {"ndim": 1}, "density": 0.5}, {"match": {"ndim": 2}, "method": "topk"}]
    plan = load_plan({"method": "scalecom", "density": 0.2, "beta": 0.3, "rules": rules})
    assert plan.program_of(spec("b", 9)).main == get_method("scalecom", density=0.5, beta=0.3)
    assert plan.program_of(spec("w", 9, 9)).main == get_method("topk")


def test_fingerprints_of_different_plans_differ() -> None:
    base = {"method": "scalecom", "density": 0.01}
    changes = [{}, {"density": 0.02}, {"beta": 0.5}, {"seed": 1}, {"min_elements": 2}, {"warmup": {"steps": 1}}]
    assert len({load_plan({**base, **change}).fingerprint for change in [*changes, {"method": "topk"}]}) == 7
    same = load_plan({**base, "feedback": "lowpass"}).fingerprint
    assert load_plan(base).fingerprint == same, "a default that is given is no difference"


# -- buckets ------------------------------------------------------------------------------------------------------


def buckets_of(plan: Plan, *specs: TensorSpec) -> dict[str, tuple[str, str]]:
    """Return {name: (names of the tensors, method)} of the buckets."""
    buckets = plan.buckets(specs)
    return {each.spec.name: (" ".join(m.name for m in each.members), each.program.main.id) for each in buckets}


def test_small_tensors_are_sent_uncompressed() -> None:
    found = buckets_of(load_plan({"method": "topk"}), spec("b", 1023), spec("a", 32, 32))
    assert found == {"a": ("a", "topk"), "b": ("b", "none")}


def test_buckets_are_in_the_order_of_names() -> None:
    specs = [spec(name, 2000) for name in ("z", "a", "m")]
    for order in (specs, specs[::-1]):
        assert list(buckets_of(load_plan({"method": "topk"}), *order)) == ["a", "m", "z"]


def test_small_tensors_are_joined_up_to_a_size() -> None:
    plan = load_plan({"method": "topk", "bucket_elements": 1000, "min_elements": 500})
    found = buckets_of(plan, spec("a", 400), spec("b", 10, 40), spec("c", 300), spec("big", 1000), spec("d", 100))
    assert found == {"a+2": ("a b c", "topk"), "big": ("big", "topk"), "d": ("d", "none")}


def test_tensors_of_different_methods_or_dtypes_are_not_joined() -> None:
    rules = [{"match": {"name": "x*"}, "method": "none"}]
    plan = load_plan({"method": "topk", "bucket_elements": 100, "min_elements": 1, "rules": rules})
    found = buckets_of(plan, spec("a", 9), spec("b", 9, dtype="float64"), spec("c", 9), spec("x1", 9), spec("x2", 9))
    assert [members for members, _ in found.values()] == ["a c", "b", "x1", "x2"]


def test_scope_global_joins_all_tensors_of_the_method() -> None:
    plan = load_plan(
        {"method": "gaussiank", "scope": "global", "rules": [{"match": {"name": "head.*"}, "method": "none"}]}
    )
    found = buckets_of(plan, spec("a", 5000), spec("b", 3), spec("head.w", 5000), spec("c", 7, 7))
    assert found == {"a+2": ("a b c", "gaussiank"), "head.w": ("head.w", "none")}


def test_uncompressed_tensors_are_joined_if_the_method_needs_matrices() -> None:
    plan = load_plan({"method": "powersgd", "bucket_elements": 5000})
    specs = [spec("a", 64), spec("b", 64, 64), spec("c", 128), spec("d", 9000), spec("e", 4000)]
    found = buckets_of(plan, *specs, spec("f", 7, dtype="float16"))  # d is too large, f has another dtype
    assert found == {"a+2": ("a c e", "none"), "b": ("b", "powersgd"), "d": ("d", "none"), "f": ("f", "none")}
    alone = buckets_of(load_plan({"method": "powersgd"}), *specs)
    assert list(alone) == ["a", "b", "c", "d", "e"], "without buckets the driver sends each with its own all-reduce"


def test_a_name_that_looks_like_that_of_a_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 'a\+1': a name that ends in \+ and a number is reserved"):
        load_plan({"method": "topk"}).buckets([spec("a+1", 10)])
