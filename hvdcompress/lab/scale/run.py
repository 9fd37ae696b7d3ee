"""``hvdcompress scale``: from the command's words to tables and files."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hvdcompress import registry
from hvdcompress.lab import nets
from hvdcompress.lab.cluster import launcher
from hvdcompress.lab.scale import model as scaling
from hvdcompress.lab.scale import report as _scale_report
from hvdcompress.lab.scale.report import Prediction
from hvdcompress.lab.training.experiment import Experiment, MethodEntry

FOLDER = launcher.ROOT / "configs" / "bench"


def entries(config: Path | None, labels: Sequence[str]) -> list[MethodEntry]:
    """The methods to foretell.

    Raises:
        ValueError: a bad configuration, or no such label. FileNotFoundError: there is no such file.
    """
    everything = {"name": "all", "tasks": ["gradients"], "methods": registry.available()}
    usual = FOLDER / "scale.yaml"
    source = config or (usual if usual.is_file() else everything)
    return Experiment.open(source).override(methods=labels).methods


def seconds(text: str) -> float:
    """``20us``, ``0.5ms`` or ``1s`` in seconds.

    Raises:
        ValueError: it is none of them.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no time: write 20us, 0.5ms or 1s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def run(
    config: Path | None,
    set: str,
    rates: Sequence[str],
    workers: Sequence[str],
    labels: Sequence[str],
    fit: Sequence[Path],
    constants: Path | None,
    latency: str | None,
    out: Path | None,
    console: Console,
) -> None:
    """Fit if there is something to fit to, foretell, print and write.

    Raises:
        ValueError, OSError: something given is wrong, or is not there.
    """
    file = constants or FOLDER / "fit.json"
    chosen, tensors = entries(config, labels), scaling.tensors_of(set)
    if wrong := [word for word in workers if not word.isdigit()]:
        raise ValueError(f"--workers: {wrong[0]!r} is no number of workers")
    numbers = [int(word) for word in workers] or list(scaling.WORKERS)
    with console.status("…") as status:
        if fit:
            status.update("fitting …")
            fitted = scaling.model_from(fit)
        else:
            fitted = scaling.Model.open(file)
        model, known = fitted, list(fitted.codecs)
        if latency:
            model = replace(fitted, constants=replace(fitted.constants, message=seconds(latency)))
        rows = scaling.predict(model, chosen, tensors, rates, numbers, lambda label: status.update(f"{label} …"))
    if fit:
        fitted.save(file)  # now, with the codecs of all methods
        _scale_report.show_fit(fitted, console)
        console.print(f"written: {launcher.shown(file)}", highlight=False, soft_wrap=True)
    about = f"{len(tensors)} tensors, {nets.total(tensors):,} elements".replace(",", " ").replace("  ", ", ")
    command = shlex.join(["hvdcompress", *sys.argv[1:]])
    name = f"{Path(set).stem}, {about}" + (f", {latency} a message" if latency else "")
    timed = [] if fit else [method for method in fitted.codecs if method not in known]
    prediction = Prediction(name, rows, model, launcher.shown(file), command, timed)
    _scale_report.show(prediction, console)
    if out:
        files = _scale_report.write(prediction, out)
        written = ", ".join(launcher.shown(each) for each in files)
        console.print(f"written: {escape(written)}", highlight=False, soft_wrap=True)
