"""How rounding errors grow with the number of ranks, by three routes to the sum of encoded vectors.

*gather*: every rank gets all payloads and decodes them: one rounding. *scatter*: shards of the sum are encoded once
more: two roundings. *ring*: decoded, added to and encoded again at every hop: p roundings.

    python -m experiments.ring.errors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.report import plots, results, tables
from experiments.ring.algorithm import segments, simulate
from experiments.ring.codecs import Recoded
from hvdcompress import registry
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import fast
from hvdcompress.parts import codecs
from hvdcompress.parts.sums import Codec, Quantizer


def known_codecs() -> dict[str, Codec]:
    """Return number formats by name, and the codecs of methods that consist of one, such as TernGrad."""
    formats = {name: codecs.codec(name) for name in ("fp16", "bf16", "rangefloat12", "rangefloat8", "qsgd8", "qsgd4")}
    methods = {id: registry.get(id) for id in registry.available() if id != "qsgd"}
    return {**formats, **{id: each.codec for id, each in methods.items() if isinstance(each, Quantizer)}}


def error_growth(
    formats: Mapping[str, Codec], world_sizes: Iterable[int], n: int = 65536, seed: int = 0
) -> pd.DataFrame:
    """Return ‖sum − exact sum‖/‖exact sum‖ of codecs, by number of ranks; each rank has n normal elements.

    Returns:
        Columns ``codec``, ``ranks``, ``gather``, ``scatter``, ``ring``.
    """
    rows = []
    for p in world_sizes:
        rng = np.random.default_rng([seed, p])
        xs = [rng.standard_normal(n, np.float32) for _ in range(p)]
        exact = np.sum(xs, axis=0, dtype=np.float64)
        turns = [Context(rank, p, 0, TensorSpec("ring", (n,)), seed) for rank in range(p)]
        for name, codec in formats.items():

            def rounded(x: np.ndarray, ctx: Context, stream: int = 0, codec: Codec = codec) -> np.ndarray:
                return codec.decode(codec.encode(x, ctx, Workspace(fast), stream=stream), len(x), fast)

            gathered = fast.add_all([rounded(x, ctx) for x, ctx in zip(xs, turns, strict=True)])
            shards = [rounded(gathered[a:b], turns[r], stream=p) for r, (a, b) in enumerate(segments(n, p))]
            around = simulate(xs, [Recoded(codec, ctx) for ctx in turns])[0].total
            sums = dict(zip(("gather", "scatter", "ring"), (gathered, np.concatenate(shards), around), strict=True))
            errors = {route: np.linalg.norm(total - exact) / np.linalg.norm(exact) for route, total in sums.items()}
            rows.append({"codec": name, "ranks": p, **errors})
    return pd.DataFrame(rows)


def percent(error: float) -> str:
    """Return ``0.26 %``."""
    return f"{100 * error:.2f} %"


def main() -> None:
    """Print the table of errors; write it to ``runs/ring`` as JSON and as a plot."""
    world_sizes = [2, 4, 8, 16, 32]
    frame = error_growth(known_codecs(), world_sizes).sort_values("codec", kind="stable")
    print(tables.markdown(frame, gather=percent, scatter=percent, ring=percent))
    results.save("ring-errors", frame, Path("runs/ring"), command="python -m experiments.ring.errors")

    def decorate(ax: plots.Axes, _: pd.DataFrame) -> None:
        ax.set(xscale="log", xticks=world_sizes, xticklabels=world_sizes, ylim=(0, None), ylabel="relative error")
        ax.minorticks_off()

    drawn = plots.lines(frame.melt(["codec", "ranks"]), "ranks", "value", "variable", panel="codec", decorate=decorate)
    plots.save(drawn, Path("runs/ring/ring-errors.svg"))


if __name__ == "__main__":
    main()
