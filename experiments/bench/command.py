"""``python -m experiments bench`` and ``python -m experiments codec``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def bench(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of one in configs/bench.")],
    hosts: Annotated[int | None, typer.Option(min=2, help="Emulated hosts, instead of the file's.")] = None,
    ranks_per_host: Annotated[int | None, typer.Option(min=1, help="Ranks of each, instead of the file's.")] = None,
    rates: Annotated[
        str | None, typer.Option(help="Rates of their links, with commas: 100mbit,1gbit; loopback: no emulated hosts.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    sets: Annotated[str | None, typer.Option(help="Only these sets of gradients: labels, with commas.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each, instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/bench-NAME.")] = None,
) -> None:
    """Measure how long methods take to reduce gradients over links of chosen rates, and stock Horovod and DDP.

    Emulated hosts need root and iproute2. Writes config.yaml, turns.jsonl, bench-NAME.json and a picture. Turns that
    were taken are kept: the same command goes on where it was interrupted.

    Example: sudo python -m experiments bench resnet50 --rates 100mbit,1gbit
    """
    from experiments.bench import run as benchmark
    from experiments.bench.config import Bench
    from experiments.configfile import config_file, split

    given = Bench.open(config_file(config, "bench"))
    changes = {"hosts": hosts, "ranks_per_host": ranks_per_host, "rates": split(rates), "rounds": rounds}
    asked = given.override(split(methods), split(sets), **changes)
    folder = out or Path("runs") / f"bench-{asked.name}"
    benchmark.prepare(folder, asked)
    raise typer.Exit(benchmark.run(asked, folder))


def codec(
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "-m", help='Such as topk, or "topk density=0.001 values=fp16"; again for more. Default: all.'
        ),
    ] = None,
    set: Annotated[
        str, typer.Option(help="Whose gradients: a net, or a number of elements of one matrix.")
    ] = "25000000",
    runs: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 9,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: so many payloads are decoded.")] = 2,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where gradients lie.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for codec.json.")] = Path("runs"),
) -> None:
    """Measure what a rank computes in a step, in copies of its gradient: without a network, in one thread.

    Methods have density 0.01, unless their settings say otherwise. A copy of the gradient is timed before each step.
    All methods take about ten minutes.

    Example: python -m experiments codec -m "topk density=0.001" --set resnet50
    """
    from experiments import nets
    from experiments.bench import codec as benchmark
    from experiments.bench.lockstep import PARTS
    from experiments.report import results, tables
    from experiments.report.numbers import number, seconds_of

    frame = benchmark.run(benchmark.plans(methods or ()), nets.get(set), world_size, runs, device)
    figures = dict.fromkeys((*PARTS, "copies"), number)
    tables.show(frame, f"{set}, {world_size} ranks, {device}", **figures, seconds=seconds_of)
    print(f"written: {results.save('codec', frame, out, set=set, world_size=world_size, device=device)}")
