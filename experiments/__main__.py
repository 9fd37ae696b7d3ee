"""``python -m experiments COMMAND``: the list of commands, and what becomes of their errors.

A command is a function (or a typer app with commands of its own) in its area's ``command.py``, which is imported only
when the command is run or its help is asked for. Command modules import frameworks inside of their functions.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

#: command: where its function is. Listed in this order.
COMMANDS = {
    "quickstart": "experiments.training.command:quickstart",
    "run": "experiments.training.command:run",
    "time-to-accuracy": "experiments.to_accuracy.command:app",
    "momentum": "experiments.momentum.command:app",
    "bench": "experiments.bench.command:bench",
    "codec": "experiments.bench.command:codec",
    "compare": "experiments.compare:compare",
    "scale": "experiments.cost_model.command:scale",
    "reproduce": "experiments.papers.command:reproduce",
    "hosts": "experiments.cluster.command:hosts",
}


class Commands(TyperGroup):
    """The commands of :data:`COMMANDS`. Errors that a user can mend are one line; others are bugs, with a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Import a command."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name, context_settings=CONTEXT)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = name
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and say in one line what a user can mend."""
        from experiments.cluster.hosts import HostsError
        from experiments.cluster.launch import LaunchError, Stopped

        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            message, code = str(error), 2
        except ModuleNotFoundError as error:
            message, code = f"{error.name} is not installed: pip install 'hvdcompress[experiments,torch,mpi]'", 2
        except (LaunchError, HostsError) as error:
            message, code = str(error), 1
        except Stopped as stopped:
            message, code = "stopped: every rank has ended, and what is finished is kept", stopped.code
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(code)


CONTEXT = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
    help="Train, measure, predict and reproduce: everything that compares methods. Run it from the repository.",
    epilog="Exit status: 0; 1 if something that was run has failed; 2 for a wrong argument or file; 130 after Ctrl-C.",
)


@app.callback()
def _root() -> None:
    """Without a callback, typer would make an app without commands of its own a single command."""


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m experiments")


if __name__ == "__main__":
    main()
