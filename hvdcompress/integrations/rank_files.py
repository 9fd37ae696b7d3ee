"""Save and restore the state of compression, per rank, in a folder that belongs to a framework's checkpoint."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from hvdcompress.ddp import Compressor
from hvdcompress.local_steps import LocalSteps

NAME = "hvdcompress"  #: name of the folder, inside of a checkpoint that is a folder itself


def save(compressor: Compressor, folder: Path) -> None:
    """Write this rank's state to the folder; call it on every rank.

    Files of an earlier run with another number of ranks are removed.
    """
    own = compressor.save(folder)
    world_size = own.stem.rsplit("-", 1)[1]
    for path in folder.glob("*rank-*-of-*.safetensors"):
        if path.stem.rsplit("-", 1)[1] != world_size:
            path.unlink(missing_ok=True)  # another rank may have removed it already


def load(compressor: Compressor, folder: Path) -> None:
    """Read this rank's state from the folder; warn if the checkpoint comes from a run without compression.

    Raises:
        FileNotFoundError: the files of some ranks are missing.
        ValueError: a file is damaged, or belongs to another model.
    """
    if folder.is_dir():
        compressor.load(folder)
    else:
        warnings.warn(f"the checkpoint has no folder {folder}: residuals start at zero", stacklevel=2)


def save_local_steps(local: LocalSteps, folder: Path) -> None:
    """Write this rank's state of local steps to the folder, on every rank. Those of an earlier run are removed."""
    local.save(folder)
    for path in folder.glob("step-*"):
        if path.name != f"step-{local.steps}":
            shutil.rmtree(path, ignore_errors=True)  # another rank may remove it, too


def remove(folder: Path) -> None:
    """Remove the folder with the files of all ranks, if it exists. Call it on one rank or on all ranks."""
    shutil.rmtree(folder, ignore_errors=True)
