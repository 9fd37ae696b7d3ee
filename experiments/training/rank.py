"""Train the runs of an experiment that have no result yet. Every rank runs this module.

    mpirun -np 2 python -m experiments.training.rank horovod runs/quickstart "shared memory"
    torchrun --nproc-per-node 2 -m experiments.training.rank ddp runs/quickstart TCP

``python -m experiments run`` builds such a line. Rank 0 appends events to ``metrics/RUN.jsonl``; a run whose file ends
with ``finished`` or ``failed`` is not trained again, so the same line takes up where a killed one stopped.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import traceback
from pathlib import Path

import torch

import hvdcompress
from experiments.report import jsonl
from experiments.training.experiment import Experiment
from experiments.training.loop import Diverged, train
from experiments.training.trainers import Trainer, join


def main() -> None:
    """Train what is left."""
    driver, folder, link = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    ranks = join(driver)
    versions = {"python": platform.python_version(), "hvdcompress": hvdcompress.__version__}
    versions["framework"] = f"PyTorch {torch.__version__}"
    runs = Experiment.open(folder / "config.yaml").runs()
    files = {run.id: folder / "metrics" / f"{run.id}.jsonl" for run in runs}
    # Rank 0 decides: files of a shared file system may look older on other hosts.
    ended = [id for id, file in files.items() if any(e["event"] in ("finished", "failed") for e in jsonl.read(file))]
    ended = ranks.allgather_object(ended, name="ended")[0]
    for run in runs:
        if run.id in ended:
            continue
        file = files[run.id]
        try:
            trainer = Trainer(driver, run.task, {"seed": run.seed, **run.method.settings}, run.seed)
            train(ranks, run, trainer, file, launch={"driver": driver, "link": link}, versions=versions)
        except Diverged as error:
            if ranks.rank() == 0:
                jsonl.append(file, {"event": "failed", "error": str(error)})
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            text = f"rank {ranks.rank()}: {type(error).__name__}: {error}"
            jsonl.append(file, {"event": "failed", "error": text, "traceback": traceback.format_exc()})
            # Other ranks may be waiting for this one; the launcher ends them and starts again with the next run.
            os._exit(1)
        gc.collect()  # an optimizer's hooks hold its model
    ranks.shutdown()


if __name__ == "__main__":
    main()
