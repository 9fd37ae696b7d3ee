"""The command line of the experiments: the list of commands with their examples, and the handling of errors.

The commands are in ``experiments/commands``, one file per subject. They import frameworks and other slow modules
only when they need them, so that ``--help`` is fast.
"""

from __future__ import annotations

import os
import traceback
from typing import Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperGroup

from experiments.commands import advise, bench, comparing, files, looking, papers, training
from experiments.commands.shared import fail

DEBUG = "--debug"
EXPERIMENTS = ("sklearn", "matplotlib", "jinja2", "pandas", "joblib", "psutil")
PACKAGES = {
    **dict.fromkeys(EXPERIMENTS, "experiments"),
    "mpi4py": "mpi",
    "torch": "torch",
}  # their extras


def examples(*lines: str) -> str:
    """Return the text below the help of a command. Each line is a paragraph, because typer joins the lines of one."""
    return "\n\n".join(["Examples:", *lines])


class Commands(TyperGroup):
    """A group that turns an error of any command into one line and an exit status; ``--debug`` adds the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere on the command line: move it to the front."""
        if DEBUG in args:
            args = [DEBUG, *(word for word in args if word != DEBUG)]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and report its errors."""
        debug = ctx.params.get("debug")
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except ModuleNotFoundError as error:
            if debug:
                traceback.print_exc()
            package = str(error.name).partition(".")[0]
            extra = f": pip install 'hvdcompress[{PACKAGES[package]}]'" if package in PACKAGES else ""
            raise fail(f"the package {package} is not installed{extra}") from None
        except (ValueError, OSError) as error:
            if debug:
                traceback.print_exc()
            raise fail(error) from None
        except Exception as error:
            if type(error).__module__.startswith(("typer", "click")):  # a usage error, which typer reports itself
                raise
            if debug:
                traceback.print_exc()
            if type(error).__module__.startswith(
                ("hvdcompress", "experiments")
            ):  # LaunchError, HostsError: their text is complete
                raise fail(error) from None
            hint = "" if debug else f"\nThis is a bug. Run the same command with {DEBUG} to see the traceback."
            raise fail(f"{type(error).__name__}: {error}{hint}", 1) from None


app = typer.Typer(
    cls=Commands,
    help="Gradient compression for PyTorch, TensorFlow and MPI: train, measure, choose a method and look things up.",
    epilog=examples(
        "python -m experiments quickstart --driver ddp — train with and without compression; Horovod is not needed",
        "python -m experiments run quickstart -np 4 — the same under Horovod, on four ranks",
        "hvdcompress methods scalecom — describe one method: the bytes it sends, its options and their values",
        "Exit status: 0 success; 1 a command that was run has failed; 2 wrong argument or file, or a missing package; "
        "130 interrupted by Ctrl-C.",
        'Shell completion: eval "$(hvdcompress completion bash)"',
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Bench(TyperGroup):
    """The commands of ``bench``, with ``exchanges`` as the default: ``bench FILE`` means ``bench exchanges FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if the first argument is not a command."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["exchanges", *args]
        return super().parse_args(ctx, args)


TRAIN = "Train"
MEASURE = "Measure and predict"
LOOK = "Look up, check and write"
benchmarks = typer.Typer(
    cls=Bench,
    no_args_is_help=True,
    help="Measure: `bench CONFIG` times the exchanges of a benchmark file, `bench codec` the computation of one rank.",
)

app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "python -m experiments quickstart --driver ddp", "python -m experiments quickstart --driver horovod -np 4"
    ),
)(training.quickstart)
app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "python -m experiments run quickstart -np 4",
        "python -m experiments run my.yaml --methods none,topk --steps 200",
        "sudo python -m experiments run end_to_end --hosts 4 --rate 100mbit",
    ),
)(training.run)
app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "python -m experiments report runs/quickstart --format csv", "python -m experiments report runs/one runs/other"
    ),
)(training.report)

app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "hvdcompress advise --model my.module:make_model --data my.module:make_batch "
        "--optimizer my.module:make_optimizer --hosts a:1,b:1 --check",
        "horovodrun -np 4 hvdcompress advise --model my.module:make_model --data my.module:make_batch",
        "hvdcompress advise --shapes resnet50 --backward 200ms --link 10gbit,50us --ranks 64",
    ),
)(advise.advise)
app.add_typer(benchmarks, name="bench", rich_help_panel=MEASURE)
benchmarks.command(
    epilog=examples(
        "sudo python -m experiments bench resnet50 --rates 100mbit,1gbit",
        "python -m experiments bench resnet50 --loopback --methods topk --format json",
    )
)(bench.exchanges)
benchmarks.command(
    epilog=examples(
        "python -m experiments bench codec -m topk",
        'python -m experiments bench codec -m "topk density=0.001" --tensors 161',
    )
)(bench.codec)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples("python -m experiments compare gradients.safetensors --methods topk,scalecom"),
)(comparing.compare)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "python -m experiments scale --set resnet50 --rate 100mbit,1gbit --workers 8,64",
        "python -m experiments scale --set 25000000 --rate 1gbit --format json",
    ),
)(comparing.scale)
app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "python -m experiments reproduce gaussiank --quick", "python -m experiments reproduce summary --format markdown"
    ),
)(papers.reproduce)

app.command(
    rich_help_panel=LOOK,
    epilog=examples("hvdcompress methods", "hvdcompress methods topk", "hvdcompress methods --format json"),
)(looking.methods)
app.command(
    rich_help_panel=LOOK, epilog=examples("hvdcompress configs", "hvdcompress configs quickstart --copy my.yaml")
)(looking.configs)
app.command(rich_help_panel=LOOK, epilog=examples("hvdcompress describe checkpoints/step-1000"))(looking.describe)
app.command(rich_help_panel=LOOK, epilog=examples("hvdcompress doctor", "hvdcompress doctor --format json"))(
    looking.doctor
)
app.command(rich_help_panel=LOOK, epilog=examples("hvdcompress new-method my_topk --folder my_topk"))(files.new_method)
app.command(
    rich_help_panel=LOOK,
    epilog=examples('eval "$(hvdcompress completion bash)"', "hvdcompress completion fish | source"),
)(files.completion)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option(DEBUG, envvar="HVDCOMPRESS_DEBUG", help="Show the traceback of an error; may be given anywhere."),
    ] = False,
) -> None:
    if version:
        import hvdcompress

        typer.echo(hvdcompress.__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point of the ``hvdcompress`` command."""
    completion_init()
    try:
        app(prog_name="python -m experiments")
    except BrokenPipeError:
        # The reader of a pipe has closed it, as head does. Without this, the interpreter reports the error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
