"""``python -m experiments COMMAND``: the list of commands, and what becomes of their errors.

A command is a function (or a typer app with commands of its own) in its area's ``command.py``. Command modules import
frameworks inside of their functions.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from experiments.bench.command import bench, codec
from experiments.cluster.command import hosts
from experiments.compare import compare
from experiments.cost_model.command import scale
from experiments.momentum.command import app as momentum
from experiments.papers.command import reproduce
from experiments.sharded.command import app as sharded
from experiments.to_accuracy.command import app as time_to_accuracy
from experiments.training.command import quickstart, run
from experiments.training.gradients import save_gradients


class Commands(TyperGroup):
    """Errors that a user can mend are one line; others are bugs, with a traceback."""

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


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, measure, predict and reproduce: everything that compares methods. Run it from the repository.",
    epilog="Exit status: 0; 1 if something that was run has failed; 2 for a wrong argument or file; 130 after Ctrl-C.",
)


for command in (quickstart, run, bench, codec, save_gradients, compare, scale, reproduce, hosts):
    app.command()(command)
app.add_typer(time_to_accuracy, name="time-to-accuracy")
app.add_typer(momentum, name="momentum")
app.add_typer(sharded, name="sharded")


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m experiments")


if __name__ == "__main__":
    main()
