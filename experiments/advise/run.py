"""From a profile to a report: which link, which ranks, which methods, and which plans are to be checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.advise.calibrate import calibrate, handling
from experiments.advise.choose import DENSE, Candidate, Case, candidates
from experiments.advise.codecs import Known
from experiments.advise.profile import Profile
from experiments.advise.report import Report
from experiments.advise.timeline import Link
from experiments.advise.verdict import advise
from experiments.cluster.rates import Rate
from experiments.configfile import MethodEntry
from experiments.scale.model import Model
from experiments.scale.run import FITTED, seconds
from hvdcompress.plan import BY_NAME, IN_ORDER, Plan, load

__all__ = ["case_of", "decided", "is_as_measured", "link_of", "plan_to_train", "plans_to_check", "report_of", "rivals"]

NEAR, MOST_RIVALS = 0.25, 4  # of the shortest step: predictions are off by about a tenth; methods everywhere, and dense


def link_of(words: str, fitted: Path = FITTED["horovod"]) -> Link:
    """A link by its speed and latency; what else collectives cost is as fitted to measured exchanges.

    Args:
        words: ``10gbit`` or ``10gbit,50us``: bits per second, and seconds a message.
        fitted: the constants of ``python -m experiments scale``.

    Raises:
        ValueError: it is not of that form.
    """
    rate, _, latency = words.partition(",")
    constants = Model.open(fitted).constants
    try:
        message = seconds(latency) if latency else constants.message
        share = 1 / constants.link
        return Link(Rate.parse(rate).slower * share, message, constants.round, constants.call, share=share)
    except ValueError as error:
        raise ValueError(f"--link {words}: {error}") from None


def report_of(
    profile: Profile,
    entries: Sequence[MethodEntry],
    error: float,
    link: Link | None = None,
    ranks: int | None = None,
    shared: float | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Report:
    """Advice from a profile.

    Args:
        profile: what was measured.
        entries: methods to choose among; codecs that the profile lacks are timed now.
        error: of an exchange's predicted time, relative.
        link: another link than the profile's.
        ranks: another number of ranks.
        shared: ranks that share a processor, if not as measured.
        say: called with what is done next.

    Raises:
        ValueError: the profile has no link, and none is given; or there is one rank.
    """
    case = case_of(profile, link, ranks, shared, say)
    found = candidates(case, entries, say)
    if is_as_measured(profile, link, ranks, shared):
        found = _with_measured(found, profile)
    return Report(profile, case.given, case.world_size, case.shared, advise(case, found, error), case)


def decided(report: Report, profile: Profile) -> Report:
    """The report once real steps or trainings are in this profile; nothing is predicted again."""
    found = _with_measured(report.advice.candidates, profile)
    return replace(report, profile=profile, advice=advise(report.case, found, report.advice.error))


def _with_measured(found: Sequence[Candidate], profile: Profile) -> list[Candidate]:
    steps = {_key(load(step.plan)): step.seconds for step in profile.steps}
    trials = {_key(load(trial.plan)): trial for trial in profile.trials}
    keys = [_key(one.plan) for one in found]
    return [replace(one, measured=steps.get(key), trial=trials.get(key)) for one, key in zip(found, keys, strict=True)]


def case_of(
    profile: Profile,
    link: Link | None = None,
    ranks: int | None = None,
    shared: float | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Case:
    """The training that a profile tells of, over its link or another one; see :func:`report_of`."""
    world_size = ranks or profile.ranks
    if world_size < 2:
        raise ValueError("one rank exchanges nothing: give --ranks, or measure among several (--hosts, horovodrun)")
    if link is None and profile.link is None:
        raise ValueError(
            "the link was not measured: give --link, such as 10gbit,50us, or measure it (--hosts, horovodrun)"
        )
    found = link or profile.link.link  # type: ignore[union-attr]
    sharing = shared or (profile.shared if ranks in (None, profile.ranks) else 1.0)
    grouping = IN_ORDER if profile.driver == "DDP" else BY_NAME
    case = Case(
        profile.shapes, profile.times_if(sharing), found, world_size, Known(profile.codecs, say), sharing, grouping
    )
    if not (is_as_measured(profile, link, ranks, shared) and profile.dense):
        return case
    case = case.over(calibrate(case, profile.dense))
    return case.with_handling(handling(case, profile.compressed)) if profile.compressed else case


def is_as_measured(profile: Profile, link: Link | None, ranks: int | None, shared: float | None) -> bool:
    """Whether nothing is other than it was when the profile was measured."""
    return link is None and ranks in (None, profile.ranks) and shared in (None, profile.shared)


def _key(plan: Plan) -> str:
    return json.dumps(plan.to_dict(), sort_keys=True)


def rivals(report: Report) -> dict[str, dict[str, Any]]:
    """Plans by label whose predicted steps are so close to each other that only real ones tell them apart."""
    advice = report.advice
    whole = sorted((one for one in advice.candidates if not one.partly), key=lambda one: one.step.seconds)
    near = [one for one in whole if one.step.seconds <= whole[0].step.seconds * (1 + NEAR)][:MOST_RIVALS]
    if advice.best.partly:
        near.append(advice.best)
    return _plans(near) if len(near) > 1 else {}


def _plans(found: Sequence[Candidate]) -> dict[str, dict[str, Any]]:
    """As they are measured: dense is the framework's own."""
    return {one.label: {"method": "none"} if one.label == DENSE else one.plan.to_dict() for one in found}


def plan_to_train(report: Report) -> tuple[str, dict[str, Any]] | None:
    """Return the label and the plan that is advised; None if that is dense training, or has been trained."""
    best = report.advice.best
    return None if best is report.advice.dense or best.trial else (best.label, best.plan.to_dict())


def plans_to_check(report: Report, everything: bool) -> dict[str, dict[str, Any]]:
    """Plans to measure by label: dense, and what is advised (or the best of the others); or every one."""
    advice = report.advice
    others = sorted((one for one in advice.candidates if one.label != DENSE), key=lambda one: one.seconds)
    whole = [one for one in others if not one.partly] if everything else others[:1]
    chosen = [*whole, *([advice.best] if advice.best is not advice.dense and advice.best not in whole else [])]
    return _plans([advice.dense, *chosen])
