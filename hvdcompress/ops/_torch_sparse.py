"""The torch verbs for sparse vectors and for thresholds; what the host must know comes by :func:`_host`.

- ``kth_magnitude``: where Deep Gradient Compression's search for a threshold begins, which the host leads;
- ``l2_norm``: by which a gradient is clipped: its factor is a number of the host's;

and, inside torch, ``unique`` waits for the number of indices it found (``merge``).
"""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.method import Array, Sparse

__all__ = ["kth_magnitude", "l2_norm", "merge"]


def _host(x: Array) -> Any:
    """The number in a tensor of one element, on the host: waits for the device."""
    return x.tolist()


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    """a + b: distinct ascending indices below n, and values [m] float32; each of a and b has distinct indices.

    No place gets more than two values, and a sum of two is the same in either order: no device can differ.
    """
    index, place = torch.unique(torch.cat([a.index, b.index]), return_inverse=True)
    values = torch.zeros(len(index), dtype=torch.float32, device=index.device)
    values.index_add_(0, place, torch.cat([a.values, b.values]))
    return Sparse(index.to(torch.int32 if n < 2**31 else torch.int64), values)


def kth_magnitude(x: Array, k: int) -> float:
    """The k-th largest |x|, 1 ≤ k ≤ n (0 for an empty array)."""
    return _host(torch.topk(x.abs(), k, sorted=False).values.min()) if len(x) else 0.0


def l2_norm(x: Array) -> float:
    """‖x‖ of float32, summed in float64, in which no float32's square overflows or vanishes."""
    return _host(x.double().square().sum().sqrt())
