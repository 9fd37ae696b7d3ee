"""Run by every rank of a launch: ``python -m tests.chaos.rank FOLDER``, with the case in FOLDER.

Each rank writes its process id, and at its end how the training ended (``rank-0.json``), what it gave and received
(``rank-0.npz``), and the same at every save (``sums/``). From this the judge computes what was lost.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.faults import SAVE_EVERY, SHAPES, STEPS, Case
from tests.chaos.inject import Injector
from tests.launched.run_promises import driver_of

LEARNING_RATE = np.float32(0.1)
Arrays = dict[str, np.ndarray]


def main(folder: Path) -> None:
    """Train, with the case's fault if this rank is the victim."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that cannot grow is then an error, as on a full disk
    faulthandler.register(signal.SIGUSR1)  # the launcher asks for stacks if the launch hangs
    case = Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    driver = driver_of(case.driver, folder)
    _write(folder, driver.rank)
    try:
        _train(case, driver, folder)
    except Exception as error:
        _write(folder, driver.rank, ended="error", error=f"{type(error).__name__}: {error}")
        raise


def _train(case: Case, driver: Any, folder: Path) -> None:
    injector = Injector(case, driver.rank, folder)
    shapes, settings = injector.before_training()
    handle = driver.make(case.method, settings, shapes)
    parameters: Arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    given, received = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    done, failed = 0, -2
    for step in range(STEPS):
        gradients = injector.gradients(step, _gradients([case.seed, driver.rank, step], driver.rank, parameters))
        with injector.in_step(step):
            try:
                reduced = handle.reduce(gradients)
            except Exception as error:
                if not case.catches or type(error).__name__ == "PeerLost" or failed == step - 1:
                    raise  # after a second failure in a row, others would follow
                failed = step
                continue
            finite = [name for name, array in reduced.items() if np.isfinite(array).all()]
            if len(finite) < len(reduced) and not driver.by_tensor:
                continue  # skip the step, as a loss scaler does
            injector.optimizer()
            for name in finite:
                parameters[name] -= LEARNING_RATE * reduced[name]
        done += 1
        for name in finite:
            given[name] += gradients[name]
            received[name] += reduced[name]
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            (folder / "sums").mkdir(exist_ok=True)
            _save(folder / "sums" / f"{done}-{driver.rank}", given=given, received=received)
            with injector.in_save(step):
                try:
                    handle.save(folder / "state")
                except OSError:
                    if not case.catches:
                        raise
    residuals = {name: handle.residual(name) for name in SHAPES}
    _save(folder / f"rank-{driver.rank}", given=given, received=received, residual=residuals)
    digest = hashlib.sha256(b"".join(parameters[name].tobytes() for name in SHAPES)).hexdigest()
    _write(folder, driver.rank, ended="done", done=done, digest=digest)


def _gradients(key: list[int], rank: int, parameters: Arrays) -> Arrays:
    """Return gradients towards a target of this rank's own, with noise: if ranks' parameters differ, they stay so."""
    rng = np.random.default_rng(key)
    drawn = {name: rng.standard_normal(parameters[name].shape) for name in SHAPES}
    return {name: (0.1 * (array - rank) + drawn[name]).astype(np.float32) for name, array in parameters.items()}


def _save(file: Path, **tables: Arrays) -> None:
    arrays: dict[str, Any] = {
        f"{what}.{name}": array for what, table in tables.items() for name, array in table.items()
    }
    np.savez(f"{file}.npz", **arrays)


def _write(folder: Path, rank: int, **record: object) -> None:
    said = {"pid": os.getpid(), **record}
    (folder / f"rank-{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
