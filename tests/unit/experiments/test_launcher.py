"""Ranks that ``hvdcompress`` has started, when it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from experiments.cluster.launcher import Ranks
ranks = Ranks(["sleep", "60"], 1, Path(sys.argv[1]))
print(ranks.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_ranks_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    line = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as command:
        assert command.stdout
        child = psutil.Process(int(command.stdout.readline()))
        command.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
        left = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        if left:
            child.kill()
        assert not left, "it runs on"
