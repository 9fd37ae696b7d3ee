"""Plans: which tensor gets which method, and errors that name the line and the key."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress import get, load
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import Plan, PlanError, plan_of, settings_of

FULL = """\
method: scalecom
density: 0.01
beta: 0.1
warmup: {epochs: 2}
schedule:
  density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}
steps_per_epoch: 10
min_elements: 100
bucket_elements: 50
seed: 7
rules:
  - match: {name: "conv1.*"}
    method: none
  - match: {ndim: 4, min_size: 10000}
    density: 0.004
  - match: {max_size: 500}
    method: topk
    density: 0.5
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def writer(text: str) -> Path:
        path = tmp_path / "plan.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return writer


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def stages(plan: Plan, tensor: TensorSpec) -> list[tuple[int, str, float | None]]:
    return [(s, m.id, getattr(m, "density", None)) for s, m in plan.program_of(tensor).stages]


# -- rules ------------------------------------------------------------------------------------------------


def test_first_rule_that_matches_wins() -> None:
    plan = load(
        {
            "method": "scalecom",
            "density": 0.01,
            "rules": [
                {"match": {"name": "conv1.*"}, "method": "none"},
                {"match": {"ndim": 4, "min_size": 10_000}, "density": 0.004},
                {"match": {"ndim": 4}, "method": "topk"},
                {"match": {"max_size": 500, "ndim": 1}, "method": "fp16"},
            ],
        }
    )
    for tensor, id, density in [
        (spec("conv1.weight", 64, 64, 3, 3), "none", None),
        (spec("conv2.weight", 64, 64, 3, 3), "scalecom", 0.004),
        (spec("conv2.weight", 8, 8, 3, 3), "topk", 0.01),
        (spec("fc.bias", 500), "fp16", None),
        (spec("fc.bias", 501), "scalecom", 0.01),
        (spec("fc.weight", 50, 10), "scalecom", 0.01),
        (spec("Conv1.weight", 9, 9), "scalecom", 0.01),  # globs are case-sensitive
    ]:
        method = plan.program_of(tensor).main
        assert (method.id, getattr(method, "density", None)) == (id, density), tensor


@pytest.mark.parametrize(
    "glob,name,holds",
    [
        ("*.bias", "layer.0.bias", True),
        ("*.bias", "bias", False),
        ("layer.?.weight", "layer.3.weight", True),
        ("layer.[0-3].*", "layer.4.weight", False),
        ("*", "anything", True),
    ],
)
def test_globs(glob: str, name: str, holds: bool) -> None:
    plan = load({"method": "topk", "rules": [{"match": {"name": glob}, "method": "none"}]})
    assert (plan.program_of(spec(name, 9)).main.id == "none") == holds


def test_a_rule_with_another_method_takes_none_of_the_defaults_settings() -> None:
    plan = load({"method": "scalecom", "density": 0.2, "rules": [{"match": {"ndim": 1}, "method": "topk"}]})
    assert plan.program_of(spec("b", 9)).main == get("topk")


def test_a_rule_without_a_method_inherits_all_but_what_it_changes() -> None:
    plan = load({"method": "scalecom", "density": 0.2, "beta": 0.3, "rules": [{"match": {"ndim": 1}, "density": 0.5}]})
    assert plan.program_of(spec("b", 9)).main == get("scalecom", density=0.5, beta=0.3)


def test_a_rule_may_switch_warm_up_off() -> None:
    plan = load(
        {
            "method": "topk",
            "warmup": {"steps": 5},
            "rules": [{"match": {"ndim": 1}, "warmup": None, "density": 0.5}],
        }
    )
    assert stages(plan, spec("w", 2, 2)) == [(0, "none", None), (5, "topk", 0.01)]
    assert stages(plan, spec("b", 9)) == [(0, "topk", 0.5)]


# -- schedules --------------------------------------------------------------------------------------------


