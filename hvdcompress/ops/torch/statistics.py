"""Statistics: means, norms and other numbers about a tensor (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.scan import Norm
from hvdcompress.ops.shared import PIECE, moments_of
from hvdcompress.ops.torch.tensors import flag, host, in_rows
from hvdcompress.ops.vectors import FP32_MAX, Array, Flag


def moments(x: Array) -> tuple[float, float]:
    wide = x.double()
    total, squares = host(torch.stack([wide.sum(), wide.square().sum()]))
    return moments_of(total, squares, len(x))


def max_abs(x: Array) -> float:
    return host(x.abs().max()) if len(x) else 0.0


def l2_norm(x: Array) -> float:
    return host(x.double().square().sum().sqrt())


def bucket_norms(x: Array, bucket: int, norm: Norm) -> Array:
    if not len(x):
        return x.new_zeros(0)
    bucket = min(bucket, len(x))
    if norm == "max":
        return in_rows(x, bucket).abs().amax(1)
    if norm == "l2":
        return _fold(in_rows(x.double().square_(), bucket)).sqrt_().clamp_(max=FP32_MAX).to(torch.float32)
    sums = _fold(in_rows(x.double().abs_(), bucket))
    starts = torch.arange(0, len(x), bucket, dtype=torch.float64, device=x.device)
    return (sums / (len(x) - starts).clamp_(max=bucket)).to(torch.float32)


def _fold(rows: Array) -> Array:
    """Return the sum of each row [m] of ``rows`` [m, width] float64, added in the spec's order; overwrites ``rows``."""
    count, width = rows.shape
    if width > PIECE:
        return _fold(_fold(torch.nn.functional.pad(rows, (0, -width % PIECE)).view(-1, PIECE)).view(count, -1))
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    return rows[:, 0].clone()


def all_finite(x: Array) -> Flag:
    return flag(torch.isfinite(x).all())


def all_below(index: Array, n: int) -> bool:
    return bool(host(((index >= 0) & (index < n)).all()))
