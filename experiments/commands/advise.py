"""``hvdcompress advise``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.cluster.started import is_first
from experiments.commands.shared import RUNS, FormatOption, console_of, methods_of, network_of, split
from experiments.output.table import Format


def advise(
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="A function that makes your torch.nn.Module.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="One that makes a batch. Without it the backward pass only waits."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A loss of model and batch. Default: cross-entropy of a pair."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="The optimizer of a model; with it --check compares losses of --model, too."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Or a net of the quickstart's: digits, bytes.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Or a net's shapes: resnet50, or a file of shapes.")] = None,
    backward: Annotated[str, typer.Option(help="How long its backward pass waits, for --shapes.")] = "0s",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per rank and step, for --task.")] = 32,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Or a profile that --save wrote.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Keep what was measured.")] = None,
    link: Annotated[str | None, typer.Option(help="A link's speed and latency instead: 10gbit,50us.")] = None,
    ranks: Annotated[int | None, typer.Option("-np", "--ranks", min=2, help="How many ranks.")] = None,
    shared: Annotated[
        float | None, typer.Option(min=1, help="Ranks that share a processor. Default: measured; else 1.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Measure on real hosts (a:2,b:2), or on so many emulated ones (4).")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="The emulated hosts' links: 100mbit, 1gbit.")] = None,
    config: Annotated[str, typer.Option(help="Methods to choose among: a YAML file or a packaged one.")] = "advise",
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Also measure real steps and losses of both.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="For --check: turns of real steps of each.")] = 2,
    training: Annotated[
        float, typer.Option("--seconds", min=0, help="For --check: of each training whose loss is compared; 0: none.")
    ] = 10.0,
    seeds: Annotated[int, typer.Option(min=1, help="For --check: trainings of each.")] = 3,
    plan: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the advised plan there.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw a step's time against the link's speed.")
    ] = None,
    validate: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="Instead: measure whether advice is right (advise_truth).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of --validate. Default: runs/NAME, or -2, …")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --validate: go on.")] = False,
    rates: Annotated[str | None, typer.Option(help="With --validate: only these links of the file.")] = None,
    sets: Annotated[str | None, typer.Option(help="With --validate: only these nets of the file.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Say whether to compress, and how: don't, 16 bits, a plan, or fewer rounds.

    Measures when gradients are ready, the link, and the methods' codecs; predicts a step of each candidate; chooses.
    """
    if validate:
        _validate_advice(validate, out, resume, split(rates), split(sets))
        return
    if out or resume or rates or sets:
        raise ValueError("--out, --resume, --rates and --sets are for --validate")
    from experiments.advise import launching, report, run
    from experiments.advise import ranks as on_ranks
    from experiments.advise.fabric import launched
    from experiments.advise.job import Job
    from experiments.advise.profile import Profile
    from experiments.advise.verdict import error_of
    from experiments.advise.workload import Named, found_by
    from experiments.scale.run import seconds

    entries, error, under = methods_of(config, methods, ["advice", "experiment"]), error_of(), launched()
    console = console_of()
    measured: Mapping[str, list[float]] = {}
    untrained = ""
    given = run.link_of(link) if link else None
    with contextlib.nullcontext() if under else console.status("…") as status:

        def say(words: str) -> None:
            if status:
                status.update(f"{escape(words)} …")
            elif is_first():
                print(f"{words} …", file=sys.stderr, flush=True)

        if profile:
            if model or task or shapes or hosts or check or optimizer:
                raise ValueError("--profile has the model in it, and measures nothing: give it alone, or with --link")
            found = Profile.open(profile)
        else:
            if check and not (hosts or under or ranks):
                raise ValueError("--check needs ranks: --hosts, -np, horovodrun or torchrun")
            named = Named(shapes, seconds(backward), task, batch_size, model, data, loss, optimizer)
            if model:
                sys.path.insert(0, os.getcwd())
                options = ((model, "--model"), (data, "--data"), (loss, "--loss"), (optimizer, "--optimizer"))
                for words, option in options:
                    if words:
                        found_by(words, option)  # what is wrong is said before ranks are started
            settings = [{"label": entry.label, **entry.settings} for entry in entries]
            job = Job([named], settings, error, rounds=rounds, seeds=seeds)
            if check:
                job = replace(job, check="plan", training=training)
            if under or not (hosts or check or (ranks and not link)):
                [case] = on_ranks.measure(job, say)
            else:
                emulated = network_of(int(hosts), rate, None, None, ranks) if hosts and hosts.isdigit() else None
                count = ranks or (emulated.count if emulated else _slots(hosts or ""))
                with emulated or contextlib.nullcontext():
                    [case] = launching.launch(job, count, emulated or hosts, say)
            found, measured, untrained = case.profile, case.measured, case.untrained
            if save and is_first():
                found.save(save)
        if not is_first():
            return
        advice = run.report_of(found, entries, error, given, ranks, shared, say)
        advice.measured, advice.untrained = measured, untrained
        if plot:
            from experiments.advise import picture

            plot.parent.mkdir(parents=True, exist_ok=True)
            whole = [one for one in advice.advice.candidates if not one.partly]
            title = f"A step of {found.name} on {advice.ranks} ranks, by the speed of their links"
            plot.write_text(picture.steps(advice.case, whole, title), encoding="utf-8")
    report.show(advice, console, form)
    if plan:
        plan.parent.mkdir(parents=True, exist_ok=True)
        plan.write_text(advice.advice.plan_yaml(), encoding="utf-8")


def _slots(hosts: str) -> int:
    """How many ranks ``a:2,b:2`` has room for.

    Raises:
        ValueError: it is not of that form.
    """
    words = [word.rpartition(":") for word in split(hosts)]
    if not words or any(not host or not count.isdigit() for host, _, count in words):
        raise ValueError(f"--hosts {hosts}: write hosts and their ranks, a:2,b:2, or a number of emulated hosts")
    return sum(int(count) for *_, count in words)


def _validate_advice(config: str, out: Path | None, resume: bool, rates: list[str], nets: list[str]) -> None:
    """Measure whether advice is right; write the folder, and print its table.

    Raises:
        ValueError, OSError, LaunchError, HostsError: it cannot be done.
    """
    from experiments import packaged
    from experiments.advise import validate
    from experiments.advise.verdict import error_of
    from experiments.cluster import launcher
    from experiments.cluster.hosts import HostsError, problem
    from experiments.cluster.launcher import shown
    from experiments.output import folder as folders

    asked = validate.Validation.open(packaged.resolve(config, ["validation"])).override(rates, nets)
    launcher.horovodrun()
    if missing := problem():
        raise HostsError(missing)
    folder, console = folders.choose(RUNS, asked.name, out, resume, None), console_of()
    with folders.users_own(folder):
        validate.prepare(folder, asked, resume)
        with console.status("…") as status:
            validate.measure(
                asked,
                folder,
                error_of(),
                lambda words: status.update(f"{escape(words)} …"),
                lambda words: console.print(escape(words), highlight=False, soft_wrap=True),
            )
        written = validate.write(folder)
    found = validate.outcomes(folder)
    for table in validate.tables(found):
        table.show(console)
        console.print()
    console.print(escape(validate.summary(found)), highlight=False, soft_wrap=True)
    console.print(f"written: {', '.join(shown(file) for file in written)}", highlight=False, soft_wrap=True)