def test_schedule_by_steps_and_by_epochs() -> None:
    by_steps = load({"method": "topk", "schedule": {"density": {"steps": {0: 0.1, 20: 0.01}}}})
    by_epochs = load({"method": "topk", "steps_per_epoch": 10, "schedule": {"density": {"epochs": {0: 0.1, 2: 0.01}}}})
    for plan in (by_steps, by_epochs):
        assert stages(plan, spec("w", 9)) == [(0, "topk", 0.1), (20, "topk", 0.01)]
    program = by_steps.program
    assert [program.at(step).density for step in (0, 19, 20, 10**9)] == [0.1, 0.1, 0.01, 0.01]  # type: ignore


def test_before_the_first_point_of_a_schedule_the_plain_value_holds() -> None:
    plan = load({"method": "topk", "density": 0.3, "schedule": {"density": {"steps": {4: 0.1}}}})
    assert stages(plan, spec("w", 9)) == [(0, "topk", 0.3), (4, "topk", 0.1)]


def test_two_scheduled_hyperparameters_keep_each_others_value() -> None:
    plan = load(
        {
            "method": "scalecom",
            "schedule": {"density": {"steps": {0: 0.5, 10: 0.1}}, "beta": {"steps": {5: 0.25}}},
        }
    )
    values = [(s, m.density, m.beta) for s, m in plan.program.stages]  # type: ignore[attr-defined]
    assert values == [(0, 0.5, get("scalecom").beta), (5, 0.5, 0.25), (10, 0.1, 0.25)]


def test_warm_up_is_dense_and_the_schedule_goes_on_below_it() -> None:
    plan = load(
        {
            "method": "topk",
            "warmup": {"epochs": 1.5},
            "steps_per_epoch": 10,
            "schedule": {"density": {"epochs": {0: 0.4, 1: 0.2, 2: 0.1}}},
        }
    )
    assert stages(plan, spec("w", 9)) == [(0, "none", None), (15, "topk", 0.2), (20, "topk", 0.1)]


def test_warm_up_of_no_steps_is_none() -> None:
    assert load({"method": "topk", "warmup": {"steps": 0}}) != load({"method": "topk"})  # their sources differ
    assert stages(load({"method": "topk", "warmup": {"steps": 0}}), spec("w", 9)) == [(0, "topk", 0.01)]


def test_schedule_is_obeyed_in_loopback() -> None:
    net = Loopback(
        {"method": "topk", "min_elements": 1, "schedule": {"density": {"steps": {0: 1.0, 2: 0.1}}}}, world_size=2
    )
    sent = []
    for _ in range(4):
        before = net.ledger.bytes_sent(0)
        net.allreduce([np.ones(100, np.float32)] * 2, "w")
        sent.append(net.ledger.bytes_sent(0) - before)
    assert sent[0] == sent[1] > sent[2] == sent[3]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_warm_up_gives_the_average_whatever_the_loss_scale(scale: float) -> None:
    """A tensor in warm-up already has an unused residual, which must not make the result scaled twice."""
    net = Loopback("topk", world_size=2, density=0.5, min_elements=1, warmup={"steps": 2}, loss_scale=scale)
    g = [np.float32([1, 2, 3, 4]), np.float32([3, 2, 1, 0])]
    for _ in range(2):
        np.testing.assert_array_equal(net.allreduce([x * np.float32(scale) for x in g], "w")[0], [2 * scale] * 4)


# -- buckets ------------------------------------------------------------------------------------------------


def names(plan: Plan, *specs: TensorSpec) -> dict[str, tuple[list[str], str]]:
    return {b.spec.name: ([m.name for m in b.members], b.program.main.id) for b in plan.buckets(specs)}


def test_small_tensors_go_dense() -> None:
    plan = load({"method": "topk"})
    assert names(plan, spec("b", 1023), spec("a", 32, 32)) == {"a": (["a"], "topk"), "b": (["b"], "none")}


def test_buckets_come_in_name_order_whatever_the_order_of_tensors() -> None:
    specs = [spec(name, 2000) for name in ("z", "a", "m")]
    for order in (specs, specs[::-1]):
        assert [b.spec.name for b in load({"method": "topk"}).buckets(order)] == ["a", "m", "z"]


