"""``python -m experiments scale``: from the command's words to tables and files."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from experiments import nets, packaged
from experiments.cluster.launcher import shown
from experiments.configfile import MethodEntry
from experiments.output.console import console_of
from experiments.output.table import Format
from experiments.scale import files, report
from experiments.scale.cost import Driver
from experiments.scale.model import Model, model_from
from experiments.scale.prediction import WORKERS, predict, tensors_of
from experiments.scale.report import Prediction

FITTED: dict[Driver, Path] = {
    "horovod": packaged.FOLDER / "bench" / "fit.json",
    "mpi4py": packaged.FOLDER / "bench" / "fit_mpi.json",
}  #: the constants that come with the package


def seconds(text: str) -> float:
    """Parse a time: "20us", "0.5ms" or "1s".

    Raises:
        ValueError: it is not a time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a time: write 20us, 0.5ms or 1s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def run(
    entries: Sequence[MethodEntry],
    set: str,
    rates: Sequence[str],
    workers: Sequence[str],
    fit: Sequence[Path],
    constants: Path,
    latency: str | None,
    out: Path | None,
    console: Console,
    form: str = Format.text,
    driver: Driver | None = None,
) -> None:
    """Fit the model if asked to, predict, print and write.

    Args:
        entries: the methods.
        set: what is exchanged, as :func:`tensors_of` takes it.
        rates: of the links.
        workers: numbers of workers; the usual ones if there are none.
        fit: results to fit to first; the constants are then written to ``constants``.
        constants: the file of the fitted constants.
        latency: seconds a message, such as "20us", in place of the fitted ones.
        out: a folder for the report.
        console: where tables are printed.
        form: other forms than "text" are the tables alone.
        driver: whose exchanges are predicted, and fitted to; None: the constants' own, or Horovod's in a fit.

    Raises:
        ValueError, OSError: an argument is wrong, the constants are of another driver, or a file is missing.
    """
    tensors = tensors_of(set)
    if wrong := [word for word in workers if not word.isdigit()]:
        raise ValueError(f"--workers: {wrong[0]!r} is not a number of workers")
    numbers = [int(word) for word in workers] or list(WORKERS)
    with console.status("…") as status:
        if fit:
            status.update("fitting …")
            fitted = model_from(fit, driver=driver or "horovod")
        else:
            fitted = Model.open(constants)
            if driver not in (None, fitted.driver):
                raise ValueError(
                    f"{shown(constants)} has the constants of {fitted.driver}, and --over asks for {driver}: leave out "
                    f"--over, or fit to exchanges over {driver} (--fit RESULTS --over {driver})"
                )
        model, known = fitted, list(fitted.codecs)
        if latency:
            model = replace(fitted, constants=replace(fitted.constants, message=seconds(latency)))
        rows = predict(model, entries, tensors, rates, numbers, lambda label: status.update(f"{label} …"))
    aside = console if form == Format.text else console_of(stderr=True)  # what is not the tables
    if fit:
        fitted.save(constants)  # now, with the codecs of all methods
        report.show_fit(fitted, aside)
        aside.print(f"written: {shown(constants)}", highlight=False, soft_wrap=True)
    about = f"{len(tensors)} tensors, {nets.total(tensors):,} elements".replace(",", " ").replace("  ", ", ")
    command = shlex.join(["python", "-m", "experiments", *sys.argv[1:]])
    name = f"{Path(set).stem}, {about}" + (f", over {model.driver}" if model.driver != "horovod" else "")
    name += f", {latency} per message" if latency else ""
    timed = [] if fit else [method for method in fitted.codecs if method not in known]
    file = f"the packaged {constants.name}" if constants in FITTED.values() else shown(constants)
    prediction = Prediction(name, rows, model, file, command, timed)
    report.show(prediction, console, form)
    for warning in report.warnings(prediction):
        console_of(stderr=True).print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    if out:
        written = ", ".join(shown(each) for each in files.write(prediction, out))
        aside.print(f"written: {escape(written)}", highlight=False, soft_wrap=True)
