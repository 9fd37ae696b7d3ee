"""Arithmetic in Triton: add, subtract and write dense and sparse tensors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.scan import NOTHING, Found, Scan, Velocity
from hvdcompress.ops.shared import f32
from hvdcompress.ops.torch import TorchOps, flag
from hvdcompress.ops.triton._kernels import arithmetic as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.selection import compacted, tile
from hvdcompress.ops.triton.statistics import finite_flag
from hvdcompress.ops.triton.tensors import empty, plain, plain_sparse
from hvdcompress.ops.vectors import Array, Coded, Flag, Half, Scalar, Shares, Sparse


def _argmax(gradient: Array, residual: Array, scale: float, out: Array, chunk: int, shape: dict[str, int]) -> Found:
    n = len(out)
    finite = finite_flag(out)
    offset = empty(-(-n // chunk), torch.int32, out)
    launch(
        kernels.accumulate_argmax, blocks(len(offset), shape["ROWS"]), out,
        gradient, residual, f32(scale), out, finite, offset, n, chunk, len(offset), **shape,
    )  # fmt: skip
    known = flag(finite)
    return Found(False) if known is False else Found(known, offsets=offset)


def _above(gradient: Array, residual: Array, scale: float, out: Array, threshold: Scalar, capacity: int) -> Found:
    n = len(out)
    finite = finite_flag(out)
    counts = empty(blocks(n), torch.int32, out)
    launch(
        kernels.accumulate_count, blocks(n), out,
        gradient, residual, f32(scale), out, finite, f32(threshold), counts, n, BLOCK=BLOCK,
    )  # fmt: skip
    ends = counts.cumsum(0)
    known, found = torch.cat([finite, ends[-1:]]).tolist()
    if known != 1 or found >= capacity:
        return Found(known == 1)
    values = empty(found, torch.float32, out)
    return Found(True, above=Sparse(compacted(out, threshold, ends, found, values=values), values))


class ArithmeticOps(TorchOps):
    """Add, subtract and write dense and sparse tensors."""

    def accumulate(
        self,
        gradient: Array,
        residual: Array,
        scale: float,
        out: Array,
        scan: Scan = NOTHING,
        velocity: Velocity | None = None,
    ) -> Found:
        if not plain(gradient, residual, out) or velocity is not None:
            return super().accumulate(gradient, residual, scale, out, scan, velocity)
        given = gradient, residual, scale, out
        if scan.chunk and scan == Scan(chunk=scan.chunk) and (shape := tile(scan.chunk)):
            return _argmax(*given, scan.chunk, shape)
        if scan.above is not None and scan == Scan(above=scan.above, capacity=scan.capacity):
            return _above(*given, scan.above, scan.capacity)
        n = len(out)
        finite = finite_flag(out)
        launch(
            kernels.accumulate, blocks(n), out,
            gradient, residual, f32(scale), out, finite, n, BLOCK=BLOCK,
        )  # fmt: skip
        return self._results(out, flag(finite), scan)

    def keep_if(self, finite: Flag, x: Array, other: Array | None = None) -> None:
        if isinstance(finite, bool) or not plain(x) or (other is not None and not plain(x, other)):
            super().keep_if(finite, x, other)
        else:
            given = x, x if other is None else other, finite.to(torch.int32), len(x)
            launch(kernels.keep_if, blocks(len(x)), x, *given, ZERO=other is None, BLOCK=BLOCK)

    def write(self, out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
        n = len(out)
        if (
            isinstance(total, Half)
            and plain(total.values, dtype=torch.float16)
            and total.size == n
            and out.is_contiguous()
        ):
            launch(kernels.write_half, blocks(n), out, out, total.values, f32(total.scale), f32(factor), n, BLOCK=BLOCK)
        else:
            super().write(out, total, factor)

    def _add_in_order(self, out: Array, index: Array, values: Array) -> None:
        if not out.is_contiguous() or not plain_sparse(index, values):
            super()._add_in_order(out, index, values)
            return
        index, order = torch.sort(torch.where(values != 0, index, len(out)), stable=True)  # zeros add nothing
        launch(kernels.add_runs, blocks(len(index)), out, out, index, order, values, len(out), len(index), BLOCK=BLOCK)

    def _add_sparse(self, out: Array, index: Array, values: Array) -> None:
        if plain(out) and plain_sparse(index, values):
            m = len(index)
            launch(kernels.add_sparse, blocks(m), out, out, index, values, len(out), m, BLOCK=BLOCK)
        else:
            super()._add_sparse(out, index, values)
