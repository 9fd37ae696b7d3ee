"""What two corrections changed, on the same saved gradients: Gaussian-k's `refine: paper`, and `compare`'s error.

    for seed in 0 1 2; do
      python -m experiments.training.save_gradients runs/seed$seed.safetensors --steps 600 --window 25 --seed $seed
    done
    python tools/before_after.py runs/seed?.safetensors

*refine: paper*: elements above the threshold, in units of k = 1 % of n, of gradient + residual of rank 0, all tensors
together, top-k being sent; medians over steps, then over files (least to largest). Before, the third change of the
threshold had an effect, which it has not in the authors' code. *compare*: the error of GradiVeQ with the paper's
settings, Lt 20 and Lc 80; before, that of the last step alone was shown.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from experiments import compare
from experiments.configfile import MethodEntry
from experiments.output.table import Column, Table
from experiments.reproduce.rows import spread
from hvdcompress.ops import fast
from hvdcompress.parts import candidates, select

DENSITY = 0.01


def counts(gradients: compare.Gradients) -> dict[str, float]:
    """Elements beyond the paper's threshold in units of k, before and after its third change: medians over steps."""
    found: dict[str, list[float]] = {"before": [], "after": []}
    residual = np.float32(0)
    for ranks in gradients:
        x = residual + np.concatenate([array.ravel() for array in ranks[0].values()])
        wanted = select.gaussiank_limits(DENSITY, len(x))
        start = np.float32(select.gaussian_threshold(*fast.moments(x), DENSITY))
        threshold, _ = select.refine_paper(candidates.Elements(x, None, None, fast), start, wanted)
        count = fast.count_above(x, threshold)
        found["after"].append(count / wanted.k)
        third = 0.5 if count < wanted.least else 1.5 if count > wanted.most else 1.0
        found["before"].append(fast.count_above(x, np.float32(threshold * third)) / wanted.k)
        residual = x.copy()
        residual[np.argpartition(np.abs(x), -wanted.k)[-wanted.k :]] = 0
    return {name: statistics.median(each) for name, each in found.items()}


def errors(gradients: compare.Gradients) -> dict[str, float]:
    """The error of GradiVeQ with the paper's settings: of the last step, and the median over steps."""
    entry = {"method": "gradiveq", "paper": True, "dense_steps": 20, "compressed_steps": 80}
    outcome = compare.measure(MethodEntry.model_validate({"label": "gradiveq", **entry}), gradients)
    middle = outcome.one_exchange
    assert middle is not None, "some steps are compressed"
    return {"before": outcome.errors[-1], "after": middle.median}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    data = [compare.load(file) for file in parser.parse_args().files]
    rows: list[dict[str, Any]] = []
    for what, measure in (("refine: paper, count/k", counts), ("compare, gradiveq paper, ‖ĝ − ḡ‖/‖ḡ‖", errors)):
        found = [measure(gradients) for gradients in data]
        rows.append({"what": what} | {key: spread([one[key] for one in found]) for key in ("before", "after")})
    columns = [Column[Any]("what", "what", lambda row: row["what"], align="left")]
    columns += [Column[Any](key, key, lambda row, key=key: row[key]) for key in ("before", "after")]  # type: ignore[misc]
    print(Table(columns, rows).markdown())


if __name__ == "__main__":
    main()
