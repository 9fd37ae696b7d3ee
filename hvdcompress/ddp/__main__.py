"""``torchrun -m hvdcompress.ddp --plan plan.yaml train.py``: compress a script that is not touched.

    torchrun --nproc-per-node 2 -m hvdcompress.ddp --plan plan.yaml train.py --epochs 3
    torchrun --nproc-per-node 2 -m hvdcompress.ddp --method scalecom --set density=0.01 train.py --epochs 3
    torchrun --nproc-per-node 2 -m hvdcompress.ddp --method fp16 -m package.train --epochs 3

The script runs in this process as ``__main__``, with its own ``sys.argv`` and its own folder in ``sys.path``, as under
``python``. While it runs, ``DistributedDataParallel.__init__`` is a function that calls PyTorch's and then
:func:`hvdcompress.ddp.attach`, so that every such module is compressed from its first step on: the script's, those of
its subclasses, and those that a framework makes for it. What ``attach`` refuses is an error in the script's line that
makes the module. Processes that the script starts by itself (``torch.multiprocessing.spawn``) are not reached.

Rank 0 says on stderr what it does, and at the end what that saved, or that there was nothing to compress.
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
from hvdcompress.plan import Plan, load, plan_of, settings_of


@contextlib.contextmanager
def every_module(plan: Plan) -> Iterator[list[Ledger]]:
    """Inside, each ``DistributedDataParallel`` that is made is attached to.

    Yields:
        The ledgers of their Compressors; it grows. A module's Compressor lives as long as the module.
    """
    ledgers: list[Ledger] = []
    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        compressor = attach(self, plan)
        ledgers.append(compressor.ledger)
        _say(f"compressing {type(self.module).__name__}\n{compressor.describe()}")

    DistributedDataParallel.__init__ = init
    try:
        yield ledgers
    finally:
        DistributedDataParallel.__init__ = plain


def main(line: Sequence[str] | None = None) -> None:
    """Run a script whose modules are compressed; ``line``: the arguments (default: the command's)."""
    parser = _parser()
    asked = parser.parse_args(line)
    if bool(asked.plan) == bool(asked.method):
        parser.error("give --plan FILE, or --method ID")
    try:
        source = load(asked.plan) if asked.plan else asked.method
        plan = plan_of(source, **settings_of(asked.set))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    program = asked.module or asked.script
    if not program:
        parser.error("which script? give its path, after the options")
    with every_module(plan) as ledgers:
        try:
            _run(program, is_module=bool(asked.module))
        except SystemExit as end:
            if end.code:
                raise
            _conclude(program[0], ledgers)
            raise
    _conclude(program[0], ledgers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdcompress.ddp",
        allow_abbrev=False,
        description="Run a training script with every DistributedDataParallel module compressed.",
        epilog="Launch it as the script itself: torchrun … -m hvdcompress.ddp --plan plan.yaml train.py ARGUMENT…",
    )
    parser.add_argument("--plan", metavar="FILE", help="the plan, a YAML file")
    parser.add_argument("--method", metavar="ID", help="a method instead of a plan")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of it, such as density=0.01; repeat"
    )
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, help="run this module instead of a script; the last option")
    parser.add_argument("script", nargs=rest, help="the script, and its own arguments")
    return parser


def _run(program: Sequence[str], is_module: bool) -> None:
    """Run a script, or a module, with its arguments, as ``python`` would."""
    sys.argv = list(program)
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _conclude(name: str, ledgers: Sequence[Ledger]) -> None:
    """Say what compression has saved on this rank; warn if there was nothing to compress."""
    if not ledgers:
        _say(
            f"warning: {name} has made no DistributedDataParallel module in this process, so nothing was compressed. "
            "Processes that it starts itself are not reached: start them by torchrun"
        )
    for ledger in ledgers:
        if ledger.steps:
            sent = ledger.bytes_sent() / ledger.steps
            dense = ledger.dense_bytes() / ledger.steps
            ratio = ledger.compression_ratio()
            _say(f"{ledger.steps} steps, {sent:,.0f} bytes per step instead of {dense:,.0f}: {ratio:.3g}x less")


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"hvdcompress: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
