"""What the commands share: where they print, options, words with commas, methods of a file, emulated hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from experiments.output.console import console_of
from experiments.output.table import Format

if TYPE_CHECKING:
    from experiments.cluster.hosts import Hosts
    from experiments.configfile import MethodEntry

RUNS = Path("runs")


def _known_configs(*kinds: str) -> Callable[[str], list[str]]:
    def names(incomplete: str) -> list[str]:
        from experiments import packaged

        found = [one.name for one in packaged.every(kinds) if one.name.startswith(incomplete)]
        return [*found, *(str(file) for file in Path().glob(f"{incomplete}*.yaml"))]

    return names


def config_argument(help: str, *kinds: str) -> typer.models.ArgumentInfo:
    """An argument that names a configuration; packaged ones of these kinds complete."""
    return typer.Argument(help=help, autocompletion=_known_configs(*kinds))


FormatOption = Annotated[Format, typer.Option("--format", help="Print tables in this form.")]


def fail(message: object, code: int = 2) -> typer.Exit:
    """Print an error; returns what the caller raises to leave with this status."""
    console_of(stderr=True).print(f"[red]error:[/] {escape(str(message))}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


def warn(message: str) -> None:
    """Print a warning, where it is in nobody's way: on the error stream."""
    console_of(stderr=True).print(f"[yellow]warning:[/] {escape(message)}", highlight=False, soft_wrap=True)


def split(text: str | None) -> list[str]:
    """Words that are parted by commas."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def network_of(
    count: int | None, rate: str | None, slow: list[str] | None, delay: str | None, ranks: int | None
) -> Hosts | None:
    """The emulated hosts that were asked for, or None.

    Raises:
        ValueError: the options contradict each other.
        HostsError: emulated hosts cannot be set up on this machine.
    """
    from experiments.cluster.hosts import Hosts, HostsError, problem
    from experiments.cluster.rates import slow_hosts

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


def methods_of(config: str | None, labels: str | None, kinds: Sequence[str]) -> Sequence[MethodEntry]:
    """The methods of an experiment's file, or of a packaged one; every method with its defaults for None.

    Raises:
        ValueError, OSError: there is no such file, something in it is wrong, or there is no such label.
    """
    from experiments import packaged
    from experiments.training.experiment import Experiment
    from hvdcompress import registry

    everything = {"name": "all", "tasks": ["any"], "methods": registry.available()}
    source = everything if config is None else packaged.resolve(config, kinds)
    return Experiment.open(source).override(methods=split(labels)).methods
