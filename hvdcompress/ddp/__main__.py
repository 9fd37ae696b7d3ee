"""Compress the DDP models of an unchanged training script: ``torchrun -m hvdcompress.ddp --plan plan.yaml train.py``.

    torchrun --nproc-per-node 2 -m hvdcompress.ddp --plan plan.yaml train.py --epochs 3
    torchrun --nproc-per-node 2 -m hvdcompress.ddp --method scalecom --set density=0.01 train.py --epochs 3
    torchrun --nproc-per-node 2 -m hvdcompress.ddp --method fp16 -m package.train --epochs 3

The script runs in this process as ``__main__``, with its own ``sys.argv`` and its own folder in ``sys.path``, as with
``python train.py``. Meanwhile ``DistributedDataParallel.__init__`` is patched: it also calls
:func:`hvdcompress.ddp.attach`. So every DDP module is compressed from its first step on, including instances of
subclasses and modules that a framework makes. If ``attach`` refuses a module, the script's line that makes the module
raises the error. Processes that the script starts itself (``torch.multiprocessing.spawn``) are not compressed.

Rank 0 prints the plan on stderr and, at the end, the bytes that compression saved.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdcompress.ddp.attach import attach
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.launchers import is_first
from hvdcompress.plan import Plan, load_plan, plan_of, settings_of


@contextlib.contextmanager
def every_module(plan: Plan) -> Iterator[list[Ledger]]:
    """Context manager that attaches a Compressor to each ``DistributedDataParallel`` module when it is constructed.

    Args:
        plan: the plan of every Compressor.

    Yields:
        The ledgers of the Compressors so far; the list grows. A Compressor lives as long as its module.
    """
    ledgers: list[Ledger] = []
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        compressor = attach(self, plan)
        ledgers.append(compressor.ledger)
        _print(f"compressing {type(self.module).__name__}\n{compressor.describe()}")

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    try:
        yield ledgers
    finally:
        DistributedDataParallel.__init__ = original  # type: ignore[method-assign]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a training script with its DDP models compressed.

    Args:
        arguments: the command-line arguments (default: ``sys.argv[1:]``).
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        source = load_plan(options.plan) if options.plan else options.method
        plan = plan_of(source, **settings_of(options.set))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    program = options.module or options.script
    if not program:
        parser.error("no script: give its path after the options")
    with every_module(plan) as ledgers:
        try:
            _run(program, is_module=bool(options.module))
        except SystemExit as end:
            if end.code:
                raise
            _print_savings(program[0], ledgers)
            raise
    _print_savings(program[0], ledgers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdcompress.ddp",
        allow_abbrev=False,
        description="Run a training script with every DistributedDataParallel module compressed.",
        epilog="Launch it like the script itself: torchrun … -m hvdcompress.ddp --plan plan.yaml train.py ARGUMENT…",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", metavar="FILE", help="a plan, as a YAML file")
    source.add_argument("--method", metavar="ID", help="a method id, instead of a plan")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the plan or method, such as density=0.01; may be repeated",
    )
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, help="run this module instead of a script; the last option")
    parser.add_argument("script", nargs=rest, help="the script and its own arguments")
    return parser


def _run(program: Sequence[str], is_module: bool) -> None:
    """Run a script or module with its arguments, in the way ``python`` runs it."""
    sys.argv = list(program)
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _print_savings(name: str, ledgers: Sequence[Ledger]) -> None:
    """Print how many bytes compression has saved on this rank; warn if the script made no DDP module."""
    if not ledgers:
        _print(
            f"warning: {name} has made no DistributedDataParallel module in this process, so nothing was compressed. "
            "Processes that the script starts itself are not compressed: start them with torchrun"
        )
    for ledger in ledgers:
        if ledger.steps:
            sent = ledger.bytes_sent() / ledger.steps
            dense = ledger.dense_bytes() / ledger.steps
            ratio = ledger.compression_ratio()
            _print(f"{ledger.steps} steps, {sent:,.0f} bytes per step instead of {dense:,.0f}: {ratio:.3g}x less")


def _print(text: str) -> None:
    """Print a line on stderr, on rank 0 only."""
    if is_first():
        print(f"hvdcompress: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
