"""The ``hvdcompress`` command. Frameworks, and all that is slow to import, are imported where they are used."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

if TYPE_CHECKING:
    from hvdcompress.lab.cluster.hosts import Hosts
    from hvdcompress.lab.configfile import MethodEntry

app = typer.Typer(
    help="Gradient compression for Horovod: train, compare and check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RUNS = Path("runs")


class Format(StrEnum):
    """How a table is printed."""

    table = "table"
    markdown = "markdown"
    csv = "csv"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Print the table in this form.")]


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
    config: Annotated[str, typer.Argument(help="An experiment: a YAML file, or a packaged one's name (see configs).")],
    ranks: Annotated[int | None, typer.Option("-np", "--ranks", min=1, help="Ranks, instead of the file's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: runs/NAME, or runs/NAME-2, -3, … where that is taken."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks of the file: labels, with commas.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per run, instead of the file's.")] = None,
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
    from hvdcompress.lab import packaged
    from hvdcompress.lab.cluster import launcher, notes
    from hvdcompress.lab.cluster.hosts import HostsError
    from hvdcompress.lab.output import folder as folders
    from hvdcompress.lab.training import launch
    from hvdcompress.lab.training import run as training
    from hvdcompress.lab.training.experiment import Experiment

    controller = "gloo" if gloo else "mpi"
    try:
        experiment = Experiment.open(packaged.resolve(config, ["experiment"]))
        launch.check_tasks(experiment)
        network = _network(hosts, rate, slow, delay, ranks)
        experiment = experiment.override(hosts or ranks, steps, _split(methods), _split(tasks))
        launcher.horovodrun()
        folder = folders.choose(RUNS, experiment.name, out, resume, overwrite)
        if resume:
            notes.check_link(folder, notes.link(controller, network))
        with folders.users_own(folder):
            launch.prepare(folder, experiment, resume)
    except (ValueError, OSError, launcher.LaunchError, HostsError) as error:
        raise _fail(error) from None
    try:
        # the hosts are taken down whatever happens
        with folders.users_own(folder), network or contextlib.nullcontext():
            code = training.run(experiment, folder, controller, _console(), verbose, network)
    except HostsError as error:
        raise _fail(error) from None
    raise typer.Exit(code)


def _network(
    count: int | None, rate: str | None, slow: list[str] | None, delay: str | None, ranks: int | None
) -> Hosts | None:
    """The emulated hosts that were asked for, or None.

    Raises:
        ValueError: the options contradict each other.
        HostsError: emulated hosts cannot be set up on this machine.
    """
    from hvdcompress.lab.cluster.hosts import Hosts, HostsError, problem
    from hvdcompress.lab.cluster.rates import slow_hosts

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


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `hvdcompress run` wrote.", metavar="RUN…")],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: RUN, or runs/compare for several.")] = None,
    form: FormatOption = Format.table,
) -> None:
    """Make the table and the HTML page again, or compare several runs.

    With another --format than "table", the tables are printed, and nothing is written.
    """
    from hvdcompress.lab.training import run as training

    try:
        training.publish(folders, out or (folders[0] if len(folders) == 1 else RUNS / "compare"), _console(), form)
    except (ValueError, OSError) as error:
        raise _fail(error) from None


class _Bench(TyperGroup):
    """The commands of ``bench``; where none is named, ``exchanges`` is meant: ``bench FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["exchanges", *args]
        return super().parse_args(ctx, args)


benchmarks = typer.Typer(
    cls=_Bench,
    no_args_is_help=True,
    help="Measure: `bench CONFIG` the exchanges of a benchmark's file, `bench codec` what a rank computes.",
)
app.add_typer(benchmarks, name="bench")


