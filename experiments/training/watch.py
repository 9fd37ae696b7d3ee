"""Progress of a training: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from experiments.output.jsonl import Follower
from experiments.report.numbers import clock, num_bytes, rate_of, seconds_of
from experiments.training.experiment import Run

PLAIN_INTERVAL = 15.0  # seconds between lines where there is no terminal


class Watch:
    """Follows the runs' event files and shows their progress."""

    def __init__(self, runs: Sequence[Run], folder: Path, console: Console, verbose: bool = False):
        self.runs, self.console = list(runs), console
        self.followers = {run.id: Follower(folder / "metrics" / f"{run.id}.jsonl") for run in runs}
        self.log = folder / "log.txt" if verbose else None
        self.log_offset = 0
        self.events: dict[str, dict[str, dict[str, Any]]] = {run.id: {} for run in runs}  # last one of each kind
        self.state = "starting"
        self.began = self.phase_began = self.last_line = time.monotonic()
        self.silent = True  # what an earlier launch finished is not announced again
        self.poll()
        self.silent = False

    # -- what launch.follow asks -----------------------------------------------------------------

    def ended(self, run: Run) -> bool:
        """Whether the run has a result, good or bad."""
        return bool({"finished", "failed"} & set(self.events[run.id]))

    def begun(self, run: Run) -> bool:
        """Whether the run has begun."""
        return bool(self.events[run.id])

    def launching(self, ranks: int) -> None:
        """A launcher is about to start."""
        self._phase(f"starting {ranks} ranks: each loads its framework (10 s or more)")

    def poll(self) -> None:
        """Read what is new and show it."""
        for run in self.runs:
            if not self.ended(run):
                for event in self.followers[run.id]():
                    self._on(run, event)
        if self.log:
            self._show_log(self.log)
        if not self.console.is_terminal and time.monotonic() - self.last_line > PLAIN_INTERVAL:
            self._line(self._status())

    # -- events ----------------------------------------------------------------------------------

    def _on(self, run: Run, event: dict[str, Any]) -> None:
        kind = event.get("event", "")
        if kind in self.events[run.id] and kind == "failed":  # the first rank's error is the cause
            return
        self.events[run.id][kind] = event
        if self.silent:
            return
        if kind == "start":
            self._phase("first step")
            if not self.console.is_terminal:
                self._line(f"{self._place(run)}  {event.get('describe', '').splitlines()[0]}")
        elif kind == "finished":
            self._phase("preparing the next run" if not all(map(self.ended, self.runs)) else "the ranks are ending")
            self._line(f"[green]✓[/] {self._place(run)}  {self._outcome(run)}")
        elif kind == "failed":
            self._phase("preparing the next run")
            self._line(f"[red]✗[/] {self._place(run)}  [red]{escape(event['error'])}[/]")
            for line in event.get("traceback", "").strip().splitlines()[-4:-1]:
                self._line(f"    [dim]{escape(line)}[/]")

    def _phase(self, text: str) -> None:
        self.state, self.phase_began = text, time.monotonic()

    def _line(self, text: str) -> None:
        self.last_line = time.monotonic()
        self.console.print(text, highlight=False, soft_wrap=True)

    def _show_log(self, log: Path) -> None:
        with log.open("rb") if log.exists() else nullcontext() as stream:
            if stream:
                stream.seek(self.log_offset)
                text = stream.read()
                self.log_offset += len(text)
                for line in text.decode(errors="replace").splitlines():
                    self.console.print(f"[dim]│ {escape(line)}[/]", highlight=False, soft_wrap=True)

    # -- text ------------------------------------------------------------------------------------

    def _place(self, run: Run) -> str:
        number, width = self.runs.index(run) + 1, len(str(len(self.runs)))
        names = max(len(r.method.label) for r in self.runs)
        tasks = max(len(r.task.label) for r in self.runs)
        seed = f" seed {run.seed}" if len({r.seed for r in self.runs}) > 1 else ""
        return (
            f"{number:{width}}/{len(self.runs)} {escape(f'{run.task.label:{tasks}} {run.method.label:{names}}')}{seed}"
        )

    def _outcome(self, run: Run) -> str:
        end = self.events[run.id]["finished"]
        metric, ranks = end["metric"], end["ranks"]
        sent = sum(ranks["bytes_sent"])
        rate = sum(ranks["dense_bytes"]) / sent if sent else float("nan")
        step = seconds_of(sum(ranks["total_seconds"]) / len(ranks["total_seconds"]))
        value = f"{metric['value']:.2f} {metric['unit']}"
        return f"{value:>10} {rate_of(rate):>8}  {step:>8}/step  {end['seconds']:5.1f} s"

    def current(self) -> Run | None:
        """The run that is under way."""
        return next((run for run in self.runs if self.begun(run) and not self.ended(run)), None)

    def _status(self) -> str:
        run = self.current()
        step = self.events[run.id].get("step") if run else None
        if run is None or step is None:
            what = f"{self._place(run)}  {self.state}" if run else self.state
            return f"{what} … {clock(time.monotonic() - self.phase_began)}"
        sent, seconds = step["bytes_sent"], max(step["seconds"], 1e-9)
        return (
            f"{self._place(run)}  step {step['step']}/{run.task.steps}  loss {step['loss']:.3f}  "
            f"sent {num_bytes(sent)} ({num_bytes(sent / seconds)}/s)"
        )

    # -- the live line ---------------------------------------------------------------------------

    def live(self) -> AbstractContextManager[Any]:
        """Shows a live line on a terminal; elsewhere nothing."""
        self.spinner = Spinner("dots")
        if not self.console.is_terminal:
            return nullcontext()
        return Live(self, console=self.console, refresh_per_second=8, transient=True)

    def __rich__(self) -> RenderableType:
        run = self.current()
        step = self.events[run.id].get("step") if run else None
        done = sum(map(self.ended, self.runs))
        share = done + (step["step"] / run.task.steps if run and step else 0)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            self.spinner,
            ProgressBar(total=len(self.runs), completed=share, width=24),
            Text(f"{clock(time.monotonic() - self.began)}   {done} of {len(self.runs)} runs done", style="dim"),
        )
        return Group(Text.from_markup("  " + self._status()), grid)
