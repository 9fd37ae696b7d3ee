"""The array verbs on torch tensors, for gradients that live on a GPU: payload bytes equal the reference's.

No tensor passes through host memory. What the *host* must know to go on (a count, a header, whether all is
finite) is fetched by :func:`_host`, and nowhere else: each use makes the host wait for the device. They are

- ``all_finite``, ``all_below``: yes or no decides what happens next;
- ``moments``, ``max_abs``, ``count_above``: Gaussian-k's threshold is searched for on the host;
- ``to_fp16``: the number of saturated values, which the ledger keeps;
- ``head_bytes``: 24 bytes of header, checked before anything else is believed;
- ``write``: whether indices repeat, and how often;

and, inside torch, ``nonzero`` waits for the number of indices it found (``top_k``, ``first_above``,
``first_equal``, ``find_bits``).

torch knows unsigned 16- and 32-bit integers by little more than their names: "uint16" is int16 here, the same
bits, and whatever computes with bits does so in int32 or int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdcompress.method import Array, Sparse
from hvdcompress.ops._torch_codes import *  # noqa: F403
from hvdcompress.ops._torch_dense import *  # noqa: F403
from hvdcompress.ops._torch_matrix import *  # noqa: F403
from hvdcompress.ops._torch_sparse import *  # noqa: F403
from hvdcompress.ops.numpy import FP16_MAX, index_dtype, moments_of


def _host(x: Array) -> Any:
    """The numbers of a small tensor, on the host: waits for the device (the list above tells where and why)."""
    return x.tolist()


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, {"uint16": "int16"}.get(name, name))


def _view(x: Array, dtype: torch.dtype) -> Array:
    """The same memory as another dtype; torch refuses that for tensors of no or one element and odd strides."""
    if len(x) < 2:
        x = x.new_empty(len(x)).copy_(x)
    return x.view(dtype) if len(x) else x.new_empty(0, dtype=dtype)


def _f32(number: float) -> float:
    """Rounded to float32, as the reference's scalars are."""
    return float(np.float32(number))


# -- making and viewing ---------------------------------------------------------------------------


def zeros(size: int, dtype: str, like: Array) -> Array:
    """[size] zeros on the device of ``like``."""
    return torch.zeros(size, dtype=_dtype(dtype), device=like.device)


def asarray(values: np.ndarray[Any, Any], like: Array) -> Array:
    """A host numpy array on the device of ``like``."""
    return torch.from_numpy(values if values.flags.writeable else values.copy()).to(like.device)


def concat(arrays: list[Array]) -> Array:
    """The arrays one after another."""
    return arrays[0] if len(arrays) == 1 else torch.cat(arrays)


def to_bytes(x: Array) -> Array:
    """The memory of ``x`` as uint8, little-endian."""
    return _view(x.contiguous(), torch.uint8)


def from_bytes(buffer: Array, dtype: str) -> Array:
    """uint8 memory read as ``dtype``; copies only where the bytes are not aligned."""
    wanted = _dtype(dtype)
    if buffer.data_ptr() % wanted.itemsize or buffer.storage_offset() % wanted.itemsize:
        buffer = buffer.clone()
    return _view(buffer, wanted)


def head_bytes(buffer: Array, num_bytes: int) -> bytes:
    """The first bytes, on the host (headers only)."""
    return bytes(_host(buffer[:num_bytes]))


# -- residuals ------------------------------------------------------------------------------------


def accumulate(gradient: Array, residual: Array, scale: float, out: Array) -> None:
    """out = scale·gradient + residual."""
    if scale == 1.0:
        torch.add(gradient, residual, out=out)
    else:  # two steps: add(alpha=) may fuse them, and round once where the reference rounds twice
        torch.mul(gradient, _f32(scale), out=out).add_(residual)


def accumulate_moments(gradient: Array, residual: Array, scale: float, out: Array) -> tuple[float, float]:
    """:func:`accumulate`, and mean and standard deviation of the result."""
    accumulate(gradient, residual, scale, out)
    return moments(out)


def all_finite(x: Array) -> bool:
    """Whether no element is Inf or NaN."""
    return bool(_host(torch.isfinite(x).all()))


