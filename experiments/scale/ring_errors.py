"""How errors grow around a ring whose segments are decoded, added to and encoded again, and by other routes.

``python -m experiments.scale.ring_errors`` prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console

from experiments.output.table import Column, Table
from experiments.scale.ring import Recoded, segments, simulate
from hvdcompress import registry
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import fast
from hvdcompress.parts import codecs
from hvdcompress.parts.sums import Codec, Quantizer


class Growth(NamedTuple):
    """‖sum − exact sum‖ / ‖exact sum‖ of one codec on ``world_size`` ranks, by three routes (see ``parts/sums.py``)."""

    codec: str
    world_size: int
    gather: float
    scatter: float
    ring: float


COLUMNS: tuple[Column[Growth], ...] = (
    Column("codec", "codec", lambda row: row.codec, align="left"),
    Column("ranks", "ranks", lambda row: str(row.world_size), lambda row: row.world_size),
    Column("gather", "gather", lambda row: f"{row.gather:.2%}", lambda row: row.gather),
    Column("scatter", "scatter", lambda row: f"{row.scatter:.2%}", lambda row: row.scatter),
    Column("ring", "ring", lambda row: f"{row.ring:.2%}", lambda row: row.ring),
)


def error_growth(
    codecs: Mapping[str, Codec], world_sizes: Iterable[int], n: int = 65536, seed: int = 0
) -> list[Growth]:
    """The errors of each codec in each world, on n values per rank from a normal distribution."""
    rows, world_sizes = [], list(world_sizes)
    for name, codec in codecs.items():
        for world_size in world_sizes:
            rng = np.random.default_rng([seed, world_size])
            xs = [rng.standard_normal(n, np.float32) for _ in range(world_size)]
            exact = np.sum(xs, axis=0, dtype=np.float64)
            turns = [Context(rank, world_size, 0, TensorSpec("ring", (n,)), seed) for rank in range(world_size)]
            once = [
                codec.decode(codec.encode(x, ctx, Workspace(fast)), n, fast) for x, ctx in zip(xs, turns, strict=True)
            ]
            gathered = fast.add_all(once)
            twice = [
                codec.decode(codec.encode(gathered[a:b], ctx, Workspace(fast), stream=world_size), b - a, fast)
                for ctx, (a, b) in zip(turns, segments(n, world_size), strict=True)
                if b > a
            ]
            rung = simulate(xs, [Recoded(codec, ctx) for ctx in turns])[0].total
            sums = (gathered, np.concatenate(twice), rung)
            errors = [float(np.linalg.norm(total - exact) / np.linalg.norm(exact)) for total in sums]
            rows.append(Growth(name, world_size, *errors))
    return rows


def known_codecs() -> dict[str, Codec]:
    """Codecs of values by their names, and of the methods that are a quantizer."""
    names = ("fp16", "bf16", "rangefloat12", "rangefloat8", "qsgd8", "qsgd4")
    methods = ((id, registry.get(id)) for id in registry.available())
    others = {id: one.codec for id, one in methods if isinstance(one, Quantizer)}
    return {**{name: codecs.codec(name) for name in names}, **others}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of errors."""
    about = "How errors grow around a ring."
    parser = argparse.ArgumentParser(prog="python -m experiments.scale.ring_errors", description=about)
    parser.add_argument("--world-sizes", default="2,4,8,16,32", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=65536, help="of each rank's vector (default: %(default)s)")
    given = parser.parse_args(arguments)
    rows = error_growth(known_codecs(), map(int, given.world_sizes.split(",")), given.elements)
    Table(COLUMNS, rows).show(Console())


if __name__ == "__main__":
    main()
