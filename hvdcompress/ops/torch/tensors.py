"""Helpers for torch tensors: dtypes, views, scalars, and the only function that copies from a device to the host.

:func:`host` makes the host wait for the device. It is used where the host needs a number to continue:

- ``all_below``: the host raises an error if the indices are damaged.
- ``moments``, ``max_abs``, ``count_above``, ``kth_magnitude``: the host searches thresholds.
- ``l2_norm``: the factor that clips a gradient is computed on the host.
- ``head_bytes``: the host checks the header before it decodes the payload.
- ``write``: the host needs to know whether there are duplicate indices, and how many.

Inside torch, ``nonzero`` and ``unique`` wait for the number of indices that they return (``top_k``, ``first_above``,
``first_equal``, ``find_bits``, ``merge``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import Array, Flag, Scalar


def host(x: Array) -> Any:
    """Copy a small tensor to the host as Python numbers. This waits for the device; see the list above."""
    return x.tolist()


def flag(x: Array) -> Flag:
    """Return a boolean tensor [1] as a bool if it is in host memory; otherwise unchanged: the host need not wait."""
    return bool(host(x.view(()))) if x.device.type == "cpu" else x


def uploaded(x: torch.Tensor, like: Array) -> Array:
    """Copy a tensor from host memory to the device of ``like``, without waiting for the device.

    The call returns when the CUDA driver has copied the bytes. A blocking copy would also wait for all queued work of
    the device (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html). If ``like`` is in host memory,
    return ``x`` itself.
    """
    return x.to(like.device, non_blocking=True)


def runs(lengths: Sequence[int], like: Array) -> tuple[Array, Array]:
    """Return, for concatenated runs of these lengths, each element's run and its index in the run, both int64."""
    each = uploaded(torch.tensor(lengths, device="cpu"), like)
    run = torch.repeat_interleave(each, output_size=sum(lengths))
    return run, torch.arange(len(run), device=like.device) - (each.cumsum(0) - each)[run]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for numpy's name; "uint16" becomes int16, because torch has little support for uint16."""
    return getattr(torch, {"uint16": "int16"}.get(name, name))


def view_as(x: Array, dtype: torch.dtype) -> Array:
    """View the same memory as another dtype. torch refuses this for 0 or 1 elements with an unusual stride."""
    if len(x) < 2:
        x = x.new_empty(len(x)).copy_(x)
    return x.view(dtype) if len(x) else x.new_empty(0, dtype=dtype)


def f32(number: Scalar) -> float:
    """Round a number to float32, as the reference does."""
    return float(np.float32(number))


def where(condition: Array) -> Array:
    """Return the indices at which ``condition`` is true, ascending, in the dtype of :func:`index_dtype`."""
    return condition.nonzero().view(-1).to(dtype_of(index_dtype(len(condition))))


def in_rows(x: Array, width: int) -> Array:
    """Reshape ``x`` to rows of ``width`` elements; the last row is padded with zeros. May be a view."""
    missing = -len(x) % width
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, width)
