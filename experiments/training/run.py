"""``python -m experiments run``: train every run of an experiment, show the progress, and write the report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from experiments.cluster import launcher, notes
from experiments.cluster.hosts import Hosts
from experiments.cluster.launcher import shown
from experiments.cluster.stopping import Stopped
from experiments.output.console import console_of
from experiments.output.table import Format, print_tables
from experiments.training import files, launch, report, results
from experiments.training.experiment import Experiment
from experiments.training.watch import Watch

__all__ = ["publish", "run"]


def run(
    experiment: Experiment,
    folder: Path,
    controller: str,
    console: Console,
    verbose: bool = False,
    hosts: Hosts | None = None,
) -> int:
    """Train what has no result yet, and publish the results.

    Args:
        experiment: what to train.
        folder: a folder that :func:`launch.prepare` made ready.
        controller: Horovod's, "mpi" or "gloo"; "ddp" for PyTorch's DDP.
        console: where progress and tables are printed.
        verbose: also print the ranks' log.
        hosts: emulated hosts for the ranks, up.

    Returns:
        The exit status: 0; 1 if a run failed; 128 plus the signal's number if it was stopped by one.
    """
    runs = experiment.runs()
    module = launch.MODULES["ddp" if controller == "ddp" else experiment.framework]
    program = ("-m", module, str(folder))
    line = launcher.command(experiment.ranks, controller, *program, hosts=hosts)
    said = notes.notes(line, controller, hosts)
    (folder / "launch.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    watch, code = Watch(runs, folder, console, verbose), 0
    count = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    done = sum(map(watch.ended, runs))
    done_before = f", {done} done before" if done else ""
    console.print(f"[bold]{escape(experiment.name)}[/]: {count}{done_before} → {shown(folder)}", highlight=False)
    if hosts:
        console.print(f"link: {escape(said['link'])}", highlight=False, soft_wrap=True)
    console.print(f"[cyan]$ {escape(shlex.join(line))}[/]", highlight=False, soft_wrap=True)
    if verbose:
        for key, value in launcher.environment(experiment.ranks, hosts).items():
            console.print(f"[dim]  {escape(f'{key}={value}')}[/]", highlight=False, soft_wrap=True)
    try:
        with watch.live():
            launch.follow(runs, folder, line, experiment.ranks, watch, hosts)
    except launcher.LaunchError as error:
        code = 1
        words = f"{error}\nThe whole log: {shown(folder / 'log.txt')}"
        console_of(stderr=True).print(f"[red]error:[/] {escape(words)}", highlight=False, soft_wrap=True)
    except Stopped as stopped:
        code = stopped.code
        console.print("[yellow]stopped: every rank has ended[/]")
    failed = [run for run in runs if "failed" in watch.events[run.id]]
    publish([folder], folder, console)
    if failed and not code:
        code = 1
        console.print(
            f"[red]{len(failed)} of {count} failed[/]; the log: {shown(folder / 'log.txt')}. "
            f"Once the cause is fixed, --resume runs them again.",
            highlight=False,
            soft_wrap=True,
        )
    return code


def publish(folders: Sequence[Path], out: Path, console: Console, form: str = Format.text) -> None:
    """Show the tables of one training or several, and write the report.

    Args:
        folders: what ``python -m experiments run`` wrote.
        out: where to write.
        console: where the tables are printed.
        form: other forms than "text" are printed alone, and nothing is written.

    Raises:
        ValueError: a folder holds no training.
    """
    found = results.read(folders)
    if form != Format.text:
        print_tables(report.tables(found), console, form)
        return
    report.show(found, console)
    with console.status("drawing the report's plots …"):
        written = files.write(found, out)
    console.print(f"written: {', '.join(shown(file) for file in written)}", highlight=False, soft_wrap=True)
    if not any(file.suffix == ".html" for file in written):
        console.print(escape("for report.html with plots: pip install 'hvdcompress[report]'"), soft_wrap=True)
