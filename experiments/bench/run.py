"""``python -m experiments bench``: from a checked benchmark to its files, with progress on the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from experiments.bench import files, report, results
from experiments.bench.config import Bench, read_turns
from experiments.bench.devices import device
from experiments.bench.measure import measure
from experiments.cluster import launcher, notes
from experiments.cluster.hosts import HostsError
from experiments.cluster.launcher import shown
from experiments.cluster.stopping import Stopped, stoppable
from experiments.output.console import console_of
from experiments.output.table import Format
from experiments.report import numbers


def prepare(folder: Path, bench: Bench, loopback: bool, resume: bool) -> None:
    """Make a benchmark's folder ready: empty, or with the turns of an earlier attempt.

    Args:
        folder: made if it does not exist.
        bench: what is to be measured; its configuration is written there.
        loopback: measure without emulated hosts.
        resume: keep the turns that were taken, and their configuration.

    Raises:
        ValueError: they were taken with other settings or over another link.
    """
    if not resume and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    if resume and config.exists():
        before, now = Bench.open(config).model_dump(), bench.model_dump()
        entries = {entry["label"]: entry for kind in ("sets", "methods") for entry in before[kind]}
        link = "hosts", "slow", "delay", "awake", "pin", "device", "repeats", "seconds"
        changed = [key for key in link if before[key] != now[key]]
        changed += [e["label"] for kind in ("sets", "methods") for e in now[kind] if entries.get(e["label"], e) != e]
        if changed:
            raise ValueError(
                f"{folder} was measured with another {', '.join(changed)}: resume with the same, or leave out --resume"
            )
        if any((turn["rate"] == "loopback") != loopback for turn in read_turns(folder)):
            raise ValueError(f"{folder} was measured {'on emulated hosts' if loopback else 'with --loopback'}")
        bench.joined(Bench.open(config)).save(config)
        return
    bench.save(config)


@contextlib.contextmanager
def _alone_here(wait: Callable[[], None]) -> Iterator[None]:
    """Inside, no other benchmark runs on this machine: two of them would measure each other."""
    path = Path(tempfile.gettempdir()) / "hvdcompress-bench.lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("a"))
        except OSError:  # another user's: this benchmark runs at the same time
            yield
            return
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait()
                time.sleep(1)
        yield


def run(bench: Bench, folder: Path, loopback: bool, console: Console, form: str = Format.text) -> int:
    """Measure what is missing, and write table and page; other forms than "text" have the tables alone on the console.

    Returns:
        The exit status: 0; 1 if something failed; 128 plus the signal's number if it was stopped by one.
    """
    tables, console = console, console if form == Format.text else console_of(stderr=True)
    line = ["python", "-m", "experiments", *sys.argv[1:]]
    here = notes.notes(line, "mpi")
    here.pop("link")
    if bench.device == "cuda":
        here["machine"]["gpu"] = str(device("cuda"))
    file = folder / "launch.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    total = bench.rounds * len(bench.sets) * len(bench.contenders()) * (1 if loopback else len(bench.rates))
    console.print(f"[bold]{escape(bench.name)}[/]: {total} turns → {shown(folder)}", highlight=False)
    rates = ["loopback"] if loopback else bench.rates
    wanted = {turn.key for turn in bench.turns(rates)}
    taken = {(t["rate"], t["set"], t["contender"], t["round"]) for t in read_turns(folder) if "failed" not in t}
    code, links, done = 0, list(before.get("links", [])), len(wanted & taken)
    began = time.monotonic()
    earlier = before.get("earlier", [])
    if before:
        earlier.append({key: before[key] for key in ("command", "commit", "dirty", "machine") if key in before})

    def note(link: dict[str, Any]) -> None:
        links.append(link)
        said = {**here, "links": links, **({"earlier": earlier} if earlier else {})}
        file.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

    with console.status("starting …") as status:

        def say(text: str, result: dict[str, Any] | None) -> None:
            nonlocal done
            if result is None:
                status.update(f"{done} of {total}, {numbers.clock(time.monotonic() - began)}: {escape(text)} …")
                return
            done += 1
            if "failed" in result:
                words = f"[red]failed: {escape(result['failed'])}[/]"
            else:
                words = ", ".join(numbers.seconds_of(one["seconds"]) for one in result["exchanges"])
            console.print(f"[dim]{escape(text)}:[/] {words}", highlight=False, soft_wrap=True)

        try:
            with stoppable(), _alone_here(lambda: status.update("waiting for another benchmark to end …")):
                measure(bench, folder, loopback, say, note)
        except (HostsError, launcher.LaunchError) as error:
            code = 1
            console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        except Stopped as stopped:
            code = stopped.code
            console.print("[yellow]stopped: ranks and hosts are gone[/]; --resume goes on")
    publish(folder, tables, form)
    failed = sum("failed" in turn for turn in read_turns(folder))
    if failed and not code:
        code = 1
        log = shown(folder / "log.txt")
        console.print(f"[red]{failed} of {total} turns failed[/]; the log: {log}. --resume tries them again.")
    return code


def publish(folder: Path, console: Console, form: str = Format.text) -> None:
    """Show the tables, and write the files.

    Raises:
        ValueError: the folder holds no benchmark.
    """
    result = results.read(folder)
    report.show(result, console, form)
    with contextlib.suppress(KeyboardInterrupt):
        written = files.write(result, folder)
        if form != Format.text:
            return
        console.print(f"written: {', '.join(shown(file) for file in written)}", highlight=False, soft_wrap=True)
