"""``python -m experiments bench``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


def exchanges(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of one in configs/bench.")],
    hosts: Annotated[int | None, typer.Option(min=2, help="Emulated hosts, instead of the file's.")] = None,
    rates: Annotated[
        str | None, typer.Option(help="Rates of their links, with commas: 100mbit,1gbit; loopback: no emulated hosts.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    sets: Annotated[str | None, typer.Option(help="Only these sets of gradients: labels, with commas.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each, instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/bench-NAME, or -2, …")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: turns that were taken are kept.")] = False,
) -> None:
    """Measure how long methods take to reduce gradients over links of chosen rates, and stock Horovod and DDP.

    `python -m experiments bench CONFIG` is short for this command. Emulated hosts need root and iproute2. Writes
    config.yaml, turns.jsonl, bench-NAME.json and a picture.

    Example: sudo python -m experiments bench resnet50 --rates 100mbit,1gbit
    """
    from experiments.bench import run as benchmark
    from experiments.bench.config import Bench
    from experiments.options import config_file, split
    from experiments.report.folders import choose, users_own

    asked = Bench.open(config_file(config, "bench")).override(hosts, split(rates), split(methods), split(sets), rounds)
    folder = choose(f"bench-{asked.name}", out, resume)
    with users_own(folder):
        benchmark.prepare(folder, asked, resume)
        code = benchmark.run(asked, folder)
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
    elements: Annotated[int, typer.Option(min=1, help="Elements of the tensor, a matrix.")] = 25_000_000,
    net: Annotated[str | None, typer.Option(help="The tensors of a net instead, such as resnet50.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 9,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: so many payloads are decoded.")] = 2,
    device: Annotated[Device, typer.Option(help="Where gradients lie.")] = Device.cpu,
    out: Annotated[Path, typer.Option(help="Folder for codec.json.")] = Path("runs"),
) -> None:
    """Measure what a rank computes in a step, in copies of its gradient: without a network, in one thread.

    Methods have density 0.01, unless their settings say otherwise. Each takes turns with other implementations of it,
    and a copy of the gradient is timed before each turn. All methods take about ten minutes.

    Example: python -m experiments bench codec -m "topk density=0.001" --net resnet50
    """
    from experiments.bench import codec as benchmark
    from experiments.report import results, tables
    from experiments.report.numbers import number, seconds_of

    shape = benchmark.tensors_of(net, elements)
    frame = benchmark.run(benchmark.plans(methods or ()), shape, world_size, runs, device.value)
    figures = dict.fromkeys(("copies", "least", *benchmark.PARTS), number)
    tables.show(frame, f"{net or elements} elements, {world_size} ranks, {device.value}", **figures, seconds=seconds_of)
    print(f"written: {results.save('codec', frame, out, net=net, elements=elements, world_size=world_size)}")


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
