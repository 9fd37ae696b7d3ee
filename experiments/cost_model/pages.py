"""What ``docs/build.py`` gives to the template of the page on the cost model."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.cluster.rates import title
from experiments.cost_model import scale
from experiments.cost_model.fitted import Fitted
from experiments.report import results
from experiments.report.numbers import num_bytes, number, seconds_of

DRAWN = ["dense", "fp16", "scalecom 100x", "topk 0.5 %", "gtopk 0.5 %", "oktopk 0.5 %", "arctopk 0.5 %"]
DRAWN += ["powersgd rank 1", "qsgd 4 bits", "signsgd"]
SHOWN = (4, 16, 64, 256, 1024)
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
        "seconds": scale.draw(drawn.assign(levels=1, rate=drawn["rate"].map(title))),
        "predicted": scale.table(drawn[drawn["workers"].isin(SHOWN)], "1gbit"),
        "constants": _constants(fits),
        "errors": scale.errors(fits),
        "trained": _trained(),
    }


def _constants(fits: dict[str, Fitted]) -> pd.DataFrame:
    forms = dict.fromkeys(("link", "codec"), number) | {"byte": lambda seconds: f"{number(1e9 * seconds)} ns"}
    columns = {name: [forms.get(one, seconds_of)(fit.constants[one]) for one in MEANING] for name, fit in fits.items()}
    return pd.DataFrame({"of": MEANING.values(), **columns})


def _trained() -> pd.DataFrame:
    frame = results.load("scale-simulated-training")
    frame = frame[(frame["workers"] == 64) & frame["learning_rate"].isin([0.1, 0.4])]
    texts = frame["accuracy"].map("{:.1f} ± ".format) + frame["accuracy_deviation"].map("{:.1f} %".format)
    wide = frame.assign(text=texts).pivot_table("text", "method", "learning_rate", "first", sort=False)
    wide.columns = [f"accuracy, learning rate {rate}" for rate in wide]
    sent = frame[frame["learning_rate"] == 0.4].set_index("method")["on_wire"].map(num_bytes)
    return wide.assign(**{"on the wire per step": sent}).reset_index()