def blend(x: Array, residual: Array, beta: float) -> None:
    """x = beta·x + (1−beta)·residual, in place."""
    x.mul_(_f32(beta)).add_(residual * _f32(1.0 - beta))


def subtract(x: Array, own: Any, factor: float) -> None:
    """x −= factor·own, in place; ``own`` is dense [n] or sparse (distinct indices, or repeats of value 0).

    The order in which a device adds repeats varies, but adding ±0 changes nothing in any order.
    """
    if isinstance(own, Sparse):
        x.index_add_(0, own.index, own.values * -_f32(factor))
    else:
        x.sub_(own if factor == 1.0 else own * _f32(factor))


def zero_where(x: Array, own: Any) -> None:
    """x = 0 where ``own``, dense [n] or sparse, is not 0; in place."""
    if isinstance(own, Sparse):
        index = own.index[own.values != 0]
        x[index.to(torch.int64)] = 0
    else:
        x[own != 0] = 0


# -- results --------------------------------------------------------------------------------------


def write(out: Array, total: Any, factor: float) -> None:
    """out = factor·total in out's dtype; ``total`` is dense [n] or sparse, where duplicate indices add up.

    Ranks must agree to the bit, but a device adds duplicates in an order of its own, in which float sums
    differ. So they are added in rounds, in each of which an index occurs once (and otherwise only with the
    value ±0, which changes no sum): the first occurrences, then the second ones, …, as many as there are ranks.
    That is the reference's order.
    """
    if not isinstance(total, Sparse):
        out.copy_(total if factor == 1.0 else total * (factor if total.dtype == torch.float64 else _f32(factor)))
        return
    out.zero_()
    index, values = total.index, (total.values * _f32(factor)).to(out.dtype)
    if _host((index[1:] > index[:-1]).all()):
        out.index_add_(0, index, values)
        return
    index, order = torch.sort(index, stable=True)
    values = values[order]
    counts = (values != 0).long()
    before = counts.cumsum(0) - counts  # non-zero values before this one, of any index
    begins = torch.cat([zeros(1, "bool", like=index), index[1:] != index[:-1]])
    turn = before - torch.where(begins, before, 0).cummax(0).values  # the same, of this index only
    turn, order = torch.sort(turn * counts, stable=True)
    start = 0
    for size in _host(torch.bincount(turn)):
        now = order[start : start + size]
        out.index_add_(0, index[now], values[now])
        start += size


def fill(out: Array, value: float) -> None:
    """out = value everywhere."""
    out.fill_(value)


# -- selection ------------------------------------------------------------------------------------


def _where(condition: Array) -> Array:
    """Indices of what is true, ascending, in the dtype for this many elements."""
    return condition.nonzero().view(-1).to(_dtype(index_dtype(len(condition))))


def take(x: Array, index: Array) -> Array:
    """x[index] [k]."""
    return x.index_select(0, index)


def top_k(x: Array, k: int) -> Array:
    """Indices of the k largest |x|, ascending [k] int32; among equals the lowest index."""
    if k >= len(x):
        return index_range(len(x), x)
    magnitude = x.abs()
    threshold = torch.topk(magnitude, k, sorted=False).values.min()  # which of the equal ones it took is undefined
    above = _where(magnitude > threshold)
    ties = _where(magnitude == threshold)[: k - len(above)]
    return sort(torch.cat([above, ties]))


def chunk_argmax(x: Array, chunk: int) -> Array:
    """Offset of the largest |x| in each chunk [ceil(n/chunk)] int32; the last chunk may be ragged."""
    whole = len(x) // chunk * chunk
    offset = x[:whole].view(-1, chunk).abs().argmax(1)  # the first of equal ones, as torch documents
    if whole < len(x):
        offset = torch.cat([offset, x[whole:].abs().argmax(0, keepdim=True)])
    return offset.to(torch.int32)


def moments(x: Array) -> tuple[float, float]:
    """Mean and unbiased standard deviation, accumulated in float64 (0 for a single element)."""
    wide = x.double()
    total, squares = _host(torch.stack([wide.sum(), wide.square().sum()]))
    return moments_of(total, squares, len(x))


def max_abs(x: Array) -> float:
    """The largest |x| (0 for an empty array)."""
    return _host(x.abs().max()) if len(x) else 0.0