def test_buckets_join_small_tensors_in_name_order_up_to_a_size() -> None:
    plan = load({"method": "topk", "bucket_elements": 1000, "min_elements": 500})
    found = names(plan, spec("a", 400), spec("b", 10, 40), spec("c", 300), spec("big", 1000), spec("d", 100))
    assert found == {"a+2": (["a", "b", "c"], "topk"), "big": (["big"], "topk"), "d": (["d"], "none")}


def test_buckets_keep_methods_and_dtypes_apart() -> None:
    plan = load(
        {
            "method": "topk",
            "bucket_elements": 100,
            "min_elements": 1,
            "rules": [{"match": {"name": "x*"}, "method": "none"}],
        }
    )
    found = names(plan, spec("a", 9), spec("b", 9, dtype="float64"), spec("c", 9), spec("x1", 9), spec("x2", 9))
    assert [members for members, _ in found.values()] == [["a", "c"], ["b"], ["x1"], ["x2"]]


def test_scope_global_joins_all_tensors_of_the_method() -> None:
    plan = load({"method": "gaussiank", "scope": "global", "rules": [{"match": {"name": "head.*"}, "method": "none"}]})
    found = names(plan, spec("a", 5000), spec("b", 3), spec("head.w", 5000), spec("c", 7, 7))
    assert found == {"a+2": (["a", "b", "c"], "gaussiank"), "head.w": (["head.w"], "none")}


def test_bucket_gives_each_member_its_own_result_and_residual() -> None:
    net = Loopback("topk", world_size=2, density=0.5, bucket_elements=100, min_elements=1)
    a, b = np.float32([[8, 1]]), np.float32([4, 2])
    out = net.allreduce_many([{"b": b, "a": a}] * 2)[0]
    assert out["a"].tolist() == [[8, 0]] and out["b"].tolist() == [4, 0]
    assert net.residual("a", 1).tolist() == [[0, 1]] and net.residual("b", 1).tolist() == [0, 2]
    assert net.ledger.collectives(0) == 1


# -- round trips ------------------------------------------------------------------------------------------


def test_full_plan_from_a_file(write: Any) -> None:
    plan = load(write(FULL))
    assert (plan.min_elements, plan.bucket_elements, plan.seed) == (100, 50, 7)
    w = [(0, "none", None), (20, "scalecom", 0.015625), (60, "scalecom", 0.004), (80, "scalecom", 0.001)]
    assert stages(plan, spec("w", 1000)) == w
    assert stages(plan, spec("conv1.w", 1000)) == [(0, "none", None)]
    assert stages(plan, spec("b", 10)) == [(0, "topk", 0.5)]
    assert load(str(write(FULL))) == plan


@pytest.mark.parametrize(
    "source",
    [
        {"method": "topk"},
        {"method": "none", "seed": 3},
        {"method": "gaussiank", "scope": "global", "refine": "paper", "min_elements": 0},
        {"method": "topk", "schedule": {"density": {"steps": {0: 0.1, 20: 0.01}}}},
        {"method": "topk", "steps_per_epoch": 10, "schedule": {"density": {"epochs": {0: 0.1, 0.5: 0.01}}}},
        {"method": "topk", "warmup": {"epochs": 0.25}, "steps_per_epoch": 8},
        {
            "method": "topk",
            "rules": [{"match": {"name": "7"}, "method": "randomk", "unbiased": True, "feedback": "none"}],
        },
        {"method": "scalecom", "density": "1e-3"},
    ],
    ids=json.dumps,
)
def test_round_trip_through_a_dict_and_json(source: dict[str, Any]) -> None:
    plan = load(source)
    for again in (load(plan.to_dict()), load(plan.to_dict() | {}), plan_of(plan)):
        assert again == plan and hash(again.program) == hash(plan.program)
        assert again.fingerprint == plan.fingerprint and again.rules == plan.rules


