"""A Compressor's files, one per rank, in a folder that goes with a framework's checkpoint."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from hvdcompress.ddp import Compressor

NAME = "hvdcompress"  #: of the folder, where the framework's checkpoint is a folder itself


def save(compressor: Compressor, folder: Path) -> None:
    """Write this rank's state; call it on every rank. Files of another number of ranks, from an earlier run, go."""
    own = compressor.save(folder)
    world = own.stem.rsplit("-", 1)[1]
    for path in folder.glob("*rank-*-of-*.safetensors"):
        if path.stem.rsplit("-", 1)[1] != world:
            path.unlink(missing_ok=True)  # another rank may be faster


def load(compressor: Compressor, folder: Path) -> None:
    """Read this rank's state; warn where the checkpoint is of a run without compression.

    Raises:
        FileNotFoundError: some ranks' files are missing.
        ValueError: a file is damaged, or of another model.
    """
    if folder.is_dir():
        compressor.load(folder)
    else:
        warnings.warn(f"the checkpoint has no {folder}: residuals begin at zero", stacklevel=2)


def remove(folder: Path) -> None:
    """Remove a folder with all ranks' files, if it is there; call it on one rank, or on all."""
    shutil.rmtree(folder, ignore_errors=True)