def count_above(x: Array, threshold: float) -> int:
    """How many |x| are greater than the threshold (a float32 number)."""
    return _host((x.abs() > _f32(threshold)).sum())


def first_above(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| > threshold, ascending int32."""
    return _where(x.abs() > _f32(threshold))[:capacity]


def first_equal(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| = threshold, ascending int32."""
    return _where(x.abs() == _f32(threshold))[:capacity]


def sort(x: Array) -> Array:
    """Ascending."""
    return torch.sort(x).values


# -- numbers --------------------------------------------------------------------------------------


def index_range(n: int, like: Array) -> Array:
    """0, 1, …, n−1."""
    return torch.arange(n, dtype=_dtype(index_dtype(n)), device=like.device)


def all_below(index: Array, n: int) -> bool:
    """Whether every index lies in [0, n)."""
    return bool(_host(((index >= 0) & (index < n)).all()))


def chunk_positions(offset: Array, chunk: int, n: int) -> Array:
    """Offsets within chunks -> positions in a tensor of n elements, clipped into it [k]."""
    start = torch.arange(len(offset), dtype=torch.int64, device=offset.device) * chunk
    return (start + offset).clamp_(max=n - 1).to(_dtype(index_dtype(n)))


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX) -> tuple[Array, int]:
    """scale·x as float16, held within ±limit, and how many values that changed."""
    scaled = x * _f32(scale)
    saturated = _host((scaled.abs() > _f32(limit)).sum())
    return scaled.clamp_(-_f32(limit), _f32(limit)).to(torch.float16), saturated


def from_fp16(x: Array, scale: float) -> Array:
    """scale·x as float32, where an Inf (a sum that rounded up past the limit) reads as the largest float16."""
    return x.to(torch.float32).clamp_(-FP16_MAX, FP16_MAX).mul_(_f32(scale))


def to_bf16(x: Array) -> Array:
    """The 16 bits of bfloat16, rounded to nearest even; finite stays finite."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # the sign is shifted in, so that int16 holds it
    largest = ((bits >> 31) & -0x8000) | 0x7F7F
    return torch.where((rounded & 0x7FFF) >= 0x7F80, largest, rounded).to(torch.int16)


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits -> float32, exactly."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def add_all(arrays: list[Array]) -> Array:
    """The sum of equal-shaped arrays, in their order."""
    total = arrays[0].clone()
    for array in arrays[1:]:
        total += array
    return total


# -- bits -----------------------------------------------------------------------------------------


def _pack(bits: Array) -> Array:
    """Zeros and ones, uint8 -> eight to the byte, the first one lowest."""
    if missing := -len(bits) % 8:
        bits = torch.cat([bits, zeros(missing, "uint8", like=bits)])
    place = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << place).sum(1, dtype=torch.uint8)


def _unpack(buffer: Array, count: int) -> Array:
    """The inverse of :func:`_pack` [count]; zeros follow the buffer's end."""
    place = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    bits = ((buffer[: -(-count // 8), None] >> place) & 1).view(-1)
    missing = count - len(bits)
    return torch.cat([bits, zeros(missing, "uint8", like=bits)]) if missing > 0 else bits[:count]


def pack_bits(values: Array, width: int) -> Array:
    """Unsigned numbers of ``width`` bits each, lowest bit first, packed without gaps into uint8."""
    place = torch.arange(width, device=values.device)
    return _pack(((values.long()[:, None] >> place) & 1).to(torch.uint8).view(-1))


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    """The inverse of :func:`pack_bits` [count] int64."""
    place = torch.arange(width, device=buffer.device)
    return (_unpack(buffer, count * width).view(count, width).long() << place).sum(1)


def set_bits(positions: Array, num_bits: int) -> Array:
    """A bitmap of ``num_bits`` with these (distinct) positions set, packed into uint8."""
    bits = zeros(num_bits, "uint8", like=positions)
    return _pack(bits.index_fill_(0, positions.long(), 1))


def find_bits(buffer: Array, num_bits: int) -> Array:
    """The positions of the set bits, ascending int64."""
    return _unpack(buffer, num_bits).nonzero().view(-1)
