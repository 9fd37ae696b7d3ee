"""What ``docs/build.py`` gives to the template of the page on the cost model."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.cost_model import scale
from experiments.cost_model.fitted import Fitted
from experiments.report import results
from experiments.report.numbers import num_bytes, number, seconds_of

__all__ = ["context"]

DRAWN = ("dense", "fp16", "scalecom 100x", "topk 0.5 %", "gtopk 0.5 %", "powersgd rank 1", "qsgd 4 bits", "signsgd")
SHOWN = (4, 16, 64, 256, 1024)
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
MEANING = {
    "message": "a message that waits for another",
    "link": "time of the bytes on a link without headers, times",
    "byte": "CPU time of a byte",
    "call": "a collective",
    "round": "a round that waits for another",
    "codec": "codec time in one process, times",
}


def context(page: str) -> dict[str, Any]:
    """Return the numbers, tables and the picture of ``docs/templates/scale.md``."""
    resnet = results.load("scale-resnet50")
    fits = {"Horovod": Fitted.open("horovod"), "MPI driver": Fitted.open("mpi4py")}
    drawn = resnet[resnet["method"].isin(DRAWN)]
    return {
        "seconds": scale.draw(drawn.assign(rate=drawn["rate"].map(RATES))),
        "predicted": scale.table(drawn[drawn["workers"].isin(SHOWN)], "1gbit"),
        "constants": _constants(fits),
        "errors": _errors(fits),
        "trained": _trained(),
    }


def _constants(fits: dict[str, Fitted]) -> pd.DataFrame:
    def text(name: str, value: float) -> str:
        if name == "byte":
            return f"{number(1e9 * value)} ns"
        return number(value) if name in ("link", "codec") else seconds_of(value)

    columns = {name: [text(constant, fit.constants[constant]) for constant in MEANING] for name, fit in fits.items()}
    return pd.DataFrame({"of": MEANING.values(), **columns})


def _errors(fits: dict[str, Fitted]) -> pd.DataFrame:
    def text(found: dict[str, Any]) -> str:
        return f"{100 * found['median']:.0f} % (worst {100 * found['worst']:.0f} %)"

    columns = {name: [text(found) for found in fit.held_out.values()] for name, fit in fits.items()}
    return pd.DataFrame({"held out": fits["Horovod"].held_out.keys(), **columns})


def _trained() -> pd.DataFrame:
    frame = results.load("scale-simulated-training")
    frame = frame[frame["workers"] == 64].set_index(["method", "learning_rate"])
    rows = []
    for method in frame.index.unique("method"):
        small, large = (frame.loc[(method, rate)] for rate in (0.1, 0.4))
        accuracies = {
            f"accuracy, learning rate {rate}": f"{row['accuracy']:.1f} ± {row['accuracy_deviation']:.1f} %"
            for rate, row in ((0.1, small), (0.4, large))
        }
        rows.append({"method": method, **accuracies, "on the wire per step": num_bytes(large["on_wire"])})
    return pd.DataFrame(rows)
