"""Mutations of valid bytes. Decoder, seed and number determine a mutation, so it can be repeated."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from hvdcompress.parts import wire

INTEGERS = (0, 1, 2, 3, 23, 24, 25, 255, 599, 600, 601, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"), 3e38, 1e-45)
WORDS = tuple(
    word.encode()
    for word in (
        "*a", "&a ", "<<: ", "{", "}", "[", "]", "!!python/object:os.system ", ".nan", ".inf", "1e999", "-1", "null",
        "true", "~", "0x", "'", '"', "\n", "\t", "- ", ": ", "#", "\\", "\0", "é", "\ud7ff", "? ", "|\n", "%YAML 9\n",
        "---\n", "[[[[[[[[[[[[", "10000000000000000000", '"world": ', '"steps": ', '"dtype": ', "F32", "F64", "I64",
    )
)  # fmt: skip
Bytes = bytearray
Change = Callable[[random.Random, Bytes, Sequence[bytes]], None]


def _place(draw: random.Random, data: Bytes) -> int:
    """Return a position, often in the first bytes, where headers are."""
    return draw.randrange(max(1, min(len(data), 64) if draw.random() < 0.4 else len(data)))


def flip(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Flip a bit."""
    if data:
        data[_place(draw, data)] ^= 1 << draw.randrange(8)


def number(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Overwrite a number."""
    form = draw.choice(["<B", "<H", "<I", "<Q", "<f", "<d"])
    value = draw.choice(FLOATS) if form[1] in "fd" else draw.choice(INTEGERS) % 256 ** struct.calcsize(form)
    packed = struct.pack(form, value)
    place = _place(draw, data)
    place -= place % len(packed) if draw.random() < 0.7 else 0
    data[place : place + len(packed)] = packed


def overwrite(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Write random bytes, or one byte again and again, to a span."""
    place = _place(draw, data)
    length = min(draw.choice((1, 4, 16, 64, 4096)), len(data) - place)
    constant = bytes([draw.choice((0, 1, 127, 128, 255))]) * length
    data[place : place + length] = draw.choice((constant, draw.randbytes(length)))


def truncate(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Remove the end."""
    del data[_place(draw, data) if draw.random() < 0.5 else max(0, len(data) - draw.randrange(1, 9)) :]


def extend(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Append bytes."""
    data += draw.randbytes(draw.choice((1, 3, 4, 24, 200)))


def remove(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Remove a span."""
    place = _place(draw, data)
    del data[place : place + draw.choice((1, 4, 8, 50))]


def repeat(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Repeat a span."""
    place = _place(draw, data)
    data[place:place] = data[place : place + draw.choice((1, 4, 24, 100))]


def insert_word(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Insert a word that has a meaning in YAML or JSON."""
    place, found = _place(draw, data), draw.choice(WORDS)
    data[place : place + draw.choice((0, 0, 1, len(found)))] = found


def splice(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Replace the end by that of another input."""
    other = draw.choice(others)
    data[_place(draw, data) :] = other[draw.randrange(len(other) + 1) :]


def repair_header(draw: random.Random, data: Bytes, others: Sequence[bytes]) -> None:
    """Restore the header and length of a payload, so that the decoder reads what follows."""
    valid = next((other for other in others if other[:2] == wire.MAGIC), None)
    if valid is not None:
        data[: wire.NUM_BYTES] = valid[: wire.NUM_BYTES]
        del data[len(valid) :]
        data += bytes(len(valid) - len(data))


CHANGES: tuple[Change, ...] = (flip, number, overwrite, truncate, extend, remove, repeat, insert_word, splice)


def mutation(name: str, seed: int, count: int, inputs: Sequence[bytes]) -> bytes:
    """Return mutation ``count`` of a decoder's inputs."""
    draw = random.Random(f"{name} {seed} {count}")
    data = bytearray(draw.choice(inputs))
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        draw.choice(CHANGES)(draw, data, inputs)
    if draw.random() < 0.4:
        repair_header(draw, data, inputs)
    return bytes(data)
