"""Change the engine in random places, one at a time, and count how many of the changes the tests notice.

    pip install cosmic-ray
    python tools/mutate.py [--mutants 400] [--seed 0] [--jobs 2] [--out build/mutants.md]

cosmic-ray (https://cosmic-ray.readthedocs.io) makes the changes: comparisons, operators, numbers, booleans, exceptions,
loops. A mutant is killed if a test fails, or if the tests take longer than their time. Positions are drawn evenly;
annotations, assertions and messages are left out, because no behaviour depends on them. Each job works in a clone of
its own, on what is committed.

The tests are those that run in one process and look at the engine: what only a launch of several processes can notice
counts as not noticed.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("hvdcompress/engine", "hvdcompress/parts")
LEFT_OUT = ("telemetry/compiling.py", "safety/peers.py", "safety/watchdog.py")  # threads, sockets and clocks
#: The first ones notice most, and take little time
TESTS = (
    "tests/unit/engine/test_exchange.py tests/unit/engine/test_state.py tests/unit/engine/test_machine.py "
    "'tests/unit/drivers/test_promises.py::test_in_process[threads-2-traces_are_those_that_were_recorded]' "
    "tests/unit/engine tests/unit/parts tests/unit/drivers/test_loopback.py tests/unit/drivers/test_promises.py "
    "tests/unit/methods/test_topk.py tests/unit/methods/test_scalecom.py tests/unit/methods/test_powersgd.py"
)
SECONDS = 150  #: of one mutant's tests; they take half of it
OPERATORS = (
    "AddNot", "ExceptionReplacer", "NumberReplacer", "ReplaceAndWithOr", "ReplaceBinaryOperator",
    "ReplaceBreakWithContinue", "ReplaceComparisonOperator", "ReplaceContinueWithBreak", "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceUnaryOperator", "ZeroIterationForLoop",
)  # fmt: skip


def silent_spans(file: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations, assertions, error messages and ``zip(strict=…)`` begin and end, as (line, column)."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert | ast.Raise):
            nodes.append(node)
        elif isinstance(node, ast.AnnAssign | ast.arg):
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            nodes.append(node.returns)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            nodes.append(node.value)
    there: list[Any] = [node for node in nodes if node is not None]
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in there]


def config(folder: Path) -> Path:
    """Write cosmic-ray's configuration for a clone."""
    modules = sorted(
        str(file.relative_to(folder))
        for module in MODULES
        for file in (folder / module).rglob("*.py")
        if not str(file).endswith(LEFT_OUT) and file.stat().st_size > 200
    )
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider -m 'not slow' {TESTS}"
    file = folder / "mutants.toml"
    lines = ["[cosmic-ray]", f"module-path = {modules}", f"timeout = {SECONDS}.0", "excluded-modules = []"]
    lines += [f'test-command = "{command}"', "[cosmic-ray.distributor]", 'name = "local"']
    file.write_text("\n".join(lines) + "\n")
    return file


def choose(session: Path, folder: Path, mutants: int, seed: int, job: tuple[int, int]) -> int:
    """Leave one job's share of the drawn mutants in a session; returns how many."""
    silent = {file: silent_spans(folder / file) for file in _modules(session)}
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "SELECT job_id, module_path, operator_name, start_pos_row, start_pos_col FROM mutation_specs"
        ).fetchall()
        places: dict[tuple, list[str]] = {}
        for job_id, module, operator, row, column in sorted(rows, key=lambda each: each[1:]):
            family = operator.removeprefix("core/").split("_")[0]
            if family in OPERATORS and not any(start <= (row, column) < end for start, end in silent[module]):
                places.setdefault((module, row, column, family), []).append(job_id)
        draw = random.Random(seed)
        drawn = [draw.choice(places[place]) for place in draw.sample(sorted(places), min(mutants, len(places)))]
        mine = set(drawn[job[0] :: job[1]])
        for table in ("mutation_specs", "work_items"):
            database.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(r[0],) for r in rows if r[0] not in mine])
    return len(mine)


def _modules(session: Path) -> list[str]:
    with sqlite3.connect(session) as database:
        return [row[0] for row in database.execute("SELECT DISTINCT module_path FROM mutation_specs")]


def run(folder: Path, mutants: int, seed: int, job: tuple[int, int]) -> list[tuple[str, str, str, str]]:
    """Run one job's mutants in its clone; returns module, line, operator, outcome and diff of each."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    file = config(folder)
    session = folder / "mutants.sqlite"
    cosmic_ray = shutil.which("cosmic-ray") or str(Path(sys.executable).parent / "cosmic-ray")
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    subprocess.run([cosmic_ray, "init", str(file), str(session)], cwd=folder, check=True, env=environment)
    if job[0] == 0:  # without a change all tests pass, or every mutant would count as killed
        subprocess.run([cosmic_ray, "baseline", str(file)], cwd=folder, check=True, env=environment)
    count = choose(session, folder, mutants, seed, job)
    print(f"job {job[0]}: {count} mutants", flush=True)
    subprocess.run([cosmic_ray, "exec", str(file), str(session)], cwd=folder, check=True, env=environment)
    with sqlite3.connect(session) as database:
        return database.execute(
            "SELECT module_path, start_pos_row, operator_name, test_outcome, diff FROM work_results "
            "JOIN mutation_specs USING (job_id)"
        ).fetchall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.md")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        jobs = [
            pool.submit(run, Path(folder) / f"job{job}", given.mutants, given.seed, (job, given.jobs))
            for job in range(given.jobs)
        ]
        found = [row for job in jobs for row in job.result()]
    survivors = sorted(row for row in found if row[3].lower().endswith("survived"))
    killed = len(found) - len(survivors)
    head = f"{killed} of {len(found)} mutants killed ({100 * killed / max(len(found), 1):.1f} %), seed {given.seed}"
    lines = [f"# {head}", ""]
    for module, line, operator, _, diff in survivors:
        lines += [f"## {module}:{line} {operator}", "", "```diff", diff.strip(), "```", ""]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines), encoding="utf-8")
    print(f"{head}, {(time.monotonic() - began) / 60:.0f} minutes; survivors are in {given.out}")


if __name__ == "__main__":
    main()
