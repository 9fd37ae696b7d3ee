"""Reading plans: from YAML, a dict, a method or its id, to a Plan."""

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
from hvdcompress.registry import FieldError, classes, get, suggest

PLAN_KEYS = (
    "rules", "min_elements", "bucket_elements", "steps_per_epoch", "seed",
    "watchdog", "warn_after", "end_after", "verify_every", "clip_norm", "fallback", "cosine_every", "without_beta1",
)  # fmt: skip
# integer keys and their defaults
WHOLE = {
    "min_elements": 1024, "bucket_elements": None, "seed": 0, "warn_after": 120, "end_after": None, "verify_every": 0
}  # fmt: skip
#: What the method "auto" stands for
AUTO = {"method": "topk", "density": 0.01, "values": "qsgd4", "fallback": True, "without_beta1": True}
RULE_KEYS = ("method", "warmup", "schedule")
#: Keys that are true or false, and their defaults
FLAGS = {"watchdog": True, "fallback": False, "without_beta1": False}
MATCH_KEYS = ("name", "ndim", "min_size", "max_size")


def load(source: str | Path | Mapping[str, Any]) -> Plan:
    """Read a plan from a YAML file, or from a dict with the same keys.

    The format::

        method: scalecom            # the default method
        density: 0.01               # its hyper-parameters, at the same level
        beta: 0.1
        warmup: {epochs: 5}         # send dense until then; or {steps: 500}
        schedule:                   # hyper-parameters by steps or epochs, see schedule.py
          density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}
        steps_per_epoch: 391        # required if anything is given in epochs
        min_elements: 1024          # smaller tensors are sent uncompressed
        bucket_elements: 1000000    # smaller tensors are joined into buckets, 0: none; without this key, a driver
                                    # that knows all tensors joins them where results stay the same
        seed: 0
        watchdog: true              # a step that waits too long says for whom, and ends; false: no socket, no thread
        warn_after: 120             # seconds after which it logs a warning that names the missing ranks; 0: never
        end_after: 1800             # seconds after which it ends the process; 0: never; without this key, under PyTorch
                                    # DDP and FSDP2, the timeout of the process group
        verify_every: 0             # ranks compare their parameters and shared state every so many steps; 0: never
        clip_norm: 1.0              # norm that the averaged gradient of all tensors together is clipped to; null: none;
                                    # .inf only measures it, for Compressor.gradient_norm()
        fallback: true              # compare some of the first steps with uncompressed ones, and give compression up if
                                    # it does not save time: under PyTorch DDP and Horovod
        cosine_every: 100           # every so many steps uncompressed gradients are averaged, too: summary() has the
                                    # cosine of the angle between both; 0, the default: never
        without_beta1: true         # set beta1 of Adam and its relatives to 0, if the driver is given the optimizer
        rules:                      # the first rule that matches a tensor applies
          - match: {name: "conv1.*"}            # a glob
            method: none
          - match: {ndim: 4, min_size: 100000}  # all conditions must hold
            density: 0.004                      # no method: the default method, with this changed

    The method "auto" is topk of 1 % in 4 bits, with ``fallback`` and ``without_beta1``.

    Args:
        source: the file's path, or the dict.

    Returns:
        The plan.

    Raises:
        PlanError: the plan is invalid. This is a ``ValueError``; its message names the key, the fault and, for a file,
            the line.
        FileNotFoundError: there is no such file.
    """
    return _read(Document.open(source))


