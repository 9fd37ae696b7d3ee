"""Files of saved gradients: the arrays that each rank had in each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Gradients = list[list[dict[str, np.ndarray[Any, Any]]]]  # [step][rank][name]


def save(path: Path, gradients: Gradients) -> None:
    """Write gradients to a safetensors file, under keys "step/rank/name".

    Args:
        path: the file; its folder is made.
        gradients: [step][rank]{name: array}.
    """
    arrays = {
        f"{step}/{rank}/{name}": np.ascontiguousarray(array)
        for step, ranks in enumerate(gradients)
        for rank, one in enumerate(ranks)
        for name, array in one.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)


def load(path: Path) -> Gradients:
    """Read gradients that :func:`save` wrote, as [step][rank]{name: array}.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; python -m experiments save-gradients {path} makes one")
    found: dict[int, dict[int, dict[str, Any]]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                step, rank, name = key.split("/", 2)
                found.setdefault(int(step), {}).setdefault(int(rank), {})[name] = file.get_tensor(key)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} holds no gradients saved by hvdcompress: {error}") from None
    return [[found[step][rank] for rank in sorted(found[step])] for step in sorted(found)]
