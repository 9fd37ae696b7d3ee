"""``hvdcompress methods``, ``configs``, ``describe`` and ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.commands.shared import FormatOption, console_of, known_methods
from experiments.output.table import Format


def methods(
    id: Annotated[
        str | None, typer.Argument(help="Print the documentation of this one.", autocompletion=known_methods)
    ] = None,
    form: FormatOption = Format.text,
) -> None:
    """List the methods: paper, what travels, hyper-parameters; or print the documentation of one."""
    from experiments import catalogue

    console = console_of()
    if id is not None:
        catalogue.describe(id, console, form)
        return
    catalogue.methods().print(console, form)
    if form == Format.text:
        console.print(
            "\n[dim]n elements, k kept, p ranks. More on one: hvdcompress methods scalecom[/]", highlight=False
        )


def configs(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    copy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Copy it to this new file, or into this folder.")
    ] = None,
    form: FormatOption = Format.text,
) -> None:
    """List the configurations that come with the package; or print or copy one of them.

    Their names can be given to `run`, `bench`, `compare` and `scale`; `run` and `bench` also read edited copies.
    """
    from experiments import catalogue, packaged
    from experiments.cluster.launcher import shown

    console = console_of()
    if name is None and copy is None:
        catalogue.configs().print(console, form)
    elif name is None:
        raise ValueError("--copy needs the name of a packaged configuration: `hvdcompress configs` lists them")
    elif copy is None:
        typer.echo(packaged.find(name).file.read_text(encoding="utf-8"), nl=False)
    else:
        written = packaged.copy(name, copy)
        console.print(f"written: {escape(shown(written))}", highlight=False, soft_wrap=True)


def describe(path: Annotated[Path, typer.Argument(help="A file that Compressor.save wrote, or its folder.")]) -> None:
    """Show what made a saved state: step, ranks, driver, versions, momentum, plan."""
    from hvdcompress.engine.saving import checkpoint

    typer.echo(checkpoint.describe(path), nl=False)


def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 120,
    warm: Annotated[
        bool, typer.Option("--warm", help="Compile the kernels of all methods for this processor instead.")
    ] = False,
    form: FormatOption = Format.text,
) -> None:
    """Check the installation, with a 2-rank all-reduce over MPI and over Gloo.

    With `--warm`, compile all kernels and keep them on disk, so that no training does: for the build of a container
    image, on the kind of processor that it will run on.

    Exit status: 0; 1 if something that is installed does not work.
    """
    from experiments import doctor

    if warm:
        doctor.warm(console_of())
        return
    raise typer.Exit(doctor.run(console_of(), timeout, form))