def plan_of(method: str | Method | Plan | Mapping[str, Any], **settings: Any) -> Plan:
    """Make a plan of anything that drivers accept.

    Args:
        method: a method's id, a method, a plan, or a plan's dict.
        **settings: plan keys and hyper-parameters, which override those of ``method``.

    Returns:
        The plan.

    Raises:
        PlanError: as in :func:`load`.
    """
    if isinstance(method, type):
        what = getattr(method, "id", "") or "topk"
        raise PlanError(f"method: {method.__name__} is a class: give its id, {what!r}, or an instance of it")
    if not isinstance(method, str | Method | Plan | Mapping):
        raise PlanError(
            f"method: must be a method's id, a method, a plan or a plan's dict, not a {type(method).__name__}"
        )
    if isinstance(method, Plan):
        return load({**method.to_dict(), **settings}) if settings else method
    if isinstance(method, Method):
        if classes().get(method.id) is not type(method):
            return _unregistered(method, settings)
        method = {"method": method.id, **method.hyperparameters()}
    return load({**(method if isinstance(method, Mapping) else {"method": method}), **settings})


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Read settings as a user writes them on a command line, such as "density=0.01" or "values=fp16".

    Args:
        pairs: KEY=VALUE each; the value is YAML.

    Returns:
        What :func:`plan_of` takes besides a method's id.

    Raises:
        PlanError: one is not KEY=VALUE, or its value is not YAML.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise PlanError(f"write settings as KEY=VALUE, not {pair!r}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise PlanError(f"{key}: {value!r} is not valid YAML: {error}") from None
    return found


def _unregistered(method: Method, settings: dict[str, Any]) -> Plan:
    """Make a plan of one method that is not registered, such as one under development."""
    doc = Document({**settings})
    doc.known_keys((*WHOLE, *FLAGS, "clip_norm", "cosine_every"))
    whole = _whole(doc)
    source = {"method": method.id or type(method).__qualname__, **method.hyperparameters(), **whole}
    return Plan(Program(((0, method),)), source=json.dumps(source, sort_keys=True, default=str), **whole)


def _whole(doc: Document) -> dict[str, Any]:
    """Return the keys of the whole plan, with their defaults; ``clip_norm`` and what is off only where it is given."""
    found: dict[str, Any] = {key: doc.whole(key, default, least=0) for key, default in WHOLE.items()}
    for key, default in FLAGS.items():
        if not isinstance(flag := doc.value.get(key, default), bool):
            raise doc.error(key, f"{flag!r} must be true or false")
        if flag or default:
            found[key] = flag
    limit = doc.value.get("clip_norm")
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise doc.error("clip_norm", f"{limit!r} must be a positive number")
        found["clip_norm"] = float(limit)
    if every := doc.whole("cosine_every", 0, least=0):
        found["cosine_every"] = every
    return found


def _read(doc: Document) -> Plan:
    if doc.value.get("method") == "auto":
        doc = doc.with_defaults(AUTO, instead_of="method")
    if "method" not in doc.value:
        raise doc.error("method", "is missing; a plan needs a default method, such as method: topk")
    steps_per_epoch = doc.whole("steps_per_epoch", None, least=1)
    default_body = doc.without(*PLAN_KEYS)
    program, default = _program(default_body, {}, steps_per_epoch)
    filled = {**default, **get(default["method"], **_settings(default)).hyperparameters()}
    rules = []
    for body in doc.items("rules"):
        if "match" not in body.value:
            raise body.error("match", "is missing; a rule needs conditions, such as match: {ndim: 4}")
        match = body.child("match")
        match.known_keys(MATCH_KEYS)
        sizes = {key: match.whole(key, None, least=0) for key in MATCH_KEYS[1:]}
        own, inherited = body.without("match"), {} if "method" in body.value else default
        rules.append(Rule(Match(match.text("name"), **sizes), _program(own, inherited, steps_per_epoch)[0]))
    whole = _whole(doc)
    try:
        source = json.dumps({**doc.value, **filled, **whole}, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:  # of a dict that was not read from a file
        raise doc.error(None, f"must be of numbers, texts, lists and mappings that end: {error}") from None
    return Plan(program=program, rules=tuple(rules), source=source, **whole)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in RULE_KEYS}


def _program(body: Document, inherited: dict[str, Any], steps_per_epoch: int | None) -> tuple[Program, dict[str, Any]]:
    """Return the program that the keys of a plan or a rule describe, and the keys, for rules to inherit."""
    given = {**inherited, **body.value}
    method = _method(body, given["method"], _settings(given))
    stages = {0: method}
    for start, change in schedule.changes(body, given.get("schedule"), method, steps_per_epoch).items():
        earlier = stages[max(s for s in stages if s <= start)]
        stages[start] = replace(earlier, **change)
    if given.get("warmup") is not None:
        until = schedule.duration(body.child("warmup", given["warmup"]), steps_per_epoch)
        after = stages[max(s for s in stages if s <= until)]
        stages = {s: m for s, m in stages.items() if s > until}
        if until > 0:
            stages[0] = get("none")
        stages[until] = after
    return Program(tuple(sorted(stages.items(), key=lambda stage: stage[0]))), given


def _method(body: Document, id: Any, settings: dict[str, Any]) -> Method:
    for key in settings:
        if not isinstance(key, str):
            raise body.error(key, "unknown key; hyper-parameters are named by text")
    try:
        return get(id, **settings)
    except FieldError as error:
        key = error.field if error.field in body.value else "method"
        hint = suggest(error.field, [*PLAN_KEYS, *RULE_KEYS])
        also = f"{hint.replace('did you mean', 'or the plan key')}" if error.field in settings else ""
        raise body.error(key, f"{error}{also}") from None
