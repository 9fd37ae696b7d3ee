"""Kernels are compiled once per host, kept on disk, and compiled before the first step."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcompress.loopback import Loopback, warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.ops import numba as numba_ops
from hvdcompress.ops.numba._kernels import compiling
from hvdcompress.ops.numba._kernels.compiling import LOCKS
from hvdcompress.ops.numba.sharing import SharedOps
from hvdcompress.optimizers import SGD
from hvdcompress.plan import IN_ORDER, plan_of

KERNEL = """
import sys, time
from pathlib import Path
import numpy as np
from hvdcompress.ops.numba._kernels import compiling

@compiling.compiled
def doubled(x):
    return 2 * x[0]

def run(folder=""):
    if folder:
        compiling.INSTALLED = Path(folder)
    assert doubled(np.ones(3)) == 2
    stats = doubled.stats
    print(sum(stats.cache_misses.values()), sum(stats.cache_hits.values()), stats.cache_path)

def name():
    print(0, 0, doubled._cache._impl.filename_base)
"""
TOGETHER = """
    import os, time
    import kernel
    open(f"ready{os.getpid()}", "w").close()
    while len([name for name in os.listdir() if name.startswith("ready")]) < 2:
        time.sleep(0.001)
    kernel.run()
"""
HOLD = """
    import time
    from hvdcompress.ops.numba._kernels.compiling import LOCKS
    with LOCKS.compiling():
        LOCKS.acquire({folder!r}, {name!r})
        print("held", flush=True)
        time.sleep(60)
"""


class Processes:
    """Processes in a folder of their own, with a kernel that has never been compiled."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "kernel.py").write_text(KERNEL, encoding="utf-8")
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment.pop("NUMBA_CACHE_DIR", None)

    def start(self, code: str) -> subprocess.Popen[str]:
        """Start a process."""
        line = [sys.executable, "-c", textwrap.dedent(code)]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, cwd=self.folder, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def result(self, process: subprocess.Popen[str]) -> tuple[int, int, str, str]:
        """Return how often the kernel was compiled, and loaded; the folder of its cache; and what was logged."""
        out, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        compiled, loaded, folder = out.split()
        return int(compiled), int(loaded), folder, log


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def test_one_process_compiles_and_the_others_load(processes: Processes) -> None:
    found = [processes.result(process) for process in [processes.start(TOGETHER) for _ in range(2)]]
    assert sorted(each[:2] for each in found) == [(0, 1), (1, 0)]
    assert {each[2] for each in found} == {str(processes.folder / "__pycache__")}


def test_the_next_process_compiles_where_the_first_was_killed(processes: Processes) -> None:
    folder = processes.folder / "__pycache__"
    folder.mkdir()
    name = processes.result(processes.start("import kernel; kernel.name()"))[2]
    holder = processes.start(HOLD.format(folder=str(folder), name=name))
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    waiting = processes.start("import kernel; kernel.run()")
    time.sleep(3)
    assert waiting.poll() is None, "it compiles while another process holds the lock"
    holder.kill()
    holder.communicate()
    assert processes.result(waiting)[:2] == (1, 0)


def test_a_cache_that_cannot_be_written_to_is_replaced_by_a_temporary_folder(processes: Processes) -> None:
    folder = processes.folder
    processes.result(processes.start("import kernel; kernel.run()"))
    (folder / "__pycache__").rename(folder / "installed")
    for file in ("__pycache__", "home"):  # a file is no folder, not even for root
        (folder / file).touch()
    (folder / "tmp").mkdir()
    processes.environment |= {"HOME": "home", "XDG_CACHE_HOME": "home", "TMPDIR": str(folder / "tmp")}
    found = [processes.result(processes.start("import kernel; kernel.run()")) for _ in range(2)]
    assert [each[:2] for each in found] == [(1, 0), (0, 1)]
    for _, _, where, log in found:
        assert where.startswith(str(folder / "tmp" / "hvdcompress-")) and log.count(str(folder / "tmp")) == 1
    assert [each.stat().st_mode & 0o077 for each in (folder / "tmp").iterdir()] == [0]

    (folder / "other").mkdir()
    processes.environment["TMPDIR"] = str(folder / "other")
    compiled, loaded, where, _ = processes.result(processes.start("import kernel; kernel.run('installed')"))
    assert (compiled, loaded) == (0, 1) and where.startswith(str(folder / "other"))


def test_an_op_that_another_process_compiles_is_numpys_meanwhile(processes: Processes) -> None:
    x = np.linspace(-1, 1, 5000, dtype=np.float32)
    ops = SharedOps()
    holder = processes.start(HOLD.format(folder=compiling.folder(), name="op top_k"))
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        assert ops.max_abs(x) == 1 and not ops.skipped
        index = ops.top_k(x, 50)
        assert ops.skipped
        np.testing.assert_array_equal(index, numba_ops.top_k(x, 50))
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize("id", ["auto", "powersgd", "topk", "scalecom", "fp16"])
def test_steps_compile_nothing_after_warm_up(id: str) -> None:
    plan = plan_of(id)
    shapes: dict[str, Any] = {"a": (64, 3, 3, 3), "b": (64, 64, 3, 3), "c": (600, 512), "d": (10, 512), "e": (10,)}
    warm_up(plan, [TensorSpec(name, shape) for name, shape in shapes.items()], IN_ORDER)
    before = LOCKS.seconds
    net = Loopback(plan, world_size=3, grouping=IN_ORDER, optimizer=SGD(momentum=0.9))
    random = np.random.default_rng(1)
    for _ in range(4):
        net.allreduce_many(
            [{n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(3)]
        )
    assert LOCKS.seconds == before
