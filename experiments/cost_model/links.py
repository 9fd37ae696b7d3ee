"""Time MPI's bare all-reduce, all-gather and all-to-all over emulated hosts, for `python -m experiments scale --fit`.

    python -m experiments.cost_model.links

Needs root and iproute2. Writes ``runs/links.json``: a record per collective, size and rate, with the median of its
times, each from the first rank's beginning to the last one's end. Two hosts, as on fewer cores than hosts times would
show how the scheduler switches between them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from experiments.cluster import launch
from experiments.cost_model import model
from experiments.cost_model.fitted import sharing
from experiments.cost_model.imagined import Request
from experiments.report import results
from hvdcompress.cli.numbers import bits_of

MODULE = "experiments.cost_model.links"
COLLECTIVES = {"AllReduce": "Allreduce", "AllGather": "Allgather", "AllToAll": "Alltoall"}  #: and MPI's names
# Bytes that a rank passes: so few that only the latency counts, or so many that only the link does. In between they fit
# in the buffers of sockets and token buckets, which a whole exchange overflows.
SIZES = (8, 16, 32, 1 << 19, 1 << 21, 1 << 23)
HOSTS, RATES = 2, ("100mbit", "1gbit")
REPEATS, AT_MOST = 9, 1.0  # times that each is measured, or seconds


def rank_main() -> None:
    """Run one rank: all sizes. Rank 0 prints a line of JSON for each."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    p = comm.size
    for collective, name in COLLECTIVES.items():
        call = getattr(comm, name)
        for size in SIZES:
            payload = np.zeros(-(-size // (4 * p)) * p, np.float32)  # a whole piece for each rank
            out = np.zeros(len(payload) * (p if collective == "AllGather" else 1), np.float32)
            times: list[float] = []
            call(payload, out)  # connections are made at first use
            while len(times) < REPEATS and (len(times) < 3 or sum(times) < AT_MOST):
                comm.Barrier()
                began = time.monotonic()  # one clock for all ranks: their hosts are on one machine
                call(payload, out)
                took = comm.allreduce(time.monotonic(), MPI.MAX) - comm.allreduce(began, MPI.MIN)
                times.append(comm.bcast(took))
            if comm.rank == 0:
                found = {"collective": collective, "size": size, "seconds": statistics.median(times)}
                print(json.dumps(found), flush=True)


def measure(rate: str) -> list[dict[str, Any]]:
    """Measure over links of a rate; returns a record per collective and size.

    Raises:
        HostsError: the hosts could not be set up.
        LaunchError: a rank failed.
    """
    printed = launch.records(["-m", MODULE, "rank"], HOSTS, "mpi", rate=rate)
    place = {"set": "mpi", "rate": bits_of(rate), "shared": sharing(HOSTS)}
    records = []
    for one in printed:
        request = Request.of(one["collective"], "float32", one["size"], HOSTS)
        work = model.work_of([(0, [request])], HOSTS)._replace(calls=0, rounds=0)  # which are a driver's
        label = f"MPI {one['collective']} {one['size']} B"
        records.append({"label": label, **place, "seconds": one["seconds"], **work._asdict()})
    return records


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        print(f"written: {results.save('links', [one for rate in RATES for one in measure(rate)], Path('runs'))}")
