"""Time MPI's bare all-reduce, all-gather and all-to-all over emulated hosts, for `python -m experiments scale --fit`.

    python -m experiments.scale.links runs/links.jsonl [--hosts 2] [--rates 100mbit,1gbit] [--seconds 1]

With more hosts than processors, times show how the scheduler switches between them: the fit leaves them out.
Needs root and iproute2. Each line of the file is a ``Point`` of ``cost.py``: a collective of one size among so many
hosts, and the median of its times, each from the first rank's beginning to the last one's end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.cluster import launcher, notes
from experiments.cluster.hosts import Hosts, HostsError
from experiments.cluster.rates import Rate
from experiments.scale import cost
from experiments.scale.imagined import Asked

MODULE = "experiments.scale.links"
COLLECTIVES = ("AllReduce", "AllGather", "AllToAll")
# Bytes that a rank hands over: so few that only the latency counts, or so many that only the link does. In between
# they sit in sockets' and token buckets' buffers, which a whole exchange overflows.
SIZES = (8, 16, 32, 1 << 19, 1 << 21, 1 << 23)
LONGEST = 4.0  # seconds for one collective; larger ones are left out
REPEATS = 9


def rank_main(rate: float, seconds: float, processors: int) -> None:
    """One rank: all sizes; rank 0 prints a line of JSON each."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    p = comm.size

    def call(collective: str, payload: Any, out: Any) -> None:
        if collective == "AllReduce":
            comm.Allreduce(payload, out)
        elif collective == "AllGather":
            comm.Allgather(payload, out)
        else:
            comm.Alltoall(payload, out)

    for collective in COLLECTIVES:
        for size in SIZES:
            asked = Asked(collective, "sum", "float32", size)
            wire = cost.on_wire(asked, p)
            if 8 * wire / rate > LONGEST:
                continue
            # a whole piece for each rank
            payload = np.zeros(-(-size // (4 * p)) * p, np.float32)
            out = np.zeros(len(payload) * (p if collective == "AllGather" else 1), np.float32)
            times: list[float] = []
            call(collective, payload, out)  # connections are made at first use
            while len(times) < REPEATS and (len(times) < 3 or sum(times) < seconds):
                comm.Barrier()
                began = time.monotonic()  # one clock for all ranks: their hosts are on one machine
                call(collective, payload, out)
                times.append(comm.allreduce(time.monotonic(), MPI.MAX) - comm.allreduce(began, MPI.MIN))
                times[-1] = comm.bcast(times[-1])
            if comm.rank == 0:
                passed = cost.messages(collective, [size], p)
                work = cost.Work(p, size, wire, wire, 0, 0, passed)
                label = f"MPI {collective} {size} B"
                point = cost.Point(label, "mpi", rate, cost.sharing(p, processors), statistics.median(times), work)
                print(json.dumps(point.to_dict()), flush=True)


def measure(count: int, rate: str, seconds: float) -> list[str]:
    """Measure among so many emulated hosts; lines of JSON, a collective each."""
    with Hosts(count, rate) as hosts:
        words = [launcher.mpirun() or "mpirun", "-np", str(count), "-H", hosts.slots]
        words += ["-bind-to", "none", "-mca", "pml", "ob1"]
        words += [sys.executable, "-m", MODULE, "--rank", str(Rate.parse(rate).slower), "--seconds", str(seconds)]
        words += ["--processors", str(len(os.sched_getaffinity(0)))]  # a host sees but its share of them
        line = hosts.command(hosts.names[0], *words)
        environment = {**os.environ, **launcher.environment(count, hosts)}
        done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"mpirun among {count} hosts at {rate} failed")
    return [line for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/links.jsonl"))
    parser.add_argument("--hosts", default="2")
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size, at most")
    parser.add_argument("--rank", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--processors", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank, given.seconds, given.processors)
        return
    here = notes.notes(["python", "-m", MODULE, *sys.argv[1:]], "mpi")
    head = {key: here[key] for key in ("command", "commit", "machine")}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(head) + "\n")
        for rate in given.rates.split(","):
            for count in map(int, given.hosts.split(",")):
                print(f"{count} hosts at {rate} …", flush=True)
                stream.write("\n".join(measure(count, rate, given.seconds)) + "\n")
                stream.flush()


if __name__ == "__main__":
    try:
        main()
    except HostsError as error:
        sys.exit(f"error: {error}")
