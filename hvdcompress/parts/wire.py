"""The header of every gathered payload: versioned, checked, and telling its own length.

24 bytes, little-endian::

    offset  0        2        3      4       6      8         16       20
            magic    version  codes  method  crc    elements  entries  length
            b"HC"    u8       u8     u16     u16    u64       u32      u32

``codes`` holds the index coding (high 4 bits) and the value coding (low 4 bits); ``method`` is a hash of
the method's id; ``crc`` is CRC-16/XMODEM of the other 22 bytes; ``elements`` is the tensor's size and
``length`` the payload's, header included. Summed payloads carry no header: a sum of headers is none.

Reading follows one rule: nothing is allocated, and nothing indexed, before it has been compared with
what the tensor itself implies. Bytes that are no payload raise :class:`WireError`.
"""

from __future__ import annotations

import binascii
import struct
from typing import NamedTuple

MAGIC = b"HC"
VERSION = 1
NUM_BYTES = 24
_LAYOUT = struct.Struct("<2sBBHHQII")


class WireError(ValueError):
    """These bytes are not a payload that could have been sent here."""


class Header(NamedTuple):
    """What a payload says of itself (see the module's table)."""

    method: str
    index_code: int
    value_code: int
    elements: int
    entries: int
    length: int


def method_code(method: str) -> int:
    """16-bit hash of a method id, so that third parties' methods need no registration."""
    return binascii.crc_hqx(method.encode(), 0xFFFF)


def pack(header: Header) -> bytes:
    """The header's 24 bytes."""
    codes = header.index_code << 4 | header.value_code
    counts = (header.elements, header.entries, header.length)
    bare = _LAYOUT.pack(MAGIC, VERSION, codes, method_code(header.method), 0, *counts)
    crc = binascii.crc_hqx(bare[:6] + bare[8:], 0)
    return _LAYOUT.pack(MAGIC, VERSION, codes, method_code(header.method), crc, *counts)


def length(buffer: bytes) -> int:
    """The length of the payload that begins here, after checking magic, version and CRC.

    Raises:
        WireError: these are not the first bytes of a payload.
    """
    if len(buffer) < NUM_BYTES:
        raise WireError(f"a payload has at least {NUM_BYTES} bytes, these are {len(buffer)}")
    head = bytes(buffer[:NUM_BYTES])
    magic, version, _, _, crc, _, _, num_bytes = _LAYOUT.unpack(head)
    if magic != MAGIC:
        raise WireError(f"a payload begins with {MAGIC!r}, not with {magic!r}")
    if version != VERSION:
        raise WireError(f"wire format {version} is not understood; this is version {VERSION} (update the older side)")
    if crc != binascii.crc_hqx(head[:6] + head[8:], 0):
        raise WireError("the header's checksum is wrong: the payload was damaged")
    if num_bytes < NUM_BYTES:
        raise WireError(f"the header claims a length of {num_bytes} bytes, less than itself")
    return num_bytes


def is_header(head: bytes, num_bytes: int) -> bool:
    """Whether a payload of ``num_bytes`` that begins with ``head`` has a header."""
    try:
        return length(head) == num_bytes
    except WireError:
        return False


def check(buffer: bytes, num_bytes: int, expected: Header) -> None:
    """Check the header at the start of a payload of ``num_bytes`` against the one expected.

    Raises:
        WireError: it is no header, or it announces something else than ``expected``.
    """
    if length(buffer) != num_bytes:
        raise WireError(f"the header announces {length(buffer)} bytes, the payload has {num_bytes}")
    if bytes(buffer[:NUM_BYTES]) == pack(expected):
        return
    _, _, codes, method, _, elements, entries, _ = _LAYOUT.unpack(bytes(buffer[:NUM_BYTES]))
    if method != method_code(expected.method):
        raise WireError(f"the payload is of another method than {expected.method!r}")
    if elements != expected.elements:
        raise WireError(f"the payload is of a tensor of {elements} elements, this one has {expected.elements}")
    raise WireError(f"the payload has {entries} entries in coding {codes:#04x}; expected {expected}")


def split(buffer: bytes, world: int) -> list[int]:
    """The lengths of the ``world`` payloads that stand one after another in ``buffer``.

    Raises:
        WireError: they do not fill the buffer exactly.
    """
    lengths, offset = [], 0
    for rank in range(world):
        try:
            lengths.append(length(buffer[offset : offset + NUM_BYTES]))
        except WireError as error:
            raise WireError(f"payload of rank {rank}, at byte {offset} of {len(buffer)}: {error}") from None
        offset += lengths[-1]
    if offset != len(buffer):
        raise WireError(f"{world} payloads announce {offset} bytes in all, {len(buffer)} came")
    return lengths
