"""The commands and their options; an error of a command ends it with one line and an exit status.

Commands import slow modules only when they run, so that ``--help`` is fast.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hvdcompress.cli.console import fail

DEBUG = "--debug"


def examples(*lines: str) -> str:
    """Return the text below the help of a command. Each line is a paragraph, because typer joins the lines of one."""
    return "\n\n".join(["Examples:", *lines])


class Commands(TyperGroup):
    """A group that reports the error of a command in one line; ``--debug`` adds the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere on the command line: move it to the front."""
        rest = [word for word in args if word != DEBUG]
        return super().parse_args(ctx, [DEBUG, *rest] if DEBUG in args else rest)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and report its errors."""
        debug = ctx.params.get("debug")
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            raise fail("interrupted", 130) from None
        except Exception as error:
            module = type(error).__module__
            if module.startswith(("typer", "click")):  # a usage error, which typer reports itself
                raise
            if debug:
                traceback.print_exc()
            if isinstance(error, ModuleNotFoundError):
                package = str(error.name).partition(".")[0]
                extra = ": pip install 'hvdcompress[torch]'" if package == "torch" else ""
                raise fail(f"the package {package} is not installed{extra}") from None
            if isinstance(error, ValueError | OSError):
                raise fail(error) from None
            hint = "" if debug else f"\nThis is a bug. Run the same command with {DEBUG} to see the traceback."
            raise fail(f"{type(error).__name__}: {error}{hint}", 1) from None


FUNCTIONS = "--model mine:make_model --data mine:make_batch --optimizer mine:make_optimizer"
app = typer.Typer(
    cls=Commands,
    help="Check the installation, look up compression methods, and measure whether your training gains by one.",
    epilog=examples(
        "hvdcompress doctor — is everything installed?",
        f"torchrun --nproc-per-node 2 -m hvdcompress advise {FUNCTIONS} — should I compress?",
        "hvdcompress methods scalecom — one method: the bytes it sends, its options and their values",
        "Exit status: 0 success; 1 something does not work; 2 wrong argument or file, missing package; 130 Ctrl-C.",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error; may be given anywhere.")] = False,
) -> None:
    if version:
        import hvdcompress

        typer.echo(hvdcompress.__version__)
        raise typer.Exit


def _known_methods(incomplete: str) -> list[str]:
    from hvdcompress import registry

    return [id for id in ["auto", *registry.available()] if id.startswith(incomplete)]


@app.command(epilog=examples("hvdcompress doctor", "hvdcompress doctor --warm"))
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 120,
    warm: Annotated[bool, typer.Option("--warm", help="Instead, compile the kernels of all methods.")] = False,
) -> None:
    """Check the installation, with all-reduces of two ranks under DDP and Horovod.

    With `--warm`, compile all kernels and store them on disk, so that no training has to: for the build of a container
    image, on the kind of processor that it will run on. Exit status: 0; 1 if something that is installed does not work.
    """
    from hvdcompress.cli import doctor as checks

    checks.warm() if warm else checks.run(timeout)


@app.command(epilog=examples("hvdcompress methods", "hvdcompress methods topk", "hvdcompress methods --json"))
def methods(
    id: Annotated[str | None, typer.Argument(help="Describe this one.", autocompletion=_known_methods)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods with their papers, payloads and defaults; or print the documentation of one."""
    from hvdcompress import registry
    from hvdcompress.cli import catalogue

    if as_json:
        found = catalogue.as_dict(id) if id else [catalogue.as_dict(each) for each in registry.available()]
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    elif id:
        catalogue.describe(id)
    else:
        catalogue.print_methods()


@app.command(epilog=examples("hvdcompress configs", "hvdcompress configs topk > plan.yaml"))
def configs(
    id: Annotated[str | None, typer.Argument(help="A method, or auto.", autocompletion=_known_methods)] = None,
) -> None:
    """Print a plan for a method, to be edited: commented YAML with all its options and their defaults."""
    from hvdcompress import registry
    from hvdcompress.cli import catalogue

    typer.echo(catalogue.config(id) if id else "\n".join(["auto", *registry.available(), ""]), nl=False)


@app.command(epilog=examples("hvdcompress describe checkpoints/step-1000"))
def describe(path: Annotated[Path, typer.Argument(help="A file that Compressor.save wrote, or its folder.")]) -> None:
    """Show what made a saved state: step, ranks, driver, versions, momentum, plan."""
    from hvdcompress.engine.saving import checkpoint

    typer.echo(checkpoint.describe(path), nl=False)


def _function(help: str) -> Any:
    return typer.Option(metavar="MODULE:NAME", help=help, show_default=False)


@app.command(
    epilog=examples(
        f"torchrun --nproc-per-node 2 -m hvdcompress advise {FUNCTIONS}",
        f"horovodrun -np 4 hvdcompress advise {FUNCTIONS} --loss mine:loss --link 1gbit",
    )
)
def advise(
    context: typer.Context,
    model: Annotated[str, _function("A function that returns your torch.nn.Module.")],
    data: Annotated[str, _function("A function that returns this rank's next batch.")],
    loss: Annotated[str | None, _function("The loss of model and batch. Default: cross-entropy of a pair.")] = None,
    optimizer: Annotated[str | None, _function("The optimizer of a model. Default: SGD.")] = None,
    methods: Annotated[str, typer.Option(help="Methods with settings, or files of plans; with commas.")] = (
        "auto, topk density=0.01, powersgd matrix_rank=4, qsgd bits=4, fp16"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender; more give surer verdicts.")] = 4,
    link: Annotated[str | None, typer.Option(metavar="RATE", help="Also predict steps at 100mbit, 1gbit, ….")] = None,
) -> None:
    """Should I compress, and how? Measure it with your model, on ranks that you start like your training.

    Measures real steps of dense training, of your framework's own fp16 and of some methods, in turns. Takes one to
    three minutes. It recommends by step time: read from docs/which-method.md how accurate each method is.
    """
    from hvdcompress.cli.advise import run

    functions = {"--model": model, "--data": data, "--loss": loss, "--optimizer": optimizer}
    given = {option: words for option, words in functions.items() if words}
    debug = bool(context.find_root().params.get("debug"))
    run.advise(given, methods, rounds, link, debug)


def main() -> None:
    """Run the command line."""
    app(prog_name="hvdcompress")
