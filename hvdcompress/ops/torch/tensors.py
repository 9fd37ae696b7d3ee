"""What the ops need to know about torch: dtypes, views, scalars, and the one function that fetches from a device.

:func:`host` makes the host wait for the device. It is used where the host must know a number to go on:

- ``all_below``: yes or no decides what happens next;
- ``moments``, ``max_abs``, ``count_above``, ``kth_magnitude``: thresholds are searched for on the host;
- ``l2_norm``: the factor by which a gradient is clipped is a number of the host's;
- ``head_bytes``: the header is checked before anything else is believed;
- ``write``: whether indices repeat, and how often.

Inside torch, ``nonzero`` and ``unique`` wait for the number of indices that they found (``top_k``, ``first_above``,
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
    """Return the numbers of a small tensor on the host. This waits for the device; the list above says why."""
    return x.tolist()


def flag(x: Array) -> Flag:
    """Return a tensor of one, yes or no, as a bool if it is in host memory: nobody waits for that."""
    return bool(host(x.view(()))) if x.device.type == "cpu" else x


def uploaded(x: torch.Tensor, like: Array) -> Array:
    """Return a copy of a tensor in ordinary host memory on the device of ``like``, for which the host need not wait.

    The call returns when the driver has taken the bytes; a blocking copy would wait for all that the device has yet to
    do (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html). On the host it is ``x`` itself.
    """
    return x.to(like.device, non_blocking=True)


def runs(lengths: Sequence[int], like: Array) -> tuple[Array, Array]:
    """Return of runs of these lengths, end to end, which one each element is in, and its place there, both int64."""
    each = uploaded(torch.tensor(lengths), like)
    run = torch.repeat_interleave(each, output_size=sum(lengths))
    return run, torch.arange(len(run), device=like.device) - (each.cumsum(0) - each)[run]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype for numpy's name of it; "uint16" is int16, as torch hardly supports the former."""
    return getattr(torch, {"uint16": "int16"}.get(name, name))


def view_as(x: Array, dtype: torch.dtype) -> Array:
    """View the same memory as another dtype. torch refuses that for tensors of 0 or 1 elements and odd strides."""
    if len(x) < 2:
        x = x.new_empty(len(x)).copy_(x)
    return x.view(dtype) if len(x) else x.new_empty(0, dtype=dtype)


def f32(number: Scalar) -> float:
    """Round to float32, as the reference's scalars are."""
    return float(np.float32(number))


def where(condition: Array) -> Array:
    """Return the indices of what is true, ascending, in the dtype for this many elements."""
    return condition.nonzero().view(-1).to(dtype_of(index_dtype(len(condition))))


def in_rows(x: Array, width: int) -> Array:
    """Return ``x`` as rows of ``width`` elements; the last row is padded with zeros. May be a view."""
    missing = -len(x) % width
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, width)
