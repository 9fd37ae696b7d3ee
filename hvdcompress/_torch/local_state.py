"""The saved state of a rank with local steps: that of its Compressors, and one more entry with everything else.

The entry is a file of ``torch.save`` as bytes, because the state of an optimizer may be nested and of any dtype. The
result is a saved state like that of a Compressor (``engine/saving``), so it is written, found and re-sharded like one.
Re-sharding copies the entry of rank 0 to all ranks.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdcompress.engine.saving import snapshot

KIND = "local steps"  #: of the saved states
OWN = "hvdcompress.local_steps"  #: name of the entry, among the names of tensors


def joined(own: Mapping[str, Any], compressors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one saved state.

    Args:
        own: the state that is not of a Compressor; ``steps`` are those of the training.
        compressors: the state of each fragment's Compressor. No two have a tensor in common.
    """
    data = io.BytesIO()
    torch.save(own, data)
    saved = {**compressors[0], "kind": KIND}
    saved["fragments"] = [{"fallback": each["fallback"], "metrics": each["metrics"]} for each in compressors]
    for table in snapshot.TABLES:
        saved[table] = {name: entry for each in compressors for name, entry in each[table].items()}
    if "nodes" in saved:
        owners = {name: owner for each in compressors for name, owner in each["nodes"]["owners"].items()}
        saved["nodes"] = {**saved["nodes"], "owners": owners}
    saved["steps"][OWN] = own["steps"]
    saved["merge"][OWN] = {"bytes": "keep"}
    saved["state"][OWN] = {"bytes": np.frombuffer(data.getvalue(), np.uint8)}
    return saved


def own_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was not of a Compressor, on the CPU.

    Raises:
        ValueError: the state is not of local steps.
    """
    if saved.get("kind") != KIND:
        raise ValueError("the state was saved by a Compressor, not by LocalSteps")
    return torch.load(io.BytesIO(saved["state"][OWN]["bytes"].tobytes()), map_location="cpu", weights_only=True)


def of_fragment(saved: Mapping[str, Any], head: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the state of a fragment's Compressor.

    Args:
        saved: the state of the rank.
        head: the entry of the fragment in ``saved["fragments"]``.
        names: the names of its parameters.
    """
    # A bucket is called after its first tensor
    tables = {
        table: {name: entry for name, entry in saved[table].items() if re.sub(r"\+\d+$", "", name) in names}
        for table in snapshot.TABLES
    }
    return {**saved, **head, **tables}


def plain(value: Any, key: str) -> Any:
    """Return the state of an optimizer with NumPy's numbers as Python's, so that ``torch.load`` accepts it.

    Raises:
        TypeError: there is an object that it does not accept, because it could run code. The message has its key.
    """
    if isinstance(value, Mapping):
        return {name: plain(each, f"{key}[{name!r}]") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([plain(each, f"{key}[{number}]") for number, each in enumerate(value)])
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    is_plain = type(value) in (bool, int, float, complex, str, bytes, type(None))
    if not is_plain and not isinstance(value, torch.Tensor | torch.dtype | torch.device):
        raise TypeError(f"{key} is {value!r:.60}, of {type(value)}: it cannot be saved; give a number, text or tensor")
    return value
