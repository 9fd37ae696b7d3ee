"""Kernels are compiled once per host, cached on disk, and compiled before the first step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hvdcompress.loopback import Loopback, warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.ops.numba import ops as numba_ops
from hvdcompress.ops.numba._kernels import compiling
from hvdcompress.ops.numba._kernels.compiling import LOCKS
from hvdcompress.ops.numba.sharing import SharedOps
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
RUN = "import kernel; kernel.run()"
RUN_TOGETHER = """
import os, time
import kernel
open(f"ready{os.getpid()}", "w").close()
while len([name for name in os.listdir() if name.startswith("ready")]) < 2:
    time.sleep(0.001)
kernel.run()
"""
HOLD_LOCK = """
import time
from hvdcompress.ops.numba._kernels.compiling import LOCKS
with LOCKS.compiling():
    LOCKS.acquire({folder!r}, {name!r})
    print("held", flush=True)
    time.sleep(60)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a process in a temporary folder that has ``kernel.py``, a kernel that has never been compiled."""
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)

    def process(code: str, **variables: str) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-c", code], subprocess.PIPE
        variables = environment | variables
        return subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=pipe, stderr=pipe, text=True)

    return process


def result(process: subprocess.Popen[str]) -> tuple[int, int, str, str]:
    """Return how often the kernel was compiled and loaded, the folder of its cache, and the log."""
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    compiled, loaded, folder = out.split()
    return int(compiled), int(loaded), folder, log


@contextmanager
def lock_held(process: subprocess.Popen[str]) -> Iterator[None]:
    """Wait until a process holds its lock, and kill it at the end."""
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_one_process_compiles_and_the_others_load(start: Start, tmp_path: Path) -> None:
    found = sorted(map(result, [start(RUN_TOGETHER), start(RUN_TOGETHER)]))
    cache = str(tmp_path / "__pycache__")
    assert [each[:3] for each in found] == [(0, 1, cache), (1, 0, cache)]


def test_the_next_process_compiles_if_the_first_was_killed(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "__pycache__"
    folder.mkdir()
    name = result(start("import kernel; kernel.name()"))[2]
    with lock_held(start(HOLD_LOCK.format(folder=str(folder), name=name))):
        waiting = start(RUN)
        time.sleep(2)
        assert waiting.poll() is None, "it compiles while another process holds the lock"
    assert result(waiting)[:2] == (1, 0)


def test_a_cache_that_is_not_writable_is_replaced_by_a_temporary_folder(start: Start, tmp_path: Path) -> None:
    result(start(RUN))
    (tmp_path / "__pycache__").rename(tmp_path / "installed")
    for file in ("__pycache__", "home"):  # a file is no folder, not even for root
        (tmp_path / file).touch()
    for number, (code, folder, expected) in enumerate(
        [
            (RUN, "tmp", (1, 0)),
            (RUN, "tmp", (0, 1)),
            ("import kernel; kernel.run('installed')", "other", (0, 1)),  # copies the cache of the package
        ]
    ):
        temporary = tmp_path / folder
        temporary.mkdir(exist_ok=True)
        *counts, cache, log = result(start(code, HOME="home", XDG_CACHE_HOME="home", TMPDIR=str(temporary)))
        assert tuple(counts) == expected, number
        assert cache.startswith(str(temporary / "hvdcompress-")) and log.count(str(temporary)) == 1
        assert [each.stat().st_mode & 0o077 for each in temporary.iterdir()] == [0]


def test_an_op_that_another_process_compiles_is_numpys_meanwhile(start: Start) -> None:
    x = np.linspace(-1, 1, 5000, dtype=np.float32)
    ops = SharedOps()
    with lock_held(start(HOLD_LOCK.format(folder=compiling.folder(), name="op top_k"))):
        assert ops.max_abs(x) == 1 and not ops.skipped
        index = ops.top_k(x, 50)
        assert ops.skipped
        np.testing.assert_array_equal(index, numba_ops.top_k(x, 50))


@pytest.mark.parametrize("id", ["auto", "powersgd", "topk", "scalecom", "fp16"])
def test_steps_compile_nothing_after_warm_up(id: str) -> None:
    plan, random = plan_of(id), np.random.default_rng(1)
    shapes = {"a": (64, 3, 3, 3), "b": (64, 64, 3, 3), "c": (600, 512), "d": (10, 512), "e": (10,)}
    warm_up(plan, [TensorSpec(name, shape) for name, shape in shapes.items()], IN_ORDER)
    before = LOCKS.seconds
    net = Loopback(plan, world_size=3, grouping=IN_ORDER)
    for _ in range(4):
        given = [{n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(3)]
        reduced = net.allreduce(given)[0]
        with net.adapted({name: array.copy() for name, array in reduced.items()}, reduced, momentum=0.9):
            pass
    assert LOCKS.seconds == before
