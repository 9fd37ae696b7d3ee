"""``python -m experiments scale``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def scale(
    config: Annotated[str, typer.Argument(help="Whose methods: a YAML file, or the name of one in configs.")] = "scale",
    set: Annotated[
        str, typer.Option(help="What is exchanged: a net's gradients, or a number of elements of one matrix.")
    ] = "resnet50",
    rate: Annotated[str, typer.Option(help="Rates of the links, with commas: 100mbit,1gbit,10gbit.")] = "1gbit",
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "2,4,8,16,64,256,1024,4096",
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    per_host: Annotated[int, typer.Option(min=1, help="Ranks of a host. With several, with one and two levels.")] = 1,
    inside: Annotated[str, typer.Option(help="Rate of a rank inside a host: 80gbit, shared memory.")] = "80gbit",
    over: Annotated[
        Literal["horovod", "mpi4py"],
        typer.Option(help="The driver: PyTorch's under Horovod, or MPI's. Each has constants of its own."),
    ] = "horovod",
    fit: Annotated[
        list[Path] | None,
        typer.Option(metavar="RESULTS", help="First fit to this folder of `bench`, or to links.json; again for more."),
    ] = None,
    fitted: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Use the fit that --fit wrote to this folder's JSON file.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for scale-SET.json (scale-nodes.json), .svg, and the fit.")] = Path(
        "runs"
    ),
) -> None:
    """Predict an exchange's time and bytes among any number of workers, by a model fitted to measured exchanges.

    Collectives are rings, dense ones too; nothing overlaps with a backward pass; each rank has a core like that of the
    fit, and each host a link for itself. Beyond the numbers of workers and the rates of the fit, figures are
    extrapolated. * marks what is no faster than dense.

    Example: python -m experiments scale --set resnet50 --rate 100mbit,1gbit --workers 8,64
    """
    from experiments import nets
    from experiments.configfile import methods_of, split
    from experiments.cost_model import fitted as fits
    from experiments.cost_model import scale as scaling
    from experiments.report import plots, results, tables

    numbers, rates = split(workers), split(rate)
    if wrong := [word for word in numbers if not word.isdigit()]:
        raise ValueError(f"--workers: {wrong[0]!r} is not a number of workers")
    entries, tensors = methods_of(config, methods), nets.get(set)
    model = fits.fit(fit, over) if fit else fits.Fitted.open(over, fitted or results.FOLDER)
    predicted = scaling.predict(model, entries, tensors, rates, [int(word) for word in numbers], per_host, inside)
    for level, rows in predicted.groupby("levels"):
        title = f"{level} level{'s' * (level > 1)}, by workers\n\n"
        for each in rates:
            print(f"Seconds per exchange of {set} at {each}, {title}{scaling.table(rows, each)}\n")
        print(f"Bytes on a host's link, {title}{scaling.table(rows, rates[0], 'on_host')}\n")
    tables.show(scaling.errors({over: model}), "Errors of predictions of exchanges that a fit had not seen")
    name = ("scale-nodes" if per_host > 1 else f"scale-{set}") + ("-mpi4py" if over == "mpi4py" else "")
    about = {"driver": over, "constants": model.constants, "per_host": per_host, "inside": inside}
    written = [results.save(name, predicted, out, **about)]
    written += [plots.save(scaling.draw(predicted), written[0].with_suffix(".svg"))]
    written += [model.save(out)] if fit else []
    print(f"written: {', '.join(map(str, written))}")