def test_round_trip_of_the_full_plan(write: Any) -> None:
    plan = load(write(FULL))
    again = load(plan.to_dict())
    assert again == plan and again.rules == plan.rules and again.program == plan.program


@given(
    density=st.floats(1e-6, 1),
    beta=st.floats(1e-3, 1),
    steps=st.dictionaries(st.integers(0, 1000), st.floats(1e-6, 1), max_size=4),
    seed=st.integers(0, 2**40),
)
def test_round_trip_of_any_numbers(density: float, beta: float, steps: dict[int, float], seed: int) -> None:
    source = {
        "method": "scalecom",
        "density": density,
        "beta": beta,
        "seed": seed,
        "schedule": {"density": {"steps": steps}},
    }
    plan = load(source)
    assert load(plan.to_dict()) == plan and plan.program.at(0) is plan.program.stages[0][1]
    assert plan.program.main.density == (steps[max(steps)] if steps else density)  # type: ignore[attr-defined]


def test_fingerprints_tell_plans_apart() -> None:
    base = {"method": "scalecom", "density": 0.01}
    others = [
        {"density": 0.02},
        {"beta": 0.5},
        {"seed": 1},
        {"min_elements": 2},
        {"warmup": {"steps": 1}},
        {"method": "topk"},
    ]
    assert len({load({**base, **other}).fingerprint for other in [{}, *others]}) == 7
    assert load(base).fingerprint == load({**base, "feedback": "lowpass"}).fingerprint, (
        "a default spelt out is the same"
    )


def test_plan_of_takes_what_drivers_take() -> None:
    method = get("topk", density=0.25)
    plan = load({"method": "topk", "density": 0.25})
    for given_ in (
        ("topk", {"density": 0.25}),
        (method, {}),
        (plan, {}),
        ({"method": "topk"}, {"density": 0.25}),
    ):
        assert plan_of(given_[0], **given_[1]).program == plan.program
    assert plan_of(plan, seed=5).seed == 5 and plan_of(method, min_elements=3).min_elements == 3


