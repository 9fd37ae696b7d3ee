"""The ``hvdcompress`` command. Frameworks, and all that is slow to import, are imported where they are used."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Gradient compression for Horovod: train, compare and check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RUNS = Path("runs")


def _console(stderr: bool = False) -> Console:
    # Where there is no terminal rich assumes 80 columns, which would cut tables in logs.
    console = Console(stderr=stderr)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(stderr=stderr, width=160)


def _fail(message: object, code: int = 2) -> typer.Exit:
    _console(stderr=True).print(f"[red]error:[/] {escape(str(message))}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


def _split(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="An experiment's YAML file, see configs/experiments/.")],
    ranks: Annotated[int | None, typer.Option("-np", "--ranks", min=1, help="Ranks, instead of the file's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: runs/NAME, or runs/NAME-2, -3, … where that is taken."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks of the file: labels, with commas.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps a run, instead of the file's.")] = None,
    gloo: Annotated[bool, typer.Option("--gloo", help="Let Horovod use Gloo instead of MPI.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on in --out (default: the newest runs/NAME…): finished runs are kept."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty --out (default: runs/NAME) first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the ranks' log too.")] = False,
) -> None:
    """Train every task with every method of CONFIG under horovodrun, and report.

    Writes config.yaml, launch.json, log.txt, metrics/*.jsonl, summary.json, table.md and report.html. Ctrl-C
    ends every rank, and reports what there is. Exit status: 0; 1 if a run failed; 2 for a bad configuration;
    130 after Ctrl-C.
    """
    from hvdcompress import launcher, storage
    from hvdcompress.experiment import Experiment

    try:
        experiment = Experiment.open(config)
        launcher.check_tasks(experiment)
        experiment = experiment.override(ranks, steps, _split(methods), _split(tasks))
        launcher.horovodrun()
        folder = storage.choose(RUNS, experiment.name, out, resume, overwrite)
        storage.prepare(folder, experiment, resume)
    except (ValueError, OSError, launcher.LaunchError) as error:
        raise _fail(error) from None
    raise typer.Exit(_train(experiment, folder, "gloo" if gloo else "mpi", verbose))


def _train(experiment: Any, folder: Path, controller: str, verbose: bool) -> int:
    from hvdcompress import launcher
    from hvdcompress.display import Watch

    console, runs = _console(), experiment.runs()
    line = launcher.command(experiment.ranks, controller, str(launcher.SCRIPT), str(folder))
    (folder / "launch.json").write_text(json.dumps(launcher.notes(line), indent=2) + "\n", encoding="utf-8")
    watch, code = Watch(runs, folder, console, verbose), 0
    count = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    done = sum(map(watch.ended, runs))
    done_before = f", {done} done before" if done else ""
    console.print(
        f"[bold]{escape(experiment.name)}[/]: {count}{done_before} → {launcher.shown(folder)}", highlight=False
    )
    console.print(f"[cyan]$ {escape(shlex.join(line))}[/]", highlight=False, soft_wrap=True)
    if verbose:
        for key, value in launcher.environment(experiment.ranks).items():
            console.print(f"[dim]  {escape(f'{key}={value}')}[/]", highlight=False, soft_wrap=True)
    try:
        with watch.live():
            launcher.follow(runs, folder, line, experiment.ranks, watch)
    except launcher.LaunchError as error:
        code = 1
        _fail(f"{error}\nThe whole log: {launcher.shown(folder / 'log.txt')}")
    except launcher.Stopped as stopped:
        code = stopped.code
        console.print("[yellow]stopped: every rank has ended[/]")
    failed = [run for run in runs if "failed" in watch.events[run.id]]
    _publish([folder], folder, console)
    if failed and not code:
        code = 1
        console.print(
            f"[red]{len(failed)} of {count} failed[/]; the log: {launcher.shown(folder / 'log.txt')}. "
            f"Once mended, take it up again with --resume.",
            highlight=False,
            soft_wrap=True,
        )
    return code


def _publish(folders: list[Path], out: Path, console: Console) -> None:
    from hvdcompress import launcher, report, tables

    found = report.read(folders)
    tables.show(found, console)
    with console.status("drawing the report's plots …"):
        files = report.write(found, out)
    console.print(f"written: {', '.join(launcher.shown(file) for file in files)}", highlight=False, soft_wrap=True)
    if not any(file.suffix == ".html" for file in files):
        console.print("for report.html with plots: pip install 'hvdcompress\\[report]'")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `hvdcompress run` wrote.", metavar="RUN…")],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: RUN, or runs/compare for several.")] = None,
) -> None:
    """Make the table and the HTML page again, or compare several runs."""
    try:
        _publish(folders, out or (folders[0] if len(folders) == 1 else RUNS / "compare"), _console())
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def methods(id: Annotated[str | None, typer.Argument(help="Say all about this one.")] = None) -> None:
    """List the methods: paper, what travels, hyper-parameters; or say all about one."""
    from hvdcompress import catalogue

    try:
        catalogue.show(id, _console())
    except ValueError as error:
        raise _fail(error) from None


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 120,
) -> None:
    """Say what of the installation works, with a 2-rank all-reduce over MPI and over Gloo."""
    from hvdcompress import checkup

    raise typer.Exit(checkup.run(_console(), timeout))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        import hvdcompress

        typer.echo(hvdcompress.__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point of the ``hvdcompress`` command."""
    try:
        app()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
