"""Plans are read from files, dicts and keyword arguments. Errors name the file, the line and the key."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress import get_method, load_plan
from hvdcompress.plan import PlanError, plan_of, settings_of

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
  - match: {max_size: 500}
    method: topk
    density: 0.5
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def writer(text: str | bytes) -> Path:
        path = tmp_path / "plan.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return writer


# -- round trips --------------------------------------------------------------------------------------------------


def test_a_plan_from_a_file(write: Any) -> None:
    plan = load_plan(write(FULL))
    assert (plan.min_elements, plan.bucket_elements, plan.seed) == (100, 50, 7)
    stages = [(start, method.id, getattr(method, "density", None)) for start, method in plan.program.periods]
    assert stages == [(0, "none", None), (20, "scalecom", 0.015625), (60, "scalecom", 0.004), (80, "scalecom", 0.001)]
    again = load_plan(plan.to_dict())
    assert again == plan == load_plan(str(write(FULL))) and again.rules == plan.rules and again.program == plan.program


@pytest.mark.parametrize(
    "source",
    [
        {"method": "none", "seed": 3},
        {"method": "gaussiank", "scope": "global", "refine": "paper", "min_elements": 0},
        {"method": "topk", "schedule": {"density": {"steps": {0: 0.1, 20: 0.01}}}},
        {"method": "topk", "steps_per_epoch": 10, "schedule": {"density": {"epochs": {0: 0.1, 0.5: 0.01}}}},
        {"method": "topk", "warmup": {"epochs": 0.25}, "steps_per_epoch": 8},
        {
            "method": "topk",
            "rules": [{"match": {"name": "7"}, "method": "randomk", "unbiased": True, "feedback": "none"}],
        },
        {"method": "scalecom", "density": "1e-3"},  # YAML 1.1 reads 1e-3 as text
        {"method": "topk", "verify_every": 7, "fallback": True},
    ],
    ids=json.dumps,
)
def test_round_trip_through_a_dict(source: dict[str, Any]) -> None:
    plan = load_plan(source)
    for again in (load_plan(plan.to_dict()), plan_of(plan)):
        assert again == plan and hash(again.program) == hash(plan.program)
        assert again.fingerprint == plan.fingerprint and again.rules == plan.rules
    given = {key: source[key] for key in source.keys() & {"verify_every", "fallback"}}
    assert {key: getattr(plan, key) for key in given} == given


@given(
    density=st.floats(1e-6, 1),
    beta=st.floats(1e-3, 1),
    steps=st.dictionaries(st.integers(0, 1000), st.floats(1e-6, 1), max_size=4),
    seed=st.integers(0, 2**40),
)
def test_round_trip_of_any_numbers(density: float, beta: float, steps: dict[int, float], seed: int) -> None:
    schedule = {"density": {"steps": steps}}
    plan = load_plan({"method": "scalecom", "density": density, "beta": beta, "seed": seed, "schedule": schedule})
    assert load_plan(plan.to_dict()) == plan and plan.program.at(0) is plan.program.periods[0][1]
    assert plan.program.main.density == (steps[max(steps)] if steps else density)  # type: ignore[attr-defined]


def test_plan_of_takes_an_id_a_method_a_plan_or_a_dict() -> None:
    method = get_method("topk", density=0.25)
    plan = load_plan({"method": "topk", "density": 0.25})
    density = {"density": 0.25}
    for source, settings in (("topk", density), (method, {}), (plan, {}), ({"method": "topk"}, density)):
        assert plan_of(source, **settings).program == plan.program
    assert plan_of(plan, seed=5).seed == 5 and plan_of(method, min_elements=3).min_elements == 3


def test_plan_of_takes_a_file_and_settings_override_it(write: Any) -> None:
    path = write("method: topk\ndensity: 0.02\nrules:\n  - match: {ndim: 4}\n    method: none\n")
    assert plan_of(str(path)) == plan_of(path) == load_plan(path)
    changed = plan_of(str(path), density=0.5)
    assert changed.program.main == get_method("topk", density=0.5) and changed.rules == load_plan(path).rules
    with pytest.raises(PlanError, match="line 2"):
        plan_of(str(write("method: topk\ndensity: 7\n")))


def test_auto_is_a_plan_with_a_fallback() -> None:
    plan = plan_of("auto", min_elements=10)
    method = plan.program.main
    assert (method.id, method.density, method.values, plan.fallback) == ("topk", 0.01, "qsgd4", True)  # type: ignore[attr-defined]
    assert plan_of("auto", density=0.002).program.main.density == 0.002  # type: ignore[attr-defined]
    assert load_plan(plan.to_dict()) == plan
    assert not plan_of("acpsgd").fallback and "fallback" not in plan_of("acpsgd").to_dict()


@pytest.mark.parametrize("key", ["optimizer", "without_beta1", "clip_norm"])
def test_keys_that_are_not_needed_any_more_say_why(key: str) -> None:
    with pytest.raises(PlanError, match=f"{key}: is not needed"):
        plan_of("topk", **{key: 1.0})


def test_settings_of_a_command_line() -> None:
    found = settings_of(["density=0.02", "values=fp16", "warmup={steps: 5}", "paper=true"])
    assert found == {"density": 0.02, "values": "fp16", "warmup": {"steps": 5}, "paper": True}
    for wrong in ("density", "=3", "a={b"):
        with pytest.raises(PlanError, match=r"KEY=VALUE|valid YAML"):
            settings_of([wrong])
    with pytest.raises(PlanError, match="density is given twice"):
        settings_of(["density=0.02", "density=0.01"])


# -- errors -------------------------------------------------------------------------------------------------------


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
        ("method: topk\nverify_every: -1\n", 2, ["verify_every", "0 or more"]),
        ("method: topk\nfallback: 1\n", 2, ["fallback"]),
        ("method: topk\nsteps_per_epoch: 0\n", 2, ["steps_per_epoch", "1 or more"]),
        ("method: topk\ndensity: 0.1\ndensity: 0.2\n", 3, ["density", "repeated", "line 2"]),
        ("method: topk\nrules:\n  - match: {ndim: 1, ndim: 2}\n", 3, ["ndim", "repeated"]),
        ("method: topk\nwarmup: {epochs: 5}\n", 2, ["warmup.epochs", "steps_per_epoch"]),
        ("method: topk\nwarmup: 5\n", 2, ["warmup", "duration"]),
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
        load_plan(write(text))
    message = str(caught.value)
    assert "plan.yaml" in message
    assert line is None or f"line {line}" in message, message
    assert all(word in message for word in words), message
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
        b"method: \xff\xfe\n",
    ],
)
def test_a_file_without_a_mapping_is_an_error(write: Any, text: str | bytes) -> None:
    with pytest.raises(PlanError, match=r"plan\.yaml"):
        load_plan(write(text))


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
def test_unsupported_yaml_is_refused_at_once(write: Any, text: str, line: int | None, words: str) -> None:
    began = time.process_time()
    with pytest.raises(PlanError) as caught:
        load_plan(write(text))
    assert words in str(caught.value) and (line is None or f"line {line}" in str(caught.value)), caught.value
    assert time.process_time() - began < 2


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "none.yaml")


def test_a_dict_that_contains_itself_is_refused() -> None:
    schedule: dict[str, Any] = {}
    endless = {"method": "topk", "rules": [{"match": {"ndim": 4}, "schedule": schedule}]}
    schedule["self"] = endless
    with pytest.raises(PlanError):
        load_plan(endless)


KEYS = ["method", "density", "rules", "match", "schedule", "steps", "epochs", "warmup", "name", 0, 1]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["topk", "steps", "1e-3", ""]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_source_is_a_plan_or_a_plan_error(source: Any) -> None:
    with contextlib.suppress(PlanError):
        load_plan({"method": "topk", **(source if isinstance(source, dict) else {"method": source})})