# -- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,line,words",
    [
        ("density: 0.1\n", None, ["method", "missing"]),
        ("method: topk\ndensty: 0.1\n", 2, ["densty", "did you mean 'density'"]),
        ("method: topkk\n", 1, ["topkk", "did you mean 'topk'", "available"]),
        ("method: [topk]\n", 1, ["method"]),
        ("method: {topk: 1}\n", 1, ["method"]),
        ("method:\n", 1, ["method"]),
        ("method: topk\n\ndensity: 2\n", 3, ["density", "2", "less than or equal to 1"]),
        ("method: topk\ndensity: 0\n", 2, ["density", "greater than 0"]),
        ("method: topk\ndensity: .nan\n", 2, ["density"]),
        ("method: topk\ndensity: yes\n", 2, ["density", "not a boolean"]),
        ("method: topk\ndensity: lots\n", 2, ["density", "lots"]),
        ("method: topk\ndensity: [0.1]\n", 2, ["density"]),
        ("method: topk\nvalues: fp64\n", 2, ["values", "fp64", "fp16"]),
        ("method: topk\nseed: 1.5\n", 2, ["seed", "whole number"]),
        ("method: topk\nseed: true\n", 2, ["seed", "whole number"]),
        ("method: topk\nmin_elements: -1\n", 2, ["min_elements", "0 or more"]),
        ("method: topk\nmin_elements: 1e3\n", 2, ["min_elements", "whole number"]),
        ("method: topk\nsteps_per_epoch: 0\n", 2, ["steps_per_epoch", "1 or more"]),
        ("method: topk\ndensity: 0.1\ndensity: 0.2\n", 3, ["density", "repeated", "line 2"]),
        ("method: topk\nrules:\n  - match: {ndim: 1, ndim: 2}\n", 3, ["ndim", "repeated"]),
        ("method: topk\nwarmup: {epochs: 5}\n", 2, ["warmup.epochs", "steps_per_epoch"]),
        ("method: topk\nwarmup: 5\n", 2, ["warmup", "mapping"]),
        ("method: topk\nwarmup: {steps: 5, epochs: 1}\n", 2, ["warmup", "one of steps and epochs"]),
        ("method: topk\nwarmup: {}\n", 2, ["warmup", "one of steps and epochs"]),
        ("method: topk\nwarmup: {step: 5}\n", 2, ["step", "did you mean 'steps'"]),
        ("method: topk\nwarmup: {steps: 2.5}\n", 2, ["warmup.steps", "whole"]),
        ("method: topk\nwarmup: {steps: -2}\n", 2, ["warmup.steps", "0 or more"]),
        ("method: topk\nwarmup: {steps: yes}\n", 2, ["warmup.steps"]),
        ("method: topk\nschedule:\n  densty: {steps: {0: 1}}\n", 3, ["densty", "did you mean 'density'"]),
        ("method: topk\nschedule:\n  density: {step: {0: 1}}\n", 3, ["step", "did you mean 'steps'"]),
        (
            "method: topk\nschedule:\n  density: {epochs: {0: 1}}\n",
            3,
            ["schedule.density.epochs", "steps_per_epoch"],
        ),
        ("method: topk\nschedule:\n  density: {steps: {0: 7}}\n", 3, ["density", "7", "less than or equal"]),
        ("method: topk\nschedule:\n  density: {steps: {x: 0.1}}\n", 3, ["'x'", "whole number"]),
        ("method: topk\nschedule:\n  density: {steps: 5}\n", 3, ["schedule.density.steps", "mapping"]),
        ("method: topk\nschedule:\n  density: 0.1\n", 3, ["schedule.density", "mapping"]),
        ("method: topk\nschedule:\n  values: {steps: {5: fp16}}\n", 3, ["values", "cannot change"]),
        ("method: topk\nschedule:\n  feedback: {steps: {5: none}}\n", 3, ["feedback", "cannot change"]),
        ("method: topk\nrules:\n  - method: none\n", 3, ["match", "missing"]),
        ("method: topk\nrules: none\n", 2, ["rules", "list"]),
        ("method: topk\nrules:\n  - 5\n", 3, ["rules.0", "mapping"]),
        ("method: topk\nrules:\n  - match: {size: 5}\n", 3, ["size", "known", "min_size"]),
        ("method: topk\nrules:\n  - match: {name: 5}\n", 3, ["name", "text"]),
        ("method: topk\nrules:\n  - match: {ndim: '4'}\n", 3, ["ndim", "whole number"]),
        ("method: topk\nrules:\n  - match: {ndim: 4}\n    densty: 1\n", 4, ["densty"]),
        ("method: topk\nrules:\n  - match: {ndim: 4}\n    density: 5\n", 4, ["density", "5"]),
        ("method: none\nrules:\n  - match: {ndim: 4}\n    density: 0.5\n", 4, ["density", "none"]),
        ("method: topk\nid: 3\n", 2, ["id"]),
        ("method: topk\n1: 3\n", 2, ["1"]),
        ("method: randomk\nunbiased: true\n", None, ["unbiased", "feedback"]),
    ],
)
def test_errors_name_the_file_the_line_and_the_key(write: Any, text: str, line: int | None, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        load(write(text))
    message = str(caught.value)
    assert "plan.yaml" in message
    if line:
        assert f"line {line}" in message, message
    for word in words:
        assert word in message, message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]\n",
        "just text\n",
        "",
        "method: topk\n  density: 1\n",
        "a: {b\n",
        "method: *x\n",
        "\tmethod: topk\n",
    ],
)
def test_no_mapping_is_an_error(write: Any, text: str) -> None:
    with pytest.raises(PlanError):
        load(write(text))


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))


