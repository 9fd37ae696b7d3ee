"""Restore the state of compression, per rank, from a folder that belongs to a framework's checkpoint."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from hvdcompress.ddp import Compressor
from hvdcompress.ddp.local_steps import CountedLocalSteps
from hvdcompress.engine.saving.checkpoint import NoState

NAME = "hvdcompress"  #: name of the folder, inside of a checkpoint that is a folder itself


def load(state: Compressor | CountedLocalSteps, folder: Path) -> None:
    """Read this rank's state from the folder; warn if the checkpoint comes from a run of another kind.

    Raises:
        FileNotFoundError: the files of some ranks are missing.
        ValueError: a file is damaged, or belongs to another model.
    """
    try:
        state.load(folder)
    except NoState as error:
        warnings.warn(f"{error}; training goes on without it, so residuals start at zero", stacklevel=2)


def remove(folder: Path) -> None:
    """Remove the folder with the files of all ranks, if it exists. Call it on one rank or on all ranks."""
    shutil.rmtree(folder, ignore_errors=True)
