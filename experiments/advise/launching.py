"""Start ranks that measure for ``hvdcompress advise``, and hear what they found."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from experiments.advise.job import Found, Job
from experiments.cluster import launcher
from experiments.cluster.hosts import Hosts
from experiments.output import jsonl

__all__ = ["launch"]

MODULE = "experiments.advise.ranks"
PATIENCE = 1800.0  # seconds without a word from the ranks


def launch(
    job: Job, ranks: int, hosts: Hosts | str | None, say: Callable[[str], None], folder: Path | None = None
) -> list[Found]:
    """Let ranks measure: Horovod's, or on this machine torchrun's where there is no Horovod.

    Args:
        job: what.
        ranks: how many.
        hosts: emulated hosts that are up, real ones as horovodrun's -H takes them, or None for this machine.
        say: called with what they are doing.
        folder: keeps the log; a temporary one without it.

    Raises:
        LaunchError: the ranks could not be started, or ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="hvdc-") as temporary:
        at = folder or Path(temporary)
        file, out, log = Path(temporary) / "job.json", Path(temporary) / "out.jsonl", at / "log.txt"
        job.save(file)
        emulated = hosts if isinstance(hosts, Hosts) else None
        controller = "mpi" if hosts or launcher.has_horovod() else "ddp"
        line = launcher.command(ranks, controller, "-m", MODULE, str(file), str(out), hosts=emulated)
        if isinstance(hosts, str):
            line[line.index("--mpi") + 1 : line.index("--mpi") + 1] = ["-H", hosts]
        found: list[Found] = []
        follow = jsonl.Follower(out)
        with launcher.Ranks(line, ranks, log, emulated) as running:
            heard = time.monotonic()
            while len(found) < len(job.workloads):
                ended = running.process.poll() is not None
                for record in follow():
                    heard = time.monotonic()
                    if "say" in record:
                        say(record["say"])
                    else:
                        found.append(Found.from_dict(record))
                if len(found) < len(job.workloads) and (ended or time.monotonic() > heard + PATIENCE):
                    raise launcher.LaunchError(f"the ranks ended without a result\n{launcher.tail(log)}")
                time.sleep(0.1)
            deadline = time.monotonic() + 10
            while running.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        return found