@pytest.mark.parametrize(
    "text,line,words",
    [
        (f"method: topk\n{LAUGHS}rules: [*a29]\n", 3, "aliases (*a0) are not supported"),
        ("method: topk\nrules: &all\n  - match: {ndim: 4}\n  - *all\n", 4, "aliases (*all)"),
        ("base: &base {density: 0.1}\n<<: *base\nmethod: topk\n", 2, "merge keys (<<)"),
        ("method: topk\n<<: {density: 0.1}\n", 2, "merge keys (<<)"),
        ("method: topk\nrules: " + "[" * 100_000, 2, "nested more than 20"),
        ("method: topk\nrules: " + "{a: " * 5000 + "1" + "}" * 5000, 2, "nested more than 20"),
        ("method: topk\nseed: " + "9" * 5000, None, "not valid YAML"),
        ("method: topk\nseed: 2024-99-99\n", None, "not valid YAML"),
        ("method: !!python/name:os.system\n", 1, "not valid YAML"),
    ],
)
def test_yaml_that_is_not_written_out_is_refused_at_once(write: Any, text: str, line: int | None, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(PlanError) as caught:
        load(write(text))
    assert words in str(caught.value) and (line is None or f"line {line}" in str(caught.value)), caught.value
    assert time.monotonic() - began < 2


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"method: \xff\xfe\n")
    with pytest.raises(PlanError, match="plan.yaml: is not valid YAML"):
        load(tmp_path / "plan.yaml")


def test_a_dict_without_an_end_is_refused() -> None:
    endless: dict[str, Any] = {"method": "topk"}
    endless["rules"] = [{"match": {"ndim": 4}, "schedule": {}}]
    endless["rules"][0]["schedule"]["self"] = endless
    with pytest.raises(PlanError):
        load(endless)


def test_yaml_numbers_without_a_point_are_numbers(write: Any) -> None:
    """YAML 1.1 reads 1e-3 as text; it is accepted as a number."""
    assert load(write("method: topk\ndensity: 1e-3\n")) == load({"method": "topk", "density": 0.001})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize("given_", [{"method": "topk", "densty": 1}, {"method": "topk", "density": 9}, {}])
def test_dicts_have_errors_too(given_: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="densty|density|method"):
        load(given_)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["topk", "steps", "1e-3", ""]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "method",
                        "density",
                        "rules",
                        "match",
                        "schedule",
                        "steps",
                        "epochs",
                        "warmup",
                        "name",
                        0,
                        1,
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_nonsense_is_a_plan_or_a_plan_error(nonsense: Any) -> None:
    source = nonsense if isinstance(nonsense, dict) else {"method": nonsense}
    try:
        load({"method": "topk", **source})
    except PlanError:
        pass


def test_version_is_there() -> None:
    assert hvdcompress.__version__


def test_what_goes_dense_is_joined_where_the_method_suits_no_bucket():
    plan = load({"method": "powersgd", "bucket_elements": 5000})
    shapes = {"a": (64,), "b": (64, 64), "c": (128,), "d": (9000,), "e": (4000,)}
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    buckets = {bucket.spec.name: bucket for bucket in plan.buckets([*specs, TensorSpec("f", (7,), "float16")])}
    assert list(buckets) == ["a+2", "b", "d", "f"], "d is too large, f of another dtype"
    assert [m.name for m in buckets["a+2"].members] == ["a", "c", "e"]
    assert [bucket.program.main.id for bucket in buckets.values()] == ["none", "powersgd", "none", "none"]
    alone = {bucket.spec.name for bucket in load({"method": "powersgd"}).buckets(specs)}
    assert alone == {"a", "b", "c", "d", "e"}, "without buckets each tensor piggybacks on the stock all-reduce"


def test_settings_of_a_command_line() -> None:
    given = ["density=0.02", "values=fp16", "warmup={steps: 5}", "paper=true"]
    assert settings_of(given) == {"density": 0.02, "values": "fp16", "warmup": {"steps": 5}, "paper": True}
    for wrong in ("density", "=3", "a={b"):
        with pytest.raises(PlanError, match="KEY=VALUE|valid YAML"):
            settings_of([wrong])
