"""The record of a launch (``launch.json``): command, commit, machine, and the link that the ranks use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cluster.hosts import Hosts
from experiments.cluster.launcher import LaunchError, shown
from experiments.cluster.rates import speed


def link(controller: str, hosts: Hosts | None = None) -> str:
    """The name of what the ranks' bytes go over."""
    return str(hosts or ("shared memory" if controller == "mpi" else "TCP on the loopback interface"))


def check_link(folder: Path, now: str) -> None:
    """Refuse to resume over another link than before: figures of both would be in one table.

    Raises:
        LaunchError: the links differ; the message names both.
    """
    file = folder / "launch.json"
    before = json.loads(file.read_text(encoding="utf-8")).get("link", now) if file.exists() else now
    if before != now:
        raise LaunchError(
            f"{shown(folder)} holds results measured over {before}; these would go over {now}. "
            "Give another --out, or the same link."
        )


def notes(line: Sequence[str], controller: str, hosts: Hosts | None = None) -> dict[str, Any]:
    """Record a launch: command, commit, machine, link.

    Args:
        line: the command line.
        controller: Horovod's, "mpi" or "gloo".
        hosts: emulated hosts, up; their links are measured, which takes two seconds.

    Returns:
        Plain data for ``launch.json``. ``commit`` is that of the sources the package lies in, None for an installed
        one; ``reached`` is what each link carried.
    """
    here = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            line = ["git", "-C", str(here.parent), *words]
            done = subprocess.run(line, capture_output=True, text=True, timeout=10)
            return done.stdout.strip() if done.returncode == 0 else None
        return None

    cpu = ""
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else ""
    # an installed package is not tracked: a repository around its environment is another project's
    commit = git("rev-parse", "HEAD") if git("ls-files", "--error-unmatch", here.name) else None
    status = git("status", "--porcelain", "--untracked-files=no") if commit else None
    machine = {"cores": os.cpu_count(), "cpu": cpu, "system": sys.platform}
    return {
        "command": shlex.join(line),
        "commit": commit,
        "dirty": bool(status) if commit else None,
        "machine": machine,
        "link": link(controller, hosts),
        **({"reached": [speed(bits) for bits in hosts.measure()]} if hosts else {}),
    }
