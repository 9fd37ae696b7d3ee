"""Fuzz every decoder: ``python -m tests.fuzz.fuzz --mutations 1000000 --seed 0 [--only NAME] [--keep]``.

Decoders take turns. A mutation with a new outcome becomes an input of further ones; with ``--keep`` it is also written
to the corpus, which the tests replay. A fault is printed, and its bytes are written to the corpus: exit status 1.

``coverage run -m tests.fuzz.fuzz --mutations 0`` runs the corpus only; ``coverage report`` then shows the lines that it
reaches (``pip install coverage``; code that numba has compiled counts as one call).
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import time
import traceback
from pathlib import Path

from experiments.report import results
from tests.fuzz import corpus
from tests.fuzz.decoders import Decoder, decoders
from tests.fuzz.mutate import mutation

MEMORY = 64 << 20  #: bytes that the process may grow by, whatever it is given
MOST = 400  #: inputs of a decoder


class Run:
    """One decoder's mutations, one after another."""

    def __init__(self, decoder: Decoder, seed: int):
        self.decoder, self.seed, self.count = decoder, seed, 0
        self.inputs = [*decoder.valid, *corpus.kept(decoder.name)]
        self.outcomes = {decoder.outcome(data) for data in self.inputs}

    def next(self) -> bytes | None:
        """Try the next mutation; returns it if its outcome is new.

        Raises:
            Exception: the decoder neither took nor refused it; ``data`` has the bytes.
        """
        self.data = mutation(self.decoder.name, self.seed, self.count, self.inputs)
        self.count += 1
        outcome = self.decoder.outcome(self.data)
        if outcome in self.outcomes:
            return None
        self.outcomes.add(outcome)
        if len(self.inputs) < MOST:
            self.inputs.append(self.data)
        return self.data


def memory() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    """Run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="decoders whose names begin so")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, help="add the figures to this file, as a JSON line")
    asked = parser.parse_args()
    runs = [Run(one, asked.seed) for name, one in decoders().items() if name.startswith(asked.only)]
    began, before, done, new, faults = time.monotonic(), memory(), 0, 0, 0
    while runs and done < asked.mutations:
        for run in list(runs):
            try:
                found = run.next()
            except Exception:
                print(f"{run.decoder.name}, mutation {run.count - 1}: {corpus.keep(run.decoder.name, [run.data])}")
                traceback.print_exc()
                runs.remove(run)  # one is enough: the others would be the same
                faults += 1
                continue
            done += 1
            if found is not None:
                new += 1
                if asked.keep:
                    corpus.keep(run.decoder.name, [found])
    grown = memory() - before
    faults += grown > MEMORY
    record = {
        "command": shlex.join(["python", "-m", "tests.fuzz.fuzz", *sys.argv[1:]]),
        "mutations": done, "decoders": len(runs),
        "outcomes": sum(len(run.outcomes) for run in runs), "new": new, "corpus": corpus.count(),
        "seconds": round(time.monotonic() - began), "grown": grown, "faults": faults,
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if asked.out:
        results.append_line(asked.out, record)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
