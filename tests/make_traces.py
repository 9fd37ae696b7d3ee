"""Record what each driver sends and returns: ``tests/golden/traces.json``; see ``promises/traces.py``.

python -m tests.make_traces              # or some drivers: mpi ddp
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tests import ROOT
from tests.launching import launch
from tests.promises import PROMISES, keep
from tests.promises.drivers.loopback import in_threads
from tests.promises.traces import FILE, RECORD

SCRIPT = ROOT / "tests" / "launched" / "run_promises.py"
NAME = "traces_are_those_that_were_recorded"
LAUNCHES = {"torch": "mpi-2", "ddp": "torchrun-2", "tensorflow": "mpi-2", "mpi": "mpirun-2"}


def record(driver: str, folder: Path) -> None:
    """Run a driver's two ranks, which write into a folder."""
    if driver == "loopback":
        os.environ[RECORD] = str(folder)
        in_threads(2, 0, folder, lambda one: keep(PROMISES[NAME], one))
        return
    names = [NAME, "traces_of_a_sharded_net"] if driver == "ddp" else [NAME]
    done = launch(
        LAUNCHES[driver], SCRIPT, str(folder), *names, seconds=300, DRIVER=driver,
        **{RECORD: str(folder)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])


def main(drivers: list[str]) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for driver in drivers or ["loopback", *LAUNCHES]:
        with tempfile.TemporaryDirectory() as folder:
            record(driver, Path(folder))
            for name in [driver, "fsdp"] if driver == "ddp" else [driver]:
                files = [Path(folder, f"{name}-{rank}.json") for rank in range(2)]
                recorded[name] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        print(f"{driver}: {len(recorded[driver][0])} traces")
        FILE.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
