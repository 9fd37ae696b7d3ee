"""Bits: integers of a few bits, and bitmaps (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.torch.memory import zeros
from hvdcompress.ops.torch.tensors import in_rows
from hvdcompress.ops.vectors import Array


def pack_bits(values: Array, width: int) -> Array:
    shift = torch.arange(width, device=values.device)
    return packed(((values.long()[:, None] >> shift) & 1).to(torch.uint8).view(-1), 1)


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    shift = torch.arange(width, device=buffer.device)
    return (unpacked(buffer, 1, count * width).view(count, width).long() << shift).sum(1)


def set_bits(positions: Array, num_bits: int) -> Array:
    bits = zeros(num_bits, "uint8", like=positions)
    return packed(bits.index_fill_(0, positions.long(), 1), 1)


def find_bits(buffer: Array, num_bits: int) -> Array:
    return unpacked(buffer, 1, num_bits).nonzero().view(-1)


def elias_fano(index: Array, low: int, num_bits: int) -> tuple[Array, Array]:
    index = index.long()
    i = torch.arange(len(index), device=index.device)
    return pack_bits(index & ((1 << low) - 1), low), set_bits((index >> low) + i, num_bits)


def from_elias_fano(lows: Array, highs: Array, low: int, num_bits: int) -> Array:
    positions = find_bits(highs, num_bits)
    i = torch.arange(len(positions), device=positions.device)
    return ((positions - i) << low) + unpack_bits(lows, low, len(positions))


def packed(codes: Array, width: int) -> Array:
    """Pack codes [n] uint8 of ``width`` bits, at most 8, without gaps, lowest bit first [⌈n·width/8⌉] uint8."""
    n = len(codes)
    codes = in_rows(codes, 8)
    if 8 % width:  # codes cross byte boundaries: split them into single bits first
        shift = torch.arange(width, dtype=torch.uint8, device=codes.device)
        codes = (codes.view(-1)[:, None] >> shift) & 1
        width = 1
        n *= len(shift)
    shift = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (codes.view(-1, len(shift)) << shift).sum(1, dtype=torch.uint8)[: -(-n * width // 8)]


def unpacked(buffer: Array, width: int, count: int) -> Array:
    """Undo :func:`packed` [count] uint8; zeros follow the buffer's end."""
    step = width if 8 % width == 0 else 1
    num_fields = count * width // step
    shift = torch.arange(0, 8, step, dtype=torch.uint8, device=buffer.device)
    codes = ((buffer[: -(-count * width // 8), None] >> shift) & ((1 << step) - 1)).view(-1)[:num_fields]
    if len(codes) < num_fields:
        codes = torch.cat([codes, zeros(num_fields - len(codes), "uint8", like=codes)])
    if step == width:
        return codes
    shift = torch.arange(width, dtype=torch.uint8, device=buffer.device)
    return (codes.view(count, width) << shift).sum(1, dtype=torch.uint8)
