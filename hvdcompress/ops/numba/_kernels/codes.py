"""The loops of ``numba/codes.py``; ``numpy/codes.py`` is their reference, to the bit.

The hash is cast to uint32 at each step, because numba would widen it.
"""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, compiled
from hvdcompress.ops.shared import MIX_FACTORS

_FIRST, _SECOND = MIX_FACTORS


@compiled
def mix(x):
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(_FIRST))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(_SECOND))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@compiled
def quantize(x, bits_of_x, norms, bucket, width, key, out):
    """``norms``: none is 0."""
    levels, sign = np.float32((1 << (width - 1)) - 1), np.uint32(32 - width)
    top = np.uint32(1 << (width - 1))
    codes = np.zeros(BLOCK, np.uint8)
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        if stop - start < BLOCK:
            codes[:] = 0
        at = start
        while at < stop:
            j = at // bucket
            end = min(stop, (j + 1) * bucket)
            part, bits, code, norm = x[at:end], bits_of_x[at:end], codes[at - start : end - start], norms[j]
            first = np.uint32(at)
            for i in range(part.size):
                drawn = mix(np.uint32(mix(np.uint32(np.uint32(first + np.uint32(i)) + key)) ^ key))
                share = abs(part[i]) / norm
                share = (share if share < np.float32(1) else np.float32(1)) * levels
                level = np.int32(share)
                up = np.float32(np.int32(drawn >> np.uint32(8))) * np.float32(2.0**-24) < share - np.float32(level)
                code[i] = np.uint32(level + np.int32(up)) | (bits[i] >> sign & top)
            at = end
        # eight codes make ``width`` bytes
        for group in range(-(-(stop - start) // 8)):
            held = np.uint64(0)
            for i in range(8):
                held |= np.uint64(codes[8 * group + i]) << np.uint64(i * width)
            place = (start // 8 + group) * width
            for i in range(min(width, out.size - place)):
                out[place + i] = held & np.uint64(0xFF)
                held >>= np.uint64(8)


@compiled
def dequantize(buffer, norms, bucket, width, values, out, add):
    codes = np.zeros(BLOCK, np.uint8)
    mask = np.uint64((1 << width) - 1)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        for group in range(-(-(stop - start) // 8)):
            held, place = np.uint64(0), (start // 8 + group) * width
            for i in range(min(width, buffer.size - place)):
                held |= np.uint64(buffer[place + i]) << np.uint64(8 * i)
            for i in range(8):
                codes[8 * group + i] = held & mask
                held >>= np.uint64(width)
        at = start
        while at < stop:
            j = at // bucket
            end = min(stop, (j + 1) * bucket)
            part, code, norm = out[at:end], codes[at - start : end - start], norms[j]
            if add:
                for i in range(part.size):
                    part[i] += values[code[i]] * norm
            else:
                for i in range(part.size):
                    part[i] = values[code[i]] * norm
            at = end
