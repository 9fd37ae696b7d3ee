"""The loops of coarse codes, compiled as those of ``_kernels.py`` are, and by the same habits.

``_numpy_codes.py`` is their reference, to the bit: the hash is cast to uint32 at each step (numba would widen it),
and float64 sums are folded in the reference's order.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import numpy as np

from hvdcompress.ops._kernels import BLOCK, MAGNITUDE, compiled
from hvdcompress.ops._numpy_codes import PIECE


@compiled
def mix(x):
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@compiled
def bucket_max(bits, bucket, out):
    for j in range(out.size):
        part = bits[j * bucket : (j + 1) * bucket]
        most = np.int32(0)
        for i in range(part.size):
            most = max(most, part[i] & MAGNITUDE)
        out[j] = most


@compiled
def piece_sums(x, bucket, squares, out):
    """Sums of x² or of |x| over each piece of each bucket [m, pieces]; the pieces' sums are left to be added."""
    wide = np.zeros(min(bucket, PIECE))
    for row in range(out.shape[0]):
        for piece in range(out.shape[1]):
            start = row * bucket + piece * wide.size
            part = x[start : min(start + wide.size, (row + 1) * bucket)]
            if part.size < wide.size:
                wide[:] = 0
            for i in range(part.size):
                value = np.float64(part[i])
                wide[i] = value * value if squares else abs(value)
            width = wide.size
            while width > 1:
                half = (width + 1) // 2
                low, high = wide[:half], wide[half:width]
                for i in range(high.size):
                    low[i] += high[i]
                width = half
            out[row, piece] = wide[0]


@compiled
def quantize(x, bits_of_x, norms, bucket, width, key, out):
    """``norms`` are not 0."""
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
def dequantize(buffer, norms, bucket, width, values, out):
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
            for i in range(part.size):
                part[i] = values[code[i]] * norm
            at = end
