"""Creation of plans from YAML, a dict, a method, or a method's id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hvdcompress.method import Method
from hvdcompress.plan import schedule
from hvdcompress.plan.document import Document, PlanError
from hvdcompress.plan.plan import Match, Plan, Program, Rule
from hvdcompress.registry import FieldError, classes, get_method, suggest

PLAN_KEYS = (
    "rules", "min_elements", "bucket_elements", "steps_per_epoch", "seed",
    "watchdog", "warn_after", "end_after", "verify_every", "fallback", "nodes",
)  # fmt: skip
#: Keys with integer values, and their defaults
INTEGERS = {
    "min_elements": 1024, "bucket_elements": None, "seed": 0, "warn_after": 120, "end_after": None, "verify_every": 0
}  # fmt: skip
#: The plan of the method "auto"
AUTO = {"method": "topk", "density": 0.01, "values": "qsgd4", "fallback": True}
RULE_KEYS = ("method", "warmup", "schedule")
#: Keys that are true or false, and their defaults
FLAGS = {"watchdog": True, "fallback": False}
#: Keys that need no value any more, and why
GONE = {
    "optimizer": "is not needed: the momentum of any optimizer is adapted when it takes its step",
    "without_beta1": "is not needed: Adam's momentum is adapted when it takes its step",
    "clip_norm": "is not needed: gradients are the average over the ranks, so clip them as in any other program",
}
MATCH_KEYS = ("name", "ndim", "min_size", "max_size")


def load_plan(source: str | Path | Mapping[str, Any]) -> Plan:
    """Load a plan from a YAML file, or from a dict with the same keys.

    The format::

        method: scalecom            # the default method
        density: 0.01               # its hyper-parameters, on the same level
        beta: 0.1
        warmup: {epochs: 5}         # uncompressed until then; or {steps: 500}
        schedule:                   # hyper-parameters by steps or epochs; see schedule.py
          density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}
        steps_per_epoch: 391        # required if any duration is given in epochs
        min_elements: 1024          # smaller tensors are sent uncompressed
        bucket_elements: 1000000    # smaller tensors are grouped into buckets; 0: none. Without this key, drivers
                                    # that know all tensors group them in ways that do not change results
        seed: 0
        watchdog: true              # report and end steps that wait too long; false: no socket and no thread
        warn_after: 120             # seconds after which a warning names the missing ranks; 0: never
        end_after: 1800             # seconds after which the process ends; 0: never. Without this key: under
                                    # PyTorch DDP and FSDP2 the timeout of the process group, otherwise 1800
        verify_every: 0             # interval in steps at which ranks compare parameters and shared state; 0: never
        fallback: true              # compare some of the first steps with uncompressed steps, and give up
                                    # compression if it saves no time; under PyTorch DDP and Horovod
        nodes: auto                 # exchange with two levels: uncompressed inside a node, compressed between nodes;
                                    # auto: as the launcher has distributed the ranks; or the number of nodes; 0: one
                                    # level
        rules:                      # the first rule that matches a tensor applies
          - match: {name: "conv1.*"}            # a glob pattern
            method: none
          - match: {ndim: 4, min_size: 100000}  # all conditions must hold
            density: 0.004                      # no method: the default method, with this change

    The method "auto" is topk with a density of 1 % and 4-bit values, with ``fallback``.

    Args:
        source: path of the file, or the dict.

    Returns:
        The plan.

    Raises:
        PlanError: the plan is invalid. PlanError is a ``ValueError``. Its message names the key, the problem and, for a
                file, the line.
        FileNotFoundError: the file does not exist.
    """
    return _read(Document.open(source))


def plan_of(method: str | Path | Method | Plan | Mapping[str, Any], **settings: Any) -> Plan:
    """Create a plan from any value that drivers accept.

    Args:
        method: a method's id, a method, a plan, a plan's dict, or the path of its YAML file.
        **settings: plan keys and hyper-parameters. They override those of ``method``.

    Returns:
        The plan.

    Raises:
        PlanError, FileNotFoundError: as in :func:`load_plan`.
    """
    if isinstance(method, type):
        id = getattr(method, "id", "") or "topk"
        raise PlanError(f"method: {method.__name__} is a class; pass its id, {id!r}, or an instance")
    if isinstance(method, Path) or (isinstance(method, str) and method.endswith((".yaml", ".yml"))):
        document = Document.open(method)
        return _read(Document({**document.value, **settings}, lines=document.lines, file=document.file))
    if not isinstance(method, str | Method | Plan | Mapping):
        raise PlanError(
            "method: must be a method's id, a method, a plan, a plan's dict or its YAML file, "
            f"not a {type(method).__name__}"
        )
    if isinstance(method, Plan):
        return load_plan({**method.to_dict(), **settings}) if settings else method
    if isinstance(method, Method):
        if classes().get(method.id) is not type(method):
            return _unregistered(method, settings)
        method = {"method": method.id, **method.hyperparameters()}
    return load_plan({**(method if isinstance(method, Mapping) else {"method": method}), **settings})


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse settings of a command line, such as "density=0.01" or "values=fp16".

    Args:
        pairs: texts of the form KEY=VALUE, where the value is YAML.

    Returns:
        {key: value}, for the ``settings`` of :func:`plan_of`.

    Raises:
        PlanError: a text is not of the form KEY=VALUE, its value is not YAML, or a key occurs twice.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise PlanError(f"write settings as KEY=VALUE, not {pair!r}")
        if key in found:
            raise PlanError(f"{key} is given twice")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise PlanError(f"{key}: {value!r} is not valid YAML: {error}") from None
    return found


def _unregistered(method: Method, settings: dict[str, Any]) -> Plan:
    """Create a plan from a method that is not registered, such as one under development."""
    own = {key: settings.pop(key) for key in method.hyperparameters() if key in settings}
    method = replace(method, **own)
    doc = Document(settings)
    doc.known_keys((*INTEGERS, *FLAGS, "nodes"))
    shared = _plan_settings(doc)
    source = {"method": method.id or type(method).__qualname__, **method.hyperparameters(), **shared}
    return Plan(Program(((0, method),)), source=json.dumps(source, sort_keys=True, default=str), **shared)


def _plan_settings(doc: Document) -> dict[str, Any]:
    """Return the keys that concern the whole plan, with defaults. Optional features appear only if they are on."""
    found: dict[str, Any] = {key: doc.integer(key, default, least=0) for key, default in INTEGERS.items()}
    for key, default in FLAGS.items():
        if not isinstance(flag := doc.value.get(key, default), bool):
            raise doc.error(key, f"{flag!r} must be true or false")
        if flag or default:
            found[key] = flag
    if doc.value.get("nodes") == "auto":
        found["nodes"] = "auto"
    elif nodes := doc.integer("nodes", 0, least=0):
        found["nodes"] = nodes
    return found


def _read(doc: Document) -> Plan:
    for key in GONE.keys() & doc.value.keys():
        raise doc.error(key, GONE[key])
    if doc.value.get("method") == "auto":
        doc = Document({**AUTO, **doc.without("method").value}, lines=doc.lines, file=doc.file)
    if "method" not in doc.value:
        raise doc.error("method", "is missing: a plan needs a default method, such as method: topk")
    steps_per_epoch = doc.integer("steps_per_epoch", None, least=1)
    default_body = doc.without(*PLAN_KEYS)
    program, default = _program(default_body, {}, steps_per_epoch)
    filled = {**default, **get_method(default["method"], **_settings(default)).hyperparameters()}
    rules = []
    for body in doc.items("rules"):
        if "match" not in body.value:
            raise body.error("match", "is missing: a rule needs conditions, such as match: {ndim: 4}")
        match = body.child("match")
        match.known_keys(MATCH_KEYS)
        sizes = {key: match.integer(key, None, least=0) for key in MATCH_KEYS[1:]}
        own = body.without("match")
        # A rule with a method of its own does not inherit hyper-parameters of the default method, except for what
        # concerns the optimizer
        inherited = {"optimizer_momentum": filled["optimizer_momentum"]} if "method" in body.value else default
        rules.append(Rule(Match(match.text("name"), **sizes), _program(own, inherited, steps_per_epoch)[0]))
    shared = _plan_settings(doc)
    try:
        source = json.dumps({**doc.value, **filled, **shared}, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:  # possible for a dict that did not come from a file
        raise doc.error(None, f"must consist of numbers, texts, lists and mappings, without cycles: {error}") from None
    return Plan(program=program, rules=tuple(rules), source=source, **shared)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in RULE_KEYS}


def _program(body: Document, inherited: dict[str, Any], steps_per_epoch: int | None) -> tuple[Program, dict[str, Any]]:
    """Return the program that the keys of a plan or rule describe, and these keys, which rules inherit."""
    given = {**inherited, **body.value}
    method = _method(body, given["method"], _settings(given))
    periods = {0: method}
    for start, change in schedule.changes(body, given.get("schedule"), method, steps_per_epoch).items():
        earlier = periods[max(s for s in periods if s <= start)]
        periods[start] = replace(earlier, **change)
    if given.get("warmup") is not None:
        if not isinstance(given["warmup"], Mapping):
            raise body.error("warmup", f"must be a duration, such as {{steps: 500}}, not {given['warmup']!r}")
        until = schedule.duration(body.child("warmup", given["warmup"]), steps_per_epoch)
        after = periods[max(s for s in periods if s <= until)]
        periods = {s: m for s, m in periods.items() if s > until}
        if until > 0:
            periods[0] = get_method("none")
        periods[until] = after
    return Program(tuple(sorted(periods.items(), key=lambda period: period[0]))), given


def _method(body: Document, id: Any, settings: dict[str, Any]) -> Method:
    for key in settings:
        if not isinstance(key, str):
            raise body.error(key, "unknown key: names of hyper-parameters are texts")
    try:
        return get_method(id, **settings)
    except FieldError as error:
        key = error.field if error.field in body.value else "method"
        hint = suggest(error.field, [*PLAN_KEYS, *RULE_KEYS])
        also = f"{hint.replace('did you mean', 'or the plan key')}" if error.field in settings else ""
        raise body.error(key, f"{error}{also}") from None
