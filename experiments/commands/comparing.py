"""``python -m experiments compare`` and ``scale``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from experiments.commands.shared import RUNS, FormatOption, config_argument, console_of, methods_of, split, warn
from experiments.output.table import Format


def compare(
    gradients: Annotated[Path, typer.Argument(help="A file that lab.training.save_gradients or compare.save() wrote.")],
    config: Annotated[
        str | None,
        typer.Option(help="An experiment: a YAML file or a packaged one's name. Default: every method as it comes."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table there, as Markdown.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Show how each method performs on saved gradients: error, bytes and compression ratio, on the same data for all.

    The error of one exchange is the median over the steps, with its quartiles and the medians of the early, middle and
    late third of them. Where the gradients' norm collapses, a warning says so.
    """
    from experiments import compare as comparison

    entries = methods_of(config, methods, ["comparison", "experiment"])
    given = comparison.load(gradients)
    console = console_of()
    outcomes = []
    with console.status("…") as status:
        for entry in entries:
            status.update(f"{entry.label} …")
            outcomes.append(comparison.measure(entry, given))
    table = comparison.table(outcomes)
    table.print(console, form)
    if warning := comparison.warning(given):
        warn(warning)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(table.markdown() + (f"\nWarning: {warning}\n" if warning else ""), encoding="utf-8")


def scale(
    config: Annotated[
        str,
        config_argument(
            "An experiment: a YAML file or a packaged one's name; its methods are compared.", "scale", "experiment"
        ),
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
    over: Annotated[
        Literal["horovod", "mpi4py"] | None,
        typer.Option(
            help="The driver: PyTorch's under Horovod, or MPI's. Each has constants of its own. Default: that of the "
            "file of --constants, otherwise horovod."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write scale.json, table.md and report.html there.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Predict an exchange's time and bytes among 2 to 4096 workers, by a cost model fitted to measured exchanges."""
    from experiments.scale import run as scaling

    entries = methods_of(config, methods, ["scale", "experiment"])
    packaged = scaling.FITTED[over or "horovod"]
    constants = constants or (RUNS / packaged.name if fit else packaged)
    scaling.run(entries, set, split(rate), split(workers), fit or [], constants, latency, out, console_of(), form, over)
