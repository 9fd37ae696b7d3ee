"""Time GradiVeQ around the pipelined ring, compared with a dense one: on emulated hosts, or over shared memory.

:func:`timed` starts ranks under mpirun, which run this module; they time in turns, on the layers of a net,

* rings without GradiVeQ, with values as they are or quantized: dense steps;
* rings of compressed steps (``experiments/ring``, the paper's Algorithm 1), with fp32 or quantized values;
* the fit of all bases, which the ranks share.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cluster import launcher
from experiments.cluster.hosts import Hosts
from experiments.ring.algorithm import ring_allreduce
from experiments.ring.codecs import Dense, Projection, Recoded, SegmentCodec
from hvdcompress.method import Context, TensorSpec
from hvdcompress.methods.gradiveq import GradiVeQ
from hvdcompress.ops import fast
from hvdcompress.parts import codecs

Array = np.ndarray[Any, Any]
MODULE = "experiments.reproduce.gradiveq_ring"
Contenders = Mapping[str, tuple[float, str]]  #: elements per value of GradiVeQ (0: none), and the values' format
PATIENCE = 240  #: seconds for all ranks of one measurement


def ring_codecs(contenders: Contenders, spec: TensorSpec, ctx: Context) -> dict[str, SegmentCodec]:
    """The codecs of a layer, by contender; bases are random, as their values do not change the time."""
    found: dict[str, SegmentCodec] = {}
    for name, (rate, values) in contenders.items():
        codec = codecs.codec(values)
        if not rate:
            found[name] = Dense() if values == "fp32" else Recoded(codec, ctx)
            continue
        method = GradiVeQ(min_rate=rate)
        size, d = method.slice_of(spec), method.max_components(spec)
        vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((size, d)))[0].T
        projection = Projection(np.ascontiguousarray(vectors, np.float32), ctx.world_size)
        found[name] = projection if values == "fp32" else Recoded(codec, ctx, projection)
    return found


def fit_seconds(method: GradiVeQ, specs: Sequence[TensorSpec], world_size: int) -> float:
    """Seconds that the busiest rank spends on the bases of all layers; each is one rank's work, by its name.

    Layers of a shape are timed once. The broadcast of the basis is left out: one step in Lt + Lc has it.
    """
    random, known = np.random.default_rng(0), {}  # type: ignore[var-annotated]
    busy = [0.0] * world_size
    for spec in specs:
        size, count, most = method.slice_of(spec), method.num_samples(spec), method.max_components(spec)
        if (size, count) not in known:
            samples = random.standard_normal(count * size).astype(np.float32)
            began = time.perf_counter()
            _, weights = fast.principal(samples, count, 1, most, method.lam, method.mean)
            mixed = fast.combine(weights[: most * count], samples, count, method.mean)
            fast.orthonormalise(mixed, most)
            known[size, count] = time.perf_counter() - began
        busy[zlib.crc32(spec.name.encode()) % world_size] += known[size, count]
    return max(busy)


def rank_main(settings: Mapping[str, Any]) -> None:
    """One rank: every ring in turns; rank 0 prints what was found as a line of JSON."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    specs = [TensorSpec(f"layer {place}", tuple(shape)) for place, shape in enumerate(settings["layers"])]
    random = np.random.default_rng([settings["seed"], comm.rank])
    xs = [random.standard_normal(spec.size).astype(np.float32) for spec in specs]
    turns = [Context(comm.rank, comm.size, 0, spec, settings["seed"]) for spec in specs]
    layers = [ring_codecs(settings["contenders"], ctx.spec, ctx) for ctx in turns]
    seconds: dict[str, list[float]] = {name: [] for name in settings["contenders"]}
    sent: dict[str, int] = {}
    for number in range(settings["rounds"] + 1):
        for name, times in seconds.items():
            comm.Barrier()
            began = time.monotonic()  # one clock for all ranks: their hosts are on one machine
            sums = [ring_allreduce(x, layer[name], comm) for x, layer in zip(xs, layers, strict=True)]
            took = comm.allreduce(time.monotonic(), MPI.MAX) - comm.allreduce(began, MPI.MIN)
            sent[name] = sum(one.sent for one in sums)
            if number:  # in the first round connections are made and kernels compiled
                times.append(took)
    comm.Barrier()
    if comm.rank == 0:
        fit = fit_seconds(GradiVeQ(), specs, comm.size)
        codec = codec_seconds(xs, layers)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        elements = sum(spec.size for spec in specs)
        found = {"seconds": medians, "sent": sent, "fit": fit, "codec": codec, "elements": elements}
        print(json.dumps(found), flush=True)
    comm.Barrier()


def codec_seconds(xs: Sequence[Array], layers: Sequence[Mapping[str, SegmentCodec]]) -> dict[str, float]:
    """Seconds of one rank's codec in a step, without any network: each element is prepared, added and decoded once."""

    def work(name: str) -> None:
        for x, each in zip(xs, layers, strict=True):
            codec = each[name]
            own = codec.prepare(x, 0)
            codec.decode(codec.add(codec.add(None, own, 0), own, 1), 0, len(x))

    return {name: _least_of_three(work, name) for name in layers[0]}


def _least_of_three(work: Callable[[str], None], name: str) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        work(name)
        found.append(time.perf_counter() - began)
    return min(found)


def timed(
    layers: Sequence[Sequence[int]],
    ranks: int,
    rate: str | None,
    seed: int,
    rounds: int,
    contenders: dict[str, Sequence[Any]],
) -> dict[str, Any]:
    """Time the rings of some layers on so many ranks.

    Args:
        layers: the shapes of their weights.
        ranks: processes; with a rate, each on an emulated host.
        rate: of the links, such as "100mbit"; None for shared memory.
        seed: of the vectors.
        rounds: timed rounds of all rings in turns, after one that is not timed.
        contenders: the rings, see :data:`Contenders`.

    Returns:
        ``seconds``: of one step of each ring, medians over rounds; ``sent``: bytes that a rank sends in it; ``fit``:
        seconds of the fit with the method's defaults; ``codec``: seconds of the codec alone; ``elements``.

    Raises:
        HostsError: hosts cannot be emulated here.
        RuntimeError: the ranks failed.
    """
    text = json.dumps({"layers": layers, "seed": seed, "rounds": rounds, "contenders": contenders})
    if rate is None:
        return _run(ranks, text, None)
    with Hosts(ranks, rate) as hosts:
        return _run(ranks, text, hosts)


def _run(ranks: int, settings: str, hosts: Hosts | None) -> dict[str, Any]:
    words = [launcher.mpirun() or "mpirun", "-np", str(ranks), "-bind-to", "none"]
    words += ["-H", hosts.slots, "-mca", "pml", "ob1"] if hosts else ["-oversubscribe"]
    words += [sys.executable, "-m", MODULE, settings]
    line = hosts.command(hosts.names[0], *words) if hosts else words
    environment = {**os.environ, **launcher.environment(ranks, hosts)}
    done = subprocess.run(
        line, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    lines = [one for one in done.stdout.splitlines() if one.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"mpirun of {ranks} ranks failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(lines[-1])


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))
