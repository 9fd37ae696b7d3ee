"""The header of gathered payloads: versioned, with a checksum and the length of the payload.

24 bytes, little-endian::

    offset  0        2        3      4       6      8         16       20
            magic    version  codes  method  crc    elements  entries  length
            b"HC"    u8       u8     u16     u16    u64       u32      u32

``codes`` contains the index coding (high 4 bits) and the value coding (low 4 bits); ``method`` is a hash of the
method's id; ``crc`` is the CRC-16/XMODEM of the other 22 bytes; ``elements`` is the size of the tensor, and ``length``
the number of bytes of the payload including the header. Payloads that a network sums have no header, because headers
cannot be summed.

Readers compare every field with the expected values before they allocate or index anything. Bytes that are not a valid
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
    """The received bytes are not a valid payload for this tensor and method."""


class Header(NamedTuple):
    """Contents of a header (see the table in the module's docstring)."""

    method: str  #: id of the method
    index_code: int  #: index coding, 0 to 15
    value_code: int  #: value coding, 0 to 15
    elements: int  #: number of elements of the tensor
    entries: int  #: number of entries in the payload
    length: int  #: bytes of the payload, including the header


def method_code(method: str) -> int:
    """Return a 16-bit hash of a method's id. With a hash, methods of third parties need no registered number."""
    return binascii.crc_hqx(method.encode(), 0xFFFF)


@lru_cache(4096)  # the header of a tensor is the same in every step
def pack(header: Header) -> bytes:
    """Encode a header in 24 bytes."""
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
        The bytes of the payload, including the header.

    Raises:
        WireError: the bytes are not a valid header.
    """
    if len(buffer) < NUM_BYTES:
        raise WireError(f"payload damaged: it has {len(buffer)} bytes, expected at least {NUM_BYTES} bytes")
    head = bytes(buffer[:NUM_BYTES])
    magic, version, _, _, crc, _, _, num_bytes = _LAYOUT.unpack(head)
    if magic != MAGIC:
        raise WireError(f"payload damaged: it starts with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise WireError(
            f"the payload has wire format version {version}, this rank reads version {VERSION}; update the older one"
        )
    if crc != binascii.crc_hqx(head[:6] + head[8:], 0):
        raise WireError("payload damaged: the checksum of its header is wrong")
    if num_bytes < NUM_BYTES:
        raise WireError(f"payload damaged: the length in its header is {num_bytes} bytes, less than the header itself")
    return num_bytes


def entries(buffer: bytes, most: int) -> int:
    """Read the number of entries of a payload from its header, after the checks of :func:`length`.

    Raises:
        WireError: the bytes are not a valid header, or it has more than ``most`` entries.
    """
    length(buffer)
    count: int = _LAYOUT.unpack(bytes(buffer[:NUM_BYTES]))[6]
    if count > most:
        raise WireError(f"payload damaged: it has {count} entries of a tensor of {most}")
    return count


def is_header(head: bytes, num_bytes: int) -> bool:
    """Return whether a payload of ``num_bytes`` bytes that starts with ``head`` has a header."""
    try:
        return length(head) == num_bytes
    except WireError:
        return False


def check(buffer: bytes, num_bytes: int, expected: Header) -> None:
    """Compare the header of a payload with the expected header.

    Args:
        buffer: the payload, or at least its first 24 bytes.
        num_bytes: number of received bytes.
        expected: the header that follows from the tensor and the method.

    Raises:
        WireError: the bytes are not a header, or the header differs from ``expected``.
    """
    if length(buffer) != num_bytes:
        raise WireError(f"the payload has {num_bytes} bytes, but its header says {length(buffer)}")
    if bytes(buffer[:NUM_BYTES]) == pack(expected):
        return
    _, _, codes, method, _, elements, entries, _ = _LAYOUT.unpack(bytes(buffer[:NUM_BYTES]))
    if method != method_code(expected.method):
        raise WireError(f"the payload is of another method than {expected.method!r}; use the same plan on all ranks")
    if elements != expected.elements:
        raise WireError(
            f"the payload is of a tensor with {elements} elements, this one has {expected.elements}; "
            "use the same model on all ranks"
        )
    raise WireError(
        f"the payload has {entries} entries in coding {codes:#04x}, expected {expected}; use the same plan on all ranks"
    )


def split(buffer: bytes, world_size: int) -> list[int]:
    """Return the lengths of payloads that were gathered into one buffer.

    Args:
        buffer: the concatenated payloads of all ranks.
        world_size: number of ranks.

    Returns:
        The bytes of each rank's payload.

    Raises:
        WireError: the payloads do not fill the buffer exactly.
    """
    lengths = []
    offset = 0
    for rank in range(world_size):
        try:
            lengths.append(length(buffer[offset : offset + NUM_BYTES]))
        except WireError as error:
            raise WireError(f"payload of rank {rank}, at byte {offset} of {len(buffer)}: {error}") from None
        offset += lengths[-1]
    if offset != len(buffer):
        raise WireError(f"received {len(buffer)} bytes, but the headers of {world_size} payloads add up to {offset}")
    return lengths
