"""One rank of a training. ``run.py`` starts all ranks and reads what rank 0 prints: the run's record, a line of JSON.

torchrun --nproc-per-node 2 -m experiments.training.rank '{"driver": "ddp", "task": …, "method": …, "seed": 0}'
"""

from __future__ import annotations

import json
import sys

from experiments.training.experiment import Task
from experiments.training.loop import train
from experiments.training.trainers import Trainer, join


def main() -> None:
    """Train."""
    given = json.loads(sys.argv[1])
    driver, seed = given["driver"], given["seed"]
    ranks = join(driver)
    task = Task.model_validate(given["task"])
    record = train(ranks, task, seed, Trainer(driver, task, given["method"], seed))
    if ranks.rank() == 0:
        print(json.dumps(record), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
