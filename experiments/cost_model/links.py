"""Time MPI's bare all-reduce, all-gather and all-to-all over emulated hosts, for `python -m experiments scale --fit`.

    python -m experiments.cost_model.links [--hosts 2] [--rates 100mbit,1gbit] [--out runs]

Needs root and iproute2. Writes ``links.json``: a record per collective, size, rate and number of hosts, with the median
of its times, each from the first rank's beginning to the last one's end. With more hosts than cores, times show how the
scheduler switches between them: the fit leaves them out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from experiments.cluster import launch
from experiments.cluster.hosts import Hosts
from experiments.cluster.rates import Rate
from experiments.cost_model import model
from experiments.cost_model.fitted import sharing
from experiments.cost_model.imagined import Request
from experiments.report import results

MODULE = "experiments.cost_model.links"
COLLECTIVES = ("AllReduce", "AllGather", "AllToAll")
# Bytes that a rank passes: so few that only the latency counts, or so many that only the link does. In between they fit
# in the buffers of sockets and token buckets, which a whole exchange overflows.
SIZES = (8, 16, 32, 1 << 19, 1 << 21, 1 << 23)
LONGEST = 4.0  # seconds for one collective; larger ones are left out
REPEATS, AT_MOST = 9, 1.0  # times that each is measured, or seconds


def rank_main(rate: float, cores: int) -> None:
    """Run one rank: all sizes. Rank 0 prints a record in JSON for each."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    p = comm.size
    calls: dict[str, Any] = {"AllReduce": comm.Allreduce, "AllGather": comm.Allgather, "AllToAll": comm.Alltoall}
    for collective in COLLECTIVES:
        for size in SIZES:
            wire = model.on_wire(Request(collective, "sum", "float32", size), p)
            if 8 * wire / rate > LONGEST:
                continue
            payload = np.zeros(-(-size // (4 * p)) * p, np.float32)  # a whole piece for each rank
            out = np.zeros(len(payload) * (p if collective == "AllGather" else 1), np.float32)
            times: list[float] = []
            calls[collective](payload, out)  # connections are made at first use
            while len(times) < REPEATS and (len(times) < 3 or sum(times) < AT_MOST):
                comm.Barrier()
                began = time.monotonic()  # one clock for all ranks: their hosts are on one machine
                calls[collective](payload, out)
                took = comm.allreduce(time.monotonic(), MPI.MAX) - comm.allreduce(began, MPI.MIN)
                times.append(comm.bcast(took))
            if comm.rank == 0:
                work = model.Work(p, size, wire, wire, 0, 0, model.messages(collective, [size], p))
                place = {"label": f"MPI {collective} {size} B", "set": "mpi", "rate": rate, "shared": sharing(p, cores)}
                print(json.dumps({**place, "seconds": statistics.median(times), **work._asdict()}), flush=True)


def measure(count: int, rate: str) -> list[dict[str, Any]]:
    """Measure among so many emulated hosts; returns a record per collective and size.

    Raises:
        HostsError: the hosts could not be set up.
        LaunchError: a rank failed.
    """
    with Hosts(count, rate) as hosts:
        # A host sees only its share of the cores
        words = ["--rank", str(Rate.parse(rate).slower), "--cores", str(len(os.sched_getaffinity(0)))]
        printed = launch.run(["-m", MODULE, *words], count, "mpi", hosts=hosts)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", default="2")
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--rank", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank, given.cores)
        return
    counts = [int(count) for count in given.hosts.split(",")]
    records = [one for rate in given.rates.split(",") for count in counts for one in measure(count, rate)]
    print(f"written: {results.save('links', records, given.out)}")


if __name__ == "__main__":
    main()
