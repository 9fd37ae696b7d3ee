"""Array ops on torch tensors, for gradients on a GPU. Payload bytes are equal to the reference's.

No tensor is copied to host memory. The host waits for the device where it needs a number to continue:

- ``all_below``: the host raises an error if the indices are damaged.
- ``moments``, ``max_abs``, ``count_above``, ``kth_magnitude``: the host searches thresholds.
- ``l2_norm``: the factor that clips a gradient is computed on the host.
- ``head_bytes``: the host checks the header before it decodes the payload.
- ``write``: the host needs to know whether there are duplicate indices, and how many.
- ``top_k``, ``first_above``, ``first_equal``, ``find_bits``, ``merge``: torch waits for the number of indices.
- ``principal``: ``torch.linalg.svd`` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from hvdcompress.ops.shared import MIX_FACTORS, NEGLIGIBLE, index_dtype
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Array, Coded, Flag, NumpyArray, Shares, Sparse

BF16_MAX = torch.finfo(torch.bfloat16).max


def uploaded(x: torch.Tensor, like: Array) -> Array:
    """Copy a tensor from host memory to the device of ``like``, without waiting for the device.

    The call returns when the CUDA driver has copied the bytes. A blocking copy would also wait for all queued work of
    the device (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html). If ``like`` is in host memory,
    return ``x`` itself.
    """
    return x.to(like.device, non_blocking=True)


def flag(x: Array) -> Flag:
    """Return a boolean tensor [1] as a bool if it is in host memory; otherwise unchanged: the host need not wait."""
    return bool(x) if x.device.type == "cpu" else x


def runs(lengths: Sequence[int], like: Array) -> tuple[Array, Array]:
    """Return, for concatenated runs of these lengths, each element's run and its index in the run, both int64."""
    each = uploaded(torch.tensor(lengths, device="cpu"), like)
    run = torch.repeat_interleave(each, output_size=sum(lengths))
    return run, torch.arange(len(run), device=like.device) - (each.cumsum(0) - each)[run]


def view_as(x: Array, dtype: torch.dtype) -> Array:
    """View the same memory as another dtype. torch refuses this for 0 or 1 elements with an unusual stride."""
    if len(x) < 2:
        x = x.new_empty(len(x)).copy_(x)
    return x.view(dtype) if len(x) else x.new_empty(0, dtype=dtype)


