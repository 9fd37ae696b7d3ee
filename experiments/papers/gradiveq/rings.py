"""Time GradiVeQ around the pipelined ring of ``experiments.ring``; the ranks of :func:`timed` run this file."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cluster import launch
from experiments.ring.algorithm import ring_allreduce
from experiments.ring.codecs import Dense, Projection, Recoded, SegmentCodec
from hvdcompress.method import Context, TensorSpec
from hvdcompress.methods.gradiveq import GradiVeQ
from hvdcompress.ops import fast
from hvdcompress.parts import codecs

PATIENCE = 240  #: seconds for all ranks of one measurement


def timed(
    layers: Sequence[Sequence[int]],
    ranks: int,
    rate: str | None,
    seed: int,
    rings: Mapping[str, tuple[float, str]],
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """Time rings of dense and of compressed steps (the paper's Algorithm 1) in random turns, one ring per layer.

    Args:
        layers: the shapes of their weights.
        ranks: processes; with a rate, each on an emulated host.
        rate: of the links, such as "100mbit"; None for shared memory.
        seed: of the vectors.
        rings: by name, elements per component of GradiVeQ (0: dense steps), and the number format of the values.
        rounds: timed rounds of all rings, after one that is not timed.

    Returns:
        A record per ``ring``: ``seconds`` of a step, the median of rounds; ``sent``, bytes that a rank sends in it;
        ``fit``, seconds that the busiest rank needs for all bases.

    Raises:
        HostsError: hosts cannot be emulated here.
        LaunchError: a rank failed.
    """
    program = (
        "-m",
        "experiments.papers.gradiveq.rings",
        json.dumps({"layers": layers, "seed": seed, "rounds": rounds, "rings": rings}),
    )
    return launch.records(program, ranks, "mpi", rate=rate, timeout=PATIENCE)


def run_rank(layers: Sequence[Sequence[int]], seed: int, rounds: int, rings: Mapping[str, tuple[float, str]]) -> None:
    """Run one rank; rank 0 prints the records of :func:`timed`."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    specs = [TensorSpec(f"layer {place}", tuple(shape)) for place, shape in enumerate(layers)]
    rng = np.random.default_rng([seed, comm.rank])
    xs = [rng.standard_normal(spec.size).astype(np.float32) for spec in specs]
    turns = [Context(comm.rank, comm.size, 0, spec, seed) for spec in specs]
    made = {name: [codec_of(*ring, ctx) for ctx in turns] for name, ring in rings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in rings}
    sent: dict[str, int] = {}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(rings), len(rings)):  # the same order on all ranks
            comm.Barrier()
            began = time.perf_counter()
            sums = [ring_allreduce(x, codec, comm) for x, codec in zip(xs, made[name], strict=True)]
            took = comm.allreduce(time.perf_counter() - began, MPI.MAX)
            sent[name] = sum(each.sent for each in sums)
            if number:  # in the first round connections are made and kernels are compiled
                seconds[name].append(took)
    if comm.rank == 0:
        fit = fit_seconds(GradiVeQ(), specs, comm.size)
        for name, each in seconds.items():
            record = {"ring": name, "seconds": statistics.median(each), "sent": sent[name], "fit": fit}
            print(json.dumps(record), flush=True)
    comm.Barrier()


def codec_of(ratio: float, values: str, ctx: Context) -> SegmentCodec:
    """Return a ring's codec of one layer. The basis is random, as its values do not change the time."""
    codec = codecs.codec(values)
    if not ratio:
        return Dense() if values == "fp32" else Recoded(codec, ctx)
    method = GradiVeQ(min_rate=ratio)
    size, d = method.slice_of(ctx.spec), method.max_components(ctx.spec)
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((size, d)))[0].T
    projection = Projection(np.ascontiguousarray(vectors, np.float32), ctx.world_size)
    return projection if values == "fp32" else Recoded(codec, ctx, projection)


def fit_seconds(method: GradiVeQ, specs: Sequence[TensorSpec], world_size: int) -> float:
    """Return the seconds of the busiest rank, if each layer's basis is fitted by one rank, chosen by its name."""
    rng = np.random.default_rng(0)
    known: dict[tuple[int, int], float] = {}
    busy = [0.0] * world_size
    for spec in specs:
        size, count, most = method.slice_of(spec), method.num_samples(spec), method.max_components(spec)
        if (size, count) not in known:
            samples = rng.standard_normal(count * size).astype(np.float32)
            began = time.perf_counter()
            _, weights = fast.principal(samples, count, 1, most, method.lam, method.mean)
            fast.orthonormalise(fast.combine(weights[: most * count], samples, count, method.mean), most)
            known[size, count] = time.perf_counter() - began
        busy[zlib.crc32(spec.name.encode()) % world_size] += known[size, count]
    return max(busy)


if __name__ == "__main__":
    run_rank(**json.loads(sys.argv[1]))
