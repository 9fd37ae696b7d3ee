"""``python -m experiments hosts``: run any program on emulated hosts."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated

import typer

CountOption = Annotated[int | None, typer.Option("--hosts", min=2, help="Emulated hosts for the ranks; needs root.")]
RateOption = Annotated[str | None, typer.Option(help="Their links: 100mbit, 1gbit, …")]


def hosts(
    command: Annotated[list[str], typer.Argument(help="A command for host0, such as: mpirun -H host0:1,host1:1 …")],
    count: Annotated[int, typer.Option("--hosts", min=2, help="How many hosts.")] = 4,
    rate: Annotated[str, typer.Option(help="Their links: 100mbit, 1gbit, …")] = "1gbit",
) -> None:
    """Run COMMAND on emulated hosts, host0 to hostN, with links of a chosen speed; then take them down.

    mpirun and horovodrun in COMMAND reach the other hosts without sshd. Needs root and iproute2.
    """
    from experiments.cluster.hosts import Hosts
    from experiments.cluster.launch import environment, stoppable

    with stoppable(), Hosts(count, rate) as network:
        done = subprocess.run(network.command("host0", *command), env={**os.environ, **environment(count)})
    raise typer.Exit(done.returncode)