def signed(word: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return word - (word >> 31 << 32)


def _mix(x: Array) -> Array:
    """Compute :func:`hvdcompress.ops.shared.mix` on int32, whose products wrap to the same bits as those of uint32."""
    x = (x ^ _shift(x, 16)).mul_(signed(MIX_FACTORS[0]))
    x = (x ^ _shift(x, 13)).mul_(signed(MIX_FACTORS[1]))
    return x ^ _shift(x, 16)


def _shift(x: Array, distance: int) -> Array:
    """Shift int32 to the right like an unsigned integer."""
    return (x >> distance) & ((1 << (32 - distance)) - 1)


class TorchOps(Ops):
    """The array ops on torch tensors."""

    xp = torch

    @property
    def fft(self) -> ModuleType:
        return torch.fft

    def zeros(self, size: int, dtype: str, like: Array) -> Array:
        return torch.zeros(size, dtype=getattr(torch, dtype), device=like.device)

    def asarray(self, values: NumpyArray, like: Array) -> Array:
        return uploaded(torch.from_numpy(values if values.flags.writeable else values.copy()), like)

    def to_bytes(self, x: Array) -> Array:
        return view_as(x.contiguous(), torch.uint8)

    def from_bytes(self, buffer: Array, dtype: str) -> Array:
        wanted = getattr(torch, dtype)
        if buffer.data_ptr() % wanted.itemsize or buffer.storage_offset() % wanted.itemsize:
            buffer = buffer.clone()
        return view_as(buffer, wanted)

    def sort(self, x: Array) -> Array:
        return torch.sort(x).values

    def keep_if(self, finite: Flag, x: Array, other: Array | None = None) -> None:
        if isinstance(finite, bool):
            super().keep_if(finite, x, other)
        else:
            x.copy_(torch.where(finite != 0, x, 0.0 if other is None else other))

    def write_parts(self, outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
        whole = outs[0].new_empty(sum(map(len, outs)))
        self.write(whole, total, factor)
        torch._foreach_copy_(list(outs), list(whole.split([len(out) for out in outs])))  # one call for all parts

    def all_finite(self, x: Array) -> Flag:
        return flag(torch.isfinite(x).all())

    def top_k_parts(self, x: Array, counts: Sequence[int], sizes: Sequence[int]) -> Array:
        # One stable sort by part, then by descending magnitude. The elements of a part stay in its span, so the host
        # does not wait for the device.
        part, _ = runs(sizes, x)
        order = torch.sort(part << 31 | 0x7FFFFFFF - (x.view(torch.int32) & 0x7FFFFFFF), stable=True).indices
        size = uploaded(torch.tensor(sizes, device="cpu"), x)
        part, offset = runs([min(each) for each in zip(counts, sizes, strict=True)], x)
        return self._cast(self.sort(order[(size.cumsum(0) - size)[part] + offset]), index_dtype(len(x)))

    def to_bf16(self, x: Array, out: Array | None = None) -> Array:
        half = x.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16).view(torch.int16)
        return half if out is None else out.copy_(self.to_bytes(half))

    def uniform(self, key: NumpyArray, count: int, like: Array, start: int = 0) -> Array:
        word = signed(int(key[0]))
        wide = torch.int32 if start + count < 2**31 else torch.int64
        index = torch.arange(start, start + count, dtype=wide, device=like.device).to(torch.int32)
        return _shift(_mix(_mix(index + word) ^ word), 8).to(torch.float32).mul_(2.0**-24)

    def orthonormalise(self, x: Array, rows: int, key: NumpyArray | None = None) -> Array:
        given = x.view(rows, -1).double()
        spare = None if key is None else (self.uniform(key, len(x), x) - 0.5).view(rows, -1).double()
        done = torch.zeros_like(given)
        for number in range(rows):
            row = self._orthogonalised(given[number], done[:number])
            if spare is not None:
                row = torch.where(row.any(), row, self._orthogonalised(spare[number], done[:number]))
            done[number] = row
        return done.float().view(-1)

    def _orthogonalised(self, row: Array, done: Array) -> Array:
        """Orthogonalise ``row`` against ``done`` and normalise it; return zeros if only rounding errors remain."""
        row = self._normalised(row, 0.0)
        for _ in range(2):  # twice, for the reason given in ops/numpy.py
            row = row - ((done * row).sum(1)[:, None] * done).sum(0)
        return self._normalised(row, NEGLIGIBLE)

    def _normalised(self, row: Array, least: float) -> Array:
        """Return a row divided by its length, or zeros if the length is not above ``least``. The host does not wait."""
        length = (row * row).sum().sqrt()
        return torch.where(length > least, row / length, torch.zeros_like(row))

    def _add_in_order(self, out: Array, index: Array, values: Array) -> None:
        """Add values to ``out``; values with equal indices are added in their order.

        A GPU adds duplicates in an undefined order, and float sums depend on the order. So the values are added in
        rounds in which each index occurs once: first the first occurrences, then the second ones, and so on; at most
        as many rounds as ranks. Zeros are left out.
        """
        if (index[1:] > index[:-1]).all():
            self._add_at(out, index, values)
            return
        index, order = torch.sort(index, stable=True)
        values = values[order]
        counts = (values != 0).long()
        before = counts.cumsum(0) - counts  # number of non-zero values before this one, of all indices
        begins = torch.cat([self.zeros(1, "bool", like=index), index[1:] != index[:-1]])
        turn = before - torch.where(begins, before, 0).cummax(0).values  # the same, of this index only: the round
        turn, order = torch.sort((turn + 1) * counts, stable=True)  # zeros get round 0
        zeros_first, *sizes = torch.bincount(turn).tolist()
        for now in order[zeros_first:].split(sizes):
            self._add_at(out, index[now], values[now])

    def _add_at(self, out: Array, index: Array, values: Array) -> None:
        """Add values at distinct indices.

        ``index_add_`` is not used: on a GPU it adds atomically, and atomic additions treat denormals as zeros
        (https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red).
        """
        index = index.long()
        out[index] = out[index] + values

    def _add_sparse(self, out: Array, index: Array, values: Array) -> None:
        if not len(index):
            return
        index = index.long()
        total = out[index] + values
        for chosen in (values == 0, values != 0):  # non-zero values last, so that no zero overwrites them
            first = chosen.to(torch.uint8).argmax().view(1)  # entries that are not chosen write the first chosen again
            out[torch.where(chosen, index, index[first])] = torch.where(chosen, total, total[first])

    def _kth(self, magnitudes: Array, k: int) -> Any:
        # only the values of topk are used: which indices it returns for equal elements is undefined
        return torch.topk(magnitudes, k, sorted=False).values.min()


ops = TorchOps()  #: the backend
