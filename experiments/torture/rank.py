"""Run by every rank of a launch: ``python -m experiments.torture.rank FOLDER``, with the case in FOLDER.

Each rank writes its process's number and in the end how it went (``rank-0.json``), what it has given and received
(``rank-0.npz``), and the same at every save (``sums/``): so what is lost can be computed.
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

from experiments.torture import trainings
from experiments.torture.faults import SAVE_EVERY, STEPS, Case
from experiments.torture.inject import Injector
from experiments.torture.trainings import SHAPES, Arrays, Training


def main(folder: Path) -> None:
    """Train, with the case's fault if it is this rank's."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that cannot grow is an error, as on a full disk
    faulthandler.register(signal.SIGUSR1)  # asked for where a launch hangs
    case = Case.read(folder)
    training = trainings.of(case.driver)
    _write(folder, training.rank)
    injector = Injector(case, training.rank, folder)
    try:
        _train(case, training, injector, folder)
    except Exception as error:
        _write(folder, training.rank, ended="error", error=f"{type(error).__name__}: {error}")
        raise


def _train(case: Case, training: Training, injector: Injector, folder: Path) -> None:
    injector.start()
    training.begin(injector.shapes(), case.method, injector.settings())
    injector.prepare(training)
    given, received = _zeros(), _zeros()
    done, failed = 0, -2
    for step in range(STEPS):
        gradients = injector.gradients(step, trainings.gradients(case.seed, training.rank, step, training.parameters()))
        with injector.in_step(step):
            try:
                reduced = training.reduce(gradients)
            except Exception as error:
                if not case.catches or isinstance(error, training.lost) or failed == step - 1:
                    raise  # a second one in a row would be followed by others
                failed = step
                continue
            good = {name: array for name, array in reduced.items() if np.isfinite(array).all()}
            if len(good) < len(reduced) and not training.by_tensor:
                continue  # as with a loss scaler: the step is left out
            training.update(good)
        done += 1
        for name, array in good.items():
            given[name] += gradients[name]
            received[name] += array
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            _save(case, training, injector, folder, step, done, given, received)
    residuals = {name: np.asarray(training.compressor.residual(name)) for name in SHAPES}
    np.savez(folder / f"rank-{training.rank}.npz", **_named(given=given, received=received, residual=residuals))
    parameters = training.parameters()
    digest = hashlib.sha256(b"".join(parameters[name].tobytes() for name in SHAPES)).hexdigest()
    _write(folder, training.rank, ended="done", done=done, digest=digest)


def _save(
    case: Case,
    training: Training,
    injector: Injector,
    folder: Path,
    step: int,
    done: int,
    given: Arrays,
    received: Arrays,
) -> None:
    sums = folder / "sums"
    sums.mkdir(exist_ok=True)
    np.savez(sums / f"{done}-{training.rank}.npz", **_named(given=given, received=received))
    with injector.in_save(step):
        try:
            training.compressor.save(folder / "state")
        except OSError:
            if not case.catches:
                raise


def _zeros() -> Arrays:
    return {name: np.zeros(shape) for name, shape in SHAPES.items()}


def _named(**tables: Arrays) -> dict[str, Any]:
    return {f"{what}.{name}": array for what, arrays in tables.items() for name, array in arrays.items()}


def _write(folder: Path, rank: int, **record: object) -> None:
    said = {"pid": os.getpid(), **record}  # asked for its stacks as long as it lives, whatever it has said
    (folder / f"rank-{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
