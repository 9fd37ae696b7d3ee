"""``hvdcompress new-method`` and ``completion``: what is written for a user to keep."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Shell(StrEnum):
    """Shells that completion is written for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def new_method(
    name: Annotated[str, typer.Argument(help="The method's id: lower-case letters, digits, underscores.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="A folder for a package of your own. Default: the sources' methods, if this is a checkout."),
    ] = None,
) -> None:
    """Write the file of a new method, one that works, and its test.

    In a checkout of the project they go to hvdcompress/methods and tests/unit/methods. With --folder a small package is
    written, which registers the method where it is installed: `pip install -e FOLDER`.
    """
    from experiments import skeleton
    from experiments.cluster.launcher import shown

    written = skeleton.write(name, folder)
    for file in written:
        typer.echo(f"written: {shown(file)}")
    typer.echo(f"next:    {skeleton.next_step(name, folder)}")


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.")],
) -> None:
    """Print a script by which the shell completes commands, options, methods and configurations.

    It asks this command itself, through typer, so it needs no update when commands change, and no other package.
    """
    from typer.completion import get_completion_script

    typer.echo(get_completion_script(prog_name="hvdcompress", complete_var="_HVDCOMPRESS_COMPLETE", shell=shell.value))
