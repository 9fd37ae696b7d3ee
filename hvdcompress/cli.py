"""The ``hvdcompress`` command. Frameworks, and all that is slow to import, are imported where they are used."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from hvdcompress.lab.cluster.hosts import Hosts

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
    hosts: Annotated[
        int | None, typer.Option(min=2, help="Emulate so many hosts, with a rank on each; needs root and iproute2.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Their links' speed: 100mbit, 1gbit, or 10mbit/1gbit to send and to receive.")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="HOST=RATE", help="A host with another speed, such as 3=10mbit.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help="How much later each frame arrives, such as 1ms; needs netem in the kernel.")
    ] = None,
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
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.cluster.hosts import HostsError
    from hvdcompress.lab.output import folder as storage
    from hvdcompress.lab.training.experiment import Experiment

    controller = "gloo" if gloo else "mpi"
    try:
        experiment = Experiment.open(config)
        launcher.check_tasks(experiment)
        network = _network(hosts, rate, slow, delay, ranks)
        experiment = experiment.override(hosts or ranks, steps, _split(methods), _split(tasks))
        launcher.horovodrun()
        folder = storage.choose(RUNS, experiment.name, out, resume, overwrite)
        if resume:
            launcher.check_link(folder, launcher.link(controller, network))
        with storage.users_own(folder):
            storage.prepare(folder, experiment, resume)
    except (ValueError, OSError, launcher.LaunchError, HostsError) as error:
        raise _fail(error) from None
    try:
        with storage.users_own(folder), network or contextlib.nullcontext():  # hosts are taken down whatever happens
            code = _train(experiment, folder, controller, verbose, network)
    except HostsError as error:
        raise _fail(error) from None
    raise typer.Exit(code)


def _network(
    count: int | None, rate: str | None, slow: list[str] | None, delay: str | None, ranks: int | None
) -> Hosts | None:
    """The emulated hosts that were asked for, or None; refuses what cannot be had here."""
    from hvdcompress.lab.cluster.hosts import Hosts, HostsError, problem, slow_hosts

    if count is None:
        if rate or slow or delay:
            raise ValueError("--rate, --slow and --delay are for emulated hosts: give --hosts, too")
        return None
    if rate is None:
        raise ValueError("--hosts needs the links' speed, such as --rate 1gbit")
    if ranks not in (None, count):
        raise ValueError(f"-np {ranks} and --hosts {count}: each host runs one rank, so leave out -np")
    network = Hosts(count, rate, slow_hosts(slow or []), delay)
    if missing := problem():
        raise HostsError(missing)
    return network


def _train(experiment: Any, folder: Path, controller: str, verbose: bool, hosts: Hosts | None = None) -> int:
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.training.watch import Watch

    console, runs = _console(), experiment.runs()
    line = launcher.command(
        experiment.ranks, controller, str(launcher.SCRIPTS[experiment.framework]), str(folder), hosts=hosts
    )
    notes = launcher.notes(line, controller, hosts)
    (folder / "launch.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
    watch, code = Watch(runs, folder, console, verbose), 0
    count = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    done = sum(map(watch.ended, runs))
    done_before = f", {done} done before" if done else ""
    console.print(
        f"[bold]{escape(experiment.name)}[/]: {count}{done_before} → {launcher.shown(folder)}", highlight=False
    )
    if hosts:
        console.print(f"link: {escape(notes['link'])}", highlight=False, soft_wrap=True)
    console.print(f"[cyan]$ {escape(shlex.join(line))}[/]", highlight=False, soft_wrap=True)
    if verbose:
        for key, value in launcher.environment(experiment.ranks, hosts).items():
            console.print(f"[dim]  {escape(f'{key}={value}')}[/]", highlight=False, soft_wrap=True)
    try:
        with watch.live():
            launcher.follow(runs, folder, line, experiment.ranks, watch, hosts)
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
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.training import report, tables

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
def bench(
    config: Annotated[Path, typer.Argument(help="A benchmark's YAML file, see configs/bench/.")],
    hosts: Annotated[int | None, typer.Option(min=2, help="Emulated hosts, instead of the file's.")] = None,
    rates: Annotated[str | None, typer.Option(help="Their links' speeds, with commas: 100mbit,1gbit.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    sets: Annotated[str | None, typer.Option(help="Only these sets of gradients: labels, with commas.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each, instead of the file's.")] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="Without emulated hosts: no network's times.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/bench-NAME, or -2, …")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: turns that were taken are kept.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty the folder first.")] = False,
) -> None:
    """Measure how long methods take to reduce gradients over links of chosen speeds, beside stock Horovod and DDP.

    Needs root and iproute2, for emulated hosts. Writes config.yaml, launch.json, results.jsonl, summary.json,
    table.md and report.html. Exit status: 0; 1 if something failed; 2 for a bad configuration; 130 after Ctrl-C.
    """
    from hvdcompress.lab.bench import run as _bench_run
    from hvdcompress.lab.bench.config import Bench
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.cluster.hosts import HostsError, problem
    from hvdcompress.lab.output import folder as storage

    try:
        asked = Bench.open(config).override(hosts, _split(rates), _split(methods), _split(sets), rounds)
        launcher.horovodrun()
        if not loopback and (missing := problem()):
            raise HostsError(f"{missing}\nOr measure with --loopback.")
        folder = storage.choose(RUNS, f"bench-{asked.name}", out, resume, overwrite)
        with storage.users_own(folder):
            _bench_run.prepare(folder, asked, loopback, resume)
    except (ValueError, OSError, launcher.LaunchError, HostsError) as error:
        raise _fail(error) from None
    with storage.users_own(folder):
        code = _bench_run.run(asked, folder, loopback, _console())
    raise typer.Exit(code)


@app.command()
def compare(
    gradients: Annotated[Path, typer.Argument(help="Gradients that launch/save_gradients.py or compare.save() wrote.")],
    config: Annotated[
        Path | None, typer.Option(help="An experiment's YAML: its methods. Default: every method as it comes.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table there, as Markdown.")] = None,
) -> None:
    """Show what each method makes of saved gradients: error, bytes and rate, on the same data for all."""
    from hvdcompress import registry
    from hvdcompress.lab import compare as comparison
    from hvdcompress.lab.training.experiment import Experiment

    everything = {"name": "all", "tasks": ["gradients"], "methods": registry.available()}
    try:
        entries = Experiment.open(config or everything).override(methods=_split(methods)).methods
        given = comparison.load(gradients)
        console = _console()
        with console.status("…") as status:
            outcomes = []
            for entry in entries:
                status.update(f"{entry.label} …")
                outcomes.append(comparison.measure(entry, given))
        comparison.show(outcomes, console)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(comparison.markdown(outcomes), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def scale(
    config: Annotated[
        Path | None, typer.Argument(help="An experiment's YAML: its methods. Default: configs/bench/scale.yaml.")
    ] = None,
    set: Annotated[
        str, typer.Option(help="What is exchanged: a net, a file of shapes, or a number of elements.")
    ] = "resnet50",
    rate: Annotated[str, typer.Option(help="Links' speeds, with commas: 100mbit,1gbit,10gbit.")] = "1gbit",
    workers: Annotated[str | None, typer.Option(help="Numbers of workers, with commas. Default: 2 to 4096.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option(metavar="RESULTS", help="First fit to this folder of `bench`, or file of measure_links.py."),
    ] = None,
    constants: Annotated[
        Path | None, typer.Option(help="File of the fitted constants. Default: configs/bench/fit.json.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="What a message takes on its way, such as 20us. Default: as fitted.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write scale.json, table.md and report.html there.")] = None,
) -> None:
    """Foretell an exchange's time and bytes among 2 to 4096 workers, by a cost model fitted to measured exchanges."""
    from hvdcompress.lab.scale import run as _scale_run

    try:
        _scale_run.run(
            config, set, _split(rate), _split(workers), _split(methods), fit or [], constants, latency, out, _console()
        )
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def methods(id: Annotated[str | None, typer.Argument(help="Say all about this one.")] = None) -> None:
    """List the methods: paper, what travels, hyper-parameters; or say all about one."""
    from hvdcompress.lab import catalogue

    try:
        catalogue.show(id, _console())
    except ValueError as error:
        raise _fail(error) from None


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 120,
) -> None:
    """Say what of the installation works, with a 2-rank all-reduce over MPI and over Gloo."""
    from hvdcompress.lab import doctor

    raise typer.Exit(doctor.run(_console(), timeout))


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