@benchmarks.command()
def exchanges(
    config: Annotated[str, typer.Argument(help="A benchmark: a YAML file, or a packaged one's name (see configs).")],
    hosts: Annotated[int | None, typer.Option(min=2, help="Emulated hosts, instead of the file's.")] = None,
    rates: Annotated[str | None, typer.Option(help="Their links' speeds, with commas: 100mbit,1gbit.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    sets: Annotated[str | None, typer.Option(help="Only these sets of gradients: labels, with commas.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each, instead of the file's.")] = None,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Without emulated hosts: times without a network.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/bench-NAME, or -2, …")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: turns that were taken are kept.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty the folder first.")] = False,
) -> None:
    """Measure how long methods take to reduce gradients over links of chosen speeds, and stock Horovod and DDP.

    `hvdcompress bench CONFIG` is short for this command.

    Needs root and iproute2, for emulated hosts. Writes config.yaml, launch.json, results.jsonl, summary.json,
    table.md and report.html. Exit status: 0; 1 if something failed; 2 for a bad configuration; 130 after Ctrl-C.
    """
    from hvdcompress.lab import packaged
    from hvdcompress.lab.bench import run as benchmark
    from hvdcompress.lab.bench.config import Bench
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.cluster.hosts import HostsError, problem
    from hvdcompress.lab.output import folder as folders

    try:
        asked = Bench.open(packaged.resolve(config, ["benchmark"])).override(
            hosts, _split(rates), _split(methods), _split(sets), rounds
        )
        launcher.horovodrun()
        if not loopback and (missing := problem()):
            raise HostsError(f"{missing}\nOr measure with --loopback.")
        folder = folders.choose(RUNS, f"bench-{asked.name}", out, resume, overwrite)
        with folders.users_own(folder):
            benchmark.prepare(folder, asked, loopback, resume)
    except (ValueError, OSError, launcher.LaunchError, HostsError) as error:
        raise _fail(error) from None
    with folders.users_own(folder):
        code = benchmark.run(asked, folder, loopback, _console())
    raise typer.Exit(code)


class Device(StrEnum):
    """Where gradients lie."""

    cpu = "cpu"
    cuda = "cuda"


@benchmarks.command()
def codec(
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "-m", help='Such as topk, or "topk density=0.001 values=fp16"; again for more. Default: all.'
        ),
    ] = None,
    elements: Annotated[
        int | None, typer.Option(min=1, help="Elements of the tensor, a matrix. Default: 25 million.")
    ] = None,
    tensors: Annotated[
        str | None,
        typer.Option(
            help="Also a net's tensors, compared with one tensor of their size: resnet50, or their number, 161."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 9,
    world: Annotated[int, typer.Option(min=1, help="Ranks: so many payloads are decoded.")] = 2,
    device: Annotated[Device, typer.Option(help="Where gradients lie.")] = Device.cpu,
    peers: Annotated[bool, typer.Option(help="Also other implementations, and bare operations.")] = True,
    write: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Also write the tables there.")] = None,
    form: FormatOption = Format.table,
) -> None:
    """Measure what a rank computes in a step, in copies of its gradient: without a network, in one thread.

    Methods have density 0.01, unless their settings say otherwise. Each takes turns with what it is compared with, and
    a copy of the gradient is timed before each turn. All of them take some ten minutes.
    """
    import shlex
    import sys

    from hvdcompress.lab.bench import codec as benchmark
    from hvdcompress.lab.bench import codec_report as report
    from hvdcompress.lab.bench import devices

    try:
        if tensors and elements:
            raise ValueError("--tensors has a size of its own: leave out --elements")
        asked = benchmark.Asked(
            benchmark.asked_for(methods or ()),
            elements or benchmark.Asked.elements,
            benchmark.net_of(tensors) if tensors else None,
            world,
            runs,
            device.value,
            peers,
        )
        console = _console()
        with console.status("…") as status:
            measured = list(benchmark.run(asked, lambda label: status.update(f"{escape(label)} …")))
        for at, (table, _) in enumerate(report.sections(asked, measured)):
            if at and form == Format.table:
                console.print()
            table.print(console, form)
        if write:
            line = shlex.join(["hvdcompress", *sys.argv[1:]])
            write.parent.mkdir(parents=True, exist_ok=True)
            write.write_text(
                report.markdown(asked, measured, line, str(devices.device(asked.device))), encoding="utf-8"
            )
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def compare(
    gradients: Annotated[Path, typer.Argument(help="A file that lab.training.save_gradients or compare.save() wrote.")],
    config: Annotated[
        str | None,
        typer.Option(help="An experiment: a YAML file or a packaged one's name. Default: every method as it comes."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table there, as Markdown.")] = None,
    form: FormatOption = Format.table,
) -> None:
    """Show how each method performs on saved gradients: error, bytes and compression ratio, on the same data for all.

    The error of one exchange is the median over the steps, with its quartiles and the medians of the early, middle and
    late third of them. Where the gradients' norm collapses, a warning says so.
    """
    from hvdcompress.lab import compare as comparison

    try:
        entries = _methods_of(config, methods, ["comparison", "experiment"])
        given = comparison.load(gradients)
        console = _console()
        outcomes = []
        with console.status("…") as status:
            for entry in entries:
                status.update(f"{entry.label} …")
                outcomes.append(comparison.measure(entry, given))
        table = comparison.table(outcomes)
        table.print(console, form)
        if warning := comparison.warning(given):
            _console(stderr=True).print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(table.markdown() + (f"\nWarning: {warning}\n" if warning else ""), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise _fail(error) from None


def _methods_of(config: str | None, labels: str | None, kinds: Sequence[str]) -> Sequence[MethodEntry]:
    """The methods of an experiment's file, or of a packaged one; every method with its defaults for None.

    Raises:
        ValueError, OSError: there is no such file, something in it is wrong, or there is no such label.
    """
    from hvdcompress import registry
    from hvdcompress.lab import packaged
    from hvdcompress.lab.training.experiment import Experiment

    everything = {"name": "all", "tasks": ["any"], "methods": registry.available()}
    source = everything if config is None else packaged.resolve(config, kinds)
    return Experiment.open(source).override(methods=_split(labels)).methods


@app.command()
def scale(
    config: Annotated[
        str, typer.Argument(help="An experiment: a YAML file or a packaged one's name; its methods are compared.")
    ] = "scale",
    set: Annotated[
        str, typer.Option(help="What is exchanged: a net, a file of shapes, or a number of elements.")
    ] = "resnet50",
    rate: Annotated[str, typer.Option(help="Links' speeds, with commas: 100mbit,1gbit,10gbit.")] = "1gbit",
    workers: Annotated[str | None, typer.Option(help="Numbers of workers, with commas. Default: 2 to 4096.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option(metavar="RESULTS", help="First fit to this folder of `bench`, or to a file of lab.scale.links."),
    ] = None,
    constants: Annotated[
        Path | None,
        typer.Option(help="File of the fitted constants. Default: the packaged ones; with --fit, runs/fit.json."),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="How long a message takes on its way, such as 20us. Default: as fitted.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write scale.json, table.md and report.html there.")] = None,
) -> None:
    """Predict an exchange's time and bytes among 2 to 4096 workers, by a cost model fitted to measured exchanges."""
    from hvdcompress.lab.scale import run as scaling

    try:
        entries = _methods_of(config, methods, ["scale", "experiment"])
        constants = constants or (RUNS / "fit.json" if fit else scaling.FITTED)
        scaling.run(entries, set, _split(rate), _split(workers), fit or [], constants, latency, out, _console())
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
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
    task: Annotated[str | None, typer.Option(help="Or a net of the quickstart's: digits, bytes.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Or a net's shapes: resnet50, or a file of shapes.")] = None,
    backward: Annotated[str, typer.Option(help="How long its backward pass waits, for --shapes.")] = "0s",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a rank and step, for --task.")] = 32,
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
    check: Annotated[bool, typer.Option("--check", help="Also measure real steps, dense against the plan.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, for --check.")] = 2,
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
    form: FormatOption = Format.table,
) -> None:
    """Say whether to compress, and how: don't, 16 bits, a plan, or fewer rounds.

    Measures when gradients are ready, the link, and the methods' codecs; predicts a step of each candidate; chooses.

    hvdcompress advise --model my.module:make_model --data my.module:make_batch --hosts a:1,b:1 --check

    horovodrun -np 4 hvdcompress advise --model my.module:make_model --data my.module:make_batch

    hvdcompress advise --shapes resnet50 --backward 200ms --link 10gbit,50us --ranks 64     plan a purchase

    hvdcompress advise --profile profile.json --link 1gbit,50us --plan plan.yaml
    """
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.cluster.hosts import HostsError

    try:
        if validate:
            _validate_advice(validate, out, resume, _split(rates), _split(sets))
            return
        if out or resume or rates or sets:
            raise ValueError("--out, --resume, --rates and --sets are for --validate")
        from hvdcompress.lab.advise import launching, report, run
        from hvdcompress.lab.advise import ranks as on_ranks
        from hvdcompress.lab.advise.fabric import launched
        from hvdcompress.lab.advise.job import Job
        from hvdcompress.lab.advise.profile import Profile
        from hvdcompress.lab.advise.verdict import error_of
        from hvdcompress.lab.advise.workload import Named
        from hvdcompress.lab.scale.run import seconds

        entries, error, under = _methods_of(config, methods, ["advice", "experiment"]), error_of(), launched()
        console = _console()
        measured: Mapping[str, list[float]] = {}
        given = run.link_of(link) if link else None
        with console.status("…") if _is_first() else contextlib.nullcontext() as status:

            def say(words: str) -> None:
                if status:
                    status.update(f"{escape(words)} …")

            if profile:
                if model or task or shapes or hosts or check:
                    raise ValueError(
                        "--profile has the model in it, and measures nothing: give it alone, or with --link"
                    )
                found = Profile.open(profile)
            else:
                if check and not (hosts or under or ranks):
                    raise ValueError("--check needs ranks: --hosts, -np, horovodrun or torchrun")
                named = Named(shapes, seconds(backward), task, batch_size, model, data, loss)
                if model:
                    sys.path.insert(0, os.getcwd())
                settings = [{"label": entry.label, **entry.settings} for entry in entries]
                job = Job([named], settings, error, "plan" if check else "no", rounds)
                if under or not (hosts or check or (ranks and not link)):
                    [case] = on_ranks.measure(job, say)
                else:
                    emulated = _network(int(hosts), rate, None, None, ranks) if hosts and hosts.isdigit() else None
                    count = ranks or (emulated.count if emulated else _slots(hosts or ""))
                    with emulated or contextlib.nullcontext():
                        [case] = launching.launch(job, count, emulated or hosts, say)
                found, measured = case.profile, case.measured
                if save and _is_first():
                    found.save(save)
            if not _is_first():
                return
            advice = run.report_of(found, entries, error, given, ranks, shared, say)
            advice.measured = measured
            if plot:
                from hvdcompress.lab.advise import picture

                plot.parent.mkdir(parents=True, exist_ok=True)
                whole = [one for one in advice.advice.candidates if not one.partly]
                plot.write_text(picture.steps(advice.case, whole, advice.heading), encoding="utf-8")
        report.show(advice, console, form)
        if plan:
            plan.parent.mkdir(parents=True, exist_ok=True)
            plan.write_text(advice.advice.plan_yaml(), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise _fail(f"{error.name} is missing: pip install hvdcompress[report,torch]") from None
    except (ValueError, OSError, launcher.LaunchError, HostsError) as error:
        raise _fail(error) from None


def _is_first() -> bool:
    """Whether this process is alone, or the first of the ranks that a launcher started."""
    names = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0")) == 0


def _slots(hosts: str) -> int:
    """How many ranks ``a:2,b:2`` has room for.

    Raises:
        ValueError: it is not of that form.
    """
    words = [word.rpartition(":") for word in _split(hosts)]
    if not words or any(not host or not count.isdigit() for host, _, count in words):
        raise ValueError(f"--hosts {hosts}: write hosts and their ranks, a:2,b:2, or a number of emulated hosts")
    return sum(int(count) for *_, count in words)


def _validate_advice(config: str, out: Path | None, resume: bool, rates: list[str], nets: list[str]) -> None:
    """Measure whether advice is right; write the folder, and print its table.

    Raises:
        ValueError, OSError, LaunchError, HostsError: it cannot be done.
    """
    from hvdcompress.lab import packaged
    from hvdcompress.lab.advise import validate
    from hvdcompress.lab.advise.verdict import error_of
    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.cluster.hosts import HostsError, problem
    from hvdcompress.lab.cluster.launcher import shown
    from hvdcompress.lab.output import folder as folders

    asked = validate.Validation.open(packaged.resolve(config, ["validation"])).override(rates, nets)
    launcher.horovodrun()
    if missing := problem():
        raise HostsError(missing)
    folder, console = folders.choose(RUNS, asked.name, out, resume, False), _console()
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


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="A paper by its method's id, such as gaussiank; or summary.")],
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Hours, for verdicts to print; or at most ten minutes.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Folder of Fashion-MNIST's files. Default: where Debian's package puts them.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the page. Default: build/reproduce/PAPER.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Trainings side by side. Default: one a core.")
    ] = None,
    form: FormatOption = Format.table,
) -> None:
    """Test a paper's claims on real data, and write a page: claim, how it was tested, picture, number, verdict.

    Writes PAPER.md, PAPER.json and pictures. What was measured is kept in OUTPUT/cache: the same command goes on where
    it was interrupted. `reproduce summary` prints the verdicts of all pages in OUTPUT, build/reproduce by default.

    Exit status: 0; 2 if data is missing; 130 after Ctrl-C.
    """
    from hvdcompress.lab.reproduce import page, papers, run
    from hvdcompress.lab.reproduce.claims import Scale

    console, parent = _console(), Path("build/reproduce")
    try:
        if paper == "summary":
            page.summary(output or parent).print(console, form)
            return
        found, scale = papers.find(paper), Scale(quick=not full, path=data)
        run.check(found, scale)
        folder = output or parent / paper
        cores = len(os.sched_getaffinity(0))
        line = f"hvdcompress reproduce {paper} {'--full' if full else '--quick'}"
        files = run.reproduce(found, folder, scale, jobs or cores, console, line)
        page.verdicts(folder / f"{paper}.json").print(console, form)
        console.print(f"written: {escape(str(files[-1]))}", highlight=False, soft_wrap=True)
    except ModuleNotFoundError as error:
        raise _fail(f"{error.name} is missing: pip install hvdcompress[report,torch]") from None
    except (ValueError, OSError) as error:
        raise _fail(error) from None
    except KeyboardInterrupt:
        raise _fail("interrupted: what was measured is kept, and the same command goes on from there", 130) from None


@app.command()
def methods(
    id: Annotated[str | None, typer.Argument(help="Print the documentation of this one.")] = None,
    form: FormatOption = Format.table,
) -> None:
    """List the methods: paper, what travels, hyper-parameters; or print the documentation of one."""
    from hvdcompress.lab import catalogue

    console = _console()
    try:
        if id is not None:
            catalogue.describe(id, console)
            return
        catalogue.methods().print(console, form)
    except ValueError as error:
        raise _fail(error) from None
    if form == Format.table:
        console.print(
            "\n[dim]n elements, k kept, p ranks. More on one: hvdcompress methods scalecom[/]", highlight=False
        )


@app.command()
def configs(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    copy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Copy it to this new file, or into this folder.")
    ] = None,
    form: FormatOption = Format.table,
) -> None:
    """List the configurations that come with the package; or print or copy one of them.

    Their names can be given to `run`, `bench`, `compare` and `scale`; `run` and `bench` also read edited copies.
    """
    from hvdcompress.lab import catalogue, packaged
    from hvdcompress.lab.cluster.launcher import shown

    console = _console()
    try:
        if name is None and copy is None:
            catalogue.configs().print(console, form)
        elif name is None:
            raise ValueError("--copy needs the name of a packaged configuration: `hvdcompress configs` lists them")
        elif copy is None:
            typer.echo(packaged.find(name).file.read_text(encoding="utf-8"), nl=False)
        else:
            written = packaged.copy(name, copy)
            console.print(f"written: {escape(shown(written))}", highlight=False, soft_wrap=True)
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def torture(
    door: Annotated[
        str, typer.Option(help="Through which doors, with commas: mpi, ddp, torch, tensorflow.")
    ] = "mpi,ddp,torch,tensorflow",
    faults: Annotated[int, typer.Option(min=1, help="How many launches, each with one fault.")] = 44,
    seed: Annotated[int, typer.Option(min=0, help="The first launch's; those that follow have seed + 1, ….")] = 0,
    only: Annotated[str | None, typer.Option(help="Only these faults: names, with commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/torture, or -2, …")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: launches that were judged are kept.")] = False,
    form: FormatOption = Format.table,
) -> None:
    """Launch short trainings with one fault each, at a moment drawn from a seed, and judge what came of them.

    A launch must recover with nothing lost, or end with one clear error on every rank within 15 s. Anything else is a
    bug, which is listed with the command that shows it again. Exit status: 0; 1 if there was a bug; 2 for bad options;
    130 after Ctrl-C.
    """
    import shlex

    from hvdcompress.lab.cluster import launcher
    from hvdcompress.lab.cluster.stopping import Stopped
    from hvdcompress.lab.output import folder as folders
    from hvdcompress.lab.torture import report
    from hvdcompress.lab.torture import run as chaos
    from hvdcompress.lab.torture.faults import DOORS, FAULTS, Case, chosen

    console = _console()
    try:
        doors, kinds = chosen(_split(door), DOORS, "door"), chosen(_split(only), tuple(FAULTS), "fault")
        folder = folders.choose(RUNS, "torture", out, resume, False)
        cases = [Case.drawn(number, doors, kinds) for number in range(seed, seed + faults)]
        with folders.users_own(folder):
            chaos.prepare(folder, {"doors": doors, "only": kinds, "seed": seed}, resume)
            chaos.run(folder, cases, lambda words: _console(stderr=True).print(escape(words), highlight=False))
            chaos.write(folder, shlex.join(["hvdcompress", *sys.argv[1:]]))
    except (ValueError, OSError, launcher.LaunchError) as error:
        raise _fail(error) from None
    except Stopped as stopped:
        raise _fail("stopped: what was judged is kept, and --resume goes on from there", stopped.code) from None
    found = chaos.records(folder)
    report.table(found).print(console, form)
    if bugs := report.bugs(found):
        _console(stderr=True).print(escape(bugs), highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 120,
) -> None:
    """Check the installation, with a 2-rank all-reduce over MPI and over Gloo."""
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
