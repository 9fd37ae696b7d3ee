"""Record what each driver sends and returns: ``tests/golden/traces.json``; see ``drivers/promises/traces.py``.

python tests/make_traces.py              # or some drivers: mpi ddp
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "drivers")]

from doors.loopback import in_threads  # noqa: E402
from launching import launch  # noqa: E402
from promises import PROMISES, keep  # noqa: E402
from promises.traces import FILE, RECORD  # noqa: E402

NAME = "traces_are_those_that_were_recorded"
LAUNCHES = {"torch": "mpi-2", "ddp": "torchrun-2", "tensorflow": "mpi-2", "mpi": "mpirun-2"}


def record(door: str, folder: Path) -> None:
    """Run a door's two ranks, which write into a folder."""
    if door == "loopback":
        os.environ[RECORD] = str(folder)
        in_threads(2, folder, lambda one: keep(PROMISES[NAME], one))
        return
    names = [NAME, "traces_of_a_sharded_net"] if door == "ddp" else [NAME]
    done = launch(
        LAUNCHES[door], HERE / "drivers" / "run_door.py", str(folder), *names, seconds=300, DOOR=door,
        **{RECORD: str(folder)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])


def main(doors: list[str]) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for door in doors or ["loopback", *LAUNCHES]:
        with tempfile.TemporaryDirectory() as folder:
            record(door, Path(folder))
            for name in [door, "fsdp"] if door == "ddp" else [door]:
                files = [Path(folder, f"{name}-{rank}.json") for rank in range(2)]
                recorded[name] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        print(f"{door}: {len(recorded[door][0])} traces")
        FILE.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
