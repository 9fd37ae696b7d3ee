"""Save and restore the state of compression, per rank, in a folder that belongs to a framework's checkpoint."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from hvdcompress.ddp import Compressor
from hvdcompress.local_steps import LocalSteps

NAME = "hvdcompress"  #: name of the folder, inside of a checkpoint that is a folder itself


def save(state: Compressor | LocalSteps, folder: Path) -> None:
    """Write this rank's state to the folder; call it on every rank.

    Files of an earlier run, with another number of ranks or of the other kind, are removed.
    """
    state.save(folder)
    is_local = isinstance(state, LocalSteps)
    own = f"step-{state.steps}" if is_local else f"*-of-{state.rank_state.world_size}.safetensors"  # type: ignore[union-attr]
    for path in {*folder.glob("step-*"), *folder.glob("*rank-*-of-*.safetensors")}:
        if path.match(own):
            continue
        if path.is_dir():
            remove(path)
        else:
            path.unlink(missing_ok=True)  # another rank may have removed it already


def load(state: Compressor | LocalSteps, folder: Path) -> None:
    """Read this rank's state from the folder; warn if the checkpoint comes from a run of another kind.

    Raises:
        FileNotFoundError: the files of some ranks are missing.
        ValueError: a file is damaged, or belongs to another model.
    """
    try:
        state.load(folder)
    except FileNotFoundError:
        is_local = isinstance(state, LocalSteps)
        if any(path.is_dir() == is_local for path in folder.glob("step-*")):
            raise
        what = "local steps: they begin with the weights" if is_local else "compression: residuals start at zero"
        warnings.warn(f"the checkpoint has no state in {folder} of {what}", stacklevel=2)


def remove(folder: Path) -> None:
    """Remove the folder with the files of all ranks, if it exists. Call it on one rank or on all ranks."""
    shutil.rmtree(folder, ignore_errors=True)
