"""The header of every gathered payload: versioned, checksummed, with the payload's length.

24 bytes, little-endian::

    offset  0        2        3      4       6      8         16       20
            magic    version  codes  method  crc    elements  entries  length
            b"HC"    u8       u8     u16     u16    u64       u32      u32

``codes`` holds the index coding (high 4 bits) and the value coding (low 4 bits); ``method`` is a hash of the method's
id; ``crc`` is CRC-16/XMODEM of the other 22 bytes; ``elements`` is the size of the tensor and ``length`` the bytes of
the payload with its header. Payloads that a network sums have no header, as headers cannot be summed.

When reading, nothing is allocated or indexed before it was compared with what the tensor implies. Bytes that are not a
payload raise :class:`WireError`.
"""

from __future__ import annotations

import binascii
import struct
from functools import lru_cache
from typing import NamedTuple

MAGIC = b"HC"
VERSION = 1
NUM_BYTES = 24
_LAYOUT = struct.Struct("<2sBBHHQII")


class WireError(ValueError):
    """The bytes received are not a valid payload for this tensor and method."""


class Header(NamedTuple):
    """The contents of a header (see the module's table)."""

    method: str  #: the method's id
    index_code: int  #: index coding, 0 to 15
    value_code: int  #: value coding, 0 to 15
    elements: int  #: elements of the tensor
    entries: int  #: entries in the payload
    length: int  #: bytes of the payload, header included


def method_code(method: str) -> int:
    """Return a 16-bit hash of a method's id. Third parties' methods need no registered number."""
    return binascii.crc_hqx(method.encode(), 0xFFFF)


@lru_cache(4096)  # a tensor has the same one in every step
def pack(header: Header) -> bytes:
    """Write a header in 24 bytes."""
    codes = header.index_code << 4 | header.value_code
    counts = (header.elements, header.entries, header.length)
    bare = _LAYOUT.pack(MAGIC, VERSION, codes, method_code(header.method), 0, *counts)
    crc = binascii.crc_hqx(bare[:6] + bare[8:], 0)
    return _LAYOUT.pack(MAGIC, VERSION, codes, method_code(header.method), crc, *counts)


def length(buffer: bytes) -> int:
    """Read the length of a payload from its header, after checking magic, version and CRC.

    Args:
        buffer: the payload, or at least its first 24 bytes.

    Returns:
        The bytes of the payload, header included.

    Raises:
        WireError: these are not the first bytes of a payload.
    """
    if len(buffer) < NUM_BYTES:
        raise WireError(f"payload damaged: it has {len(buffer)} bytes, expected at least {NUM_BYTES} bytes")
    head = bytes(buffer[:NUM_BYTES])
    magic, version, _, _, crc, _, _, num_bytes = _LAYOUT.unpack(head)
    if magic != MAGIC:
        raise WireError(f"payload damaged: a payload begins with {MAGIC!r}, this one with {magic!r}")
    if version != VERSION:
        raise WireError(
            f"the payload has wire format version {version}, this rank reads version {VERSION}; update the older side"
        )
    if crc != binascii.crc_hqx(head[:6] + head[8:], 0):
        raise WireError("payload damaged: the header's checksum is wrong")
    if num_bytes < NUM_BYTES:
        raise WireError(f"payload damaged: its header gives a length of {num_bytes} bytes, less than the header")
    return num_bytes


def is_header(head: bytes, num_bytes: int) -> bool:
    """Whether a payload of ``num_bytes`` that begins with ``head`` has a header."""
    try:
        return length(head) == num_bytes
    except WireError:
        return False


def check(buffer: bytes, num_bytes: int, expected: Header) -> None:
    """Compare the header of a payload with the header expected.

    Args:
        buffer: the payload, or at least its first 24 bytes.
        num_bytes: bytes of the payload that were received.
        expected: the header that the tensor and the method imply.

    Raises:
        WireError: it is not a header, or it differs from ``expected``.
    """
    if length(buffer) != num_bytes:
        raise WireError(f"the payload has {num_bytes} bytes, its header says {length(buffer)}")
    if bytes(buffer[:NUM_BYTES]) == pack(expected):
        return
    _, _, codes, method, _, elements, entries, _ = _LAYOUT.unpack(bytes(buffer[:NUM_BYTES]))
    if method != method_code(expected.method):
        raise WireError(f"the payload comes from another method than {expected.method!r}; give all ranks the same plan")
    if elements != expected.elements:
        raise WireError(
            f"the payload is of a tensor of {elements} elements, this one has {expected.elements}; "
            "give all ranks the same model"
        )
    raise WireError(
        f"the payload has {entries} entries in coding {codes:#04x}, expected {expected}; give all ranks the same plan"
    )


def split(buffer: bytes, world: int) -> list[int]:
    """Find the lengths of payloads that were gathered into one buffer.

    Args:
        buffer: the payloads of all ranks, one after another.
        world: number of ranks.

    Returns:
        The bytes of each rank's payload.

    Raises:
        WireError: the payloads do not fill the buffer exactly.
    """
    lengths, offset = [], 0
    for rank in range(world):
        try:
            lengths.append(length(buffer[offset : offset + NUM_BYTES]))
        except WireError as error:
            raise WireError(f"payload of rank {rank}, at byte {offset} of {len(buffer)}: {error}") from None
        offset += lengths[-1]
    if offset != len(buffer):
        raise WireError(f"received {len(buffer)} bytes, but the headers of {world} payloads say {offset}")
    return lengths
