"""Variables of "Coming from another library": what other libraries call a method, from ``peers.yaml``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from pages import gap_cell

from experiments.momentum import report as study
from experiments.report import results

DATA = Path(__file__).with_suffix(".yaml")


def peers() -> list[dict[str, Any]]:
    """Return the peers with their methods; the keys are explained in the file."""
    found: list[dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return found


def migrate(page: str) -> dict[str, Any]:
    """Return a table per peer, which versions the tables are of, and gaps of signs with AdamW, by form."""
    tables = {
        one["peer"]: pd.DataFrame([{one["peer"]: theirs(row), "here": ours(row)} for row in one["methods"]])
        for one in peers()
    }
    found = study.summary(results.load("methods-accuracy")).set_index("contender")
    gaps = {form: gap_cell(found.loc[f"onebit_adam:{form}"]) for form in ("cancelled", "plain")}
    return {"peers": tables, "read": ", ".join(one["read"] for one in peers()), "onebit": gaps}


def theirs(row: dict[str, Any]) -> str:
    """Return the peer's name of a method."""
    return f"`{row['theirs']}`"


def ours(row: dict[str, Any]) -> str:
    """Return the plan here, or the class, or why there is none."""
    if "missing" in row:
        return f"not available: {row['missing']}"
    if "python" in row:
        found = f"[`{row['python'].rpartition('.')[2]}`](local-steps.md)"
    else:
        method, *options = (f"{key}: {json.dumps(value)}" for key, value in row["plan"].items())
        found = ", ".join(f"`{word}`".replace('"', "") for word in (method.removeprefix("method: "), *options))
    return f"{found}; {row['differs']}" if "differs" in row else found
