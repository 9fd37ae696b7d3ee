"""``python -m experiments bench``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from experiments.commands.shared import RUNS, FormatOption, config_argument, console_of, split
from experiments.output.table import Format, print_tables


def exchanges(
    config: Annotated[
        str, config_argument("A benchmark: a YAML file, or a packaged one's name (see configs).", "benchmark")
    ],
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
    form: FormatOption = Format.text,
) -> None:
    """Measure how long methods take to reduce gradients over links of chosen speeds, and stock Horovod and DDP.

    `python -m experiments bench CONFIG` is short for this command.

    Needs root and iproute2, for emulated hosts. Writes config.yaml, launch.json, results.jsonl, summary.json,
    table.md and report.html. Exit status: 0; 1 if something failed; 2 for a bad configuration; 130 after Ctrl-C.
    """
    from experiments import packaged
    from experiments.bench import run as benchmark
    from experiments.bench.config import Bench
    from experiments.cluster import launcher
    from experiments.cluster.hosts import HostsError, problem
    from experiments.output import folder as folders

    asked = Bench.open(packaged.resolve(config, ["benchmark"])).override(
        hosts, split(rates), split(methods), split(sets), rounds
    )
    if any(contender.where != "ddp" for contender in asked.contenders()):
        launcher.horovodrun()
    if not loopback and (missing := problem()):
        raise HostsError(f"{missing}\nOr measure with --loopback.")
    folder = folders.choose(RUNS, f"bench-{asked.name}", out, resume, overwrite)
    with folders.users_own(folder):
        benchmark.prepare(folder, asked, loopback, resume)
    with folders.users_own(folder):
        code = benchmark.run(asked, folder, loopback, console_of(), form)
    raise typer.Exit(code)


class Device(StrEnum):
    """Where gradients lie."""

    cpu = "cpu"
    cuda = "cuda"


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
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: so many payloads are decoded.")] = 2,
    device: Annotated[Device, typer.Option(help="Where gradients lie.")] = Device.cpu,
    peers: Annotated[bool, typer.Option(help="Also other implementations, and bare operations.")] = True,
    write: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Also write the tables there.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Measure what a rank computes in a step, in copies of its gradient: without a network, in one thread.

    Methods have density 0.01, unless their settings say otherwise. Each takes turns with what it is compared with, and
    a copy of the gradient is timed before each turn. All of them take some ten minutes.
    """
    import shlex
    import sys

    from experiments.bench import codec as benchmark
    from experiments.bench import codec_report as report
    from experiments.bench import devices

    if tensors and elements:
        raise ValueError("--tensors has a size of its own: leave out --elements")
    asked = benchmark.Asked(
        benchmark.asked_for(methods or ()),
        elements or benchmark.Asked.elements,
        benchmark.net_of(tensors) if tensors else None,
        world_size,
        runs,
        device.value,
        peers,
    )
    console = console_of()
    with console.status("…") as status:
        measured = list(benchmark.run(asked, lambda label: status.update(f"{escape(label)} …")))
    print_tables([table for table, _ in report.sections(asked, measured)], console, form)
    if write:
        line = shlex.join(["python", "-m", "experiments", *sys.argv[1:]])
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(report.markdown(asked, measured, line, str(devices.device(asked.device))), encoding="utf-8")


class Bench(TyperGroup):
    """The commands of ``bench``, with ``exchanges`` as the default: ``bench FILE`` means ``bench exchanges FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if the first argument is not a command."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["exchanges", *args]
        return super().parse_args(ctx, args)


benchmarks = typer.Typer(
    cls=Bench,
    no_args_is_help=True,
    help="Measure: `bench CONFIG` times the exchanges of a benchmark file, `bench codec` the computation of one rank.",
)
benchmarks.command()(exchanges)
benchmarks.command()(codec)
