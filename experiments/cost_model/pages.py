"""What ``docs/build.py`` gives to the template of the page on the cost model."""

from __future__ import annotations

from typing import Any

from experiments.cluster.rates import title
from experiments.cost_model import scale
from experiments.cost_model.fitted import Fitted
from experiments.report import results

DRAWN = ["dense", "fp16", "scalecom 100x", "topk 0.5 %", "gtopk 0.5 %", "oktopk 0.5 %", "arctopk 0.5 %"]
DRAWN += ["powersgd rank 1", "qsgd 4 bits", "signsgd"]
SHOWN = (4, 16, 64, 256, 1024)


def context(page: str) -> dict[str, Any]:
    """Return the numbers, tables and the picture of ``docs/templates/scale.md``."""
    resnet = results.load("scale-resnet50")
    fits = {"Horovod": Fitted.open("horovod"), "MPI driver": Fitted.open("mpi4py")}
    drawn = resnet[resnet["method"].isin(DRAWN)]
    return {
        "seconds": scale.draw(drawn.assign(levels=1, rate=drawn["rate"].map(title))),
        "predicted": scale.table(drawn[drawn["workers"].isin(SHOWN)], "1gbit"),
        "errors": scale.errors(fits),
    }
