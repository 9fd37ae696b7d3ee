"""Reference implementation of fft, independent of the package."""

from __future__ import annotations

import numpy as np

from hvdcompress.parts.rangefloat import RangeFloatCodec
from tests.oracles.rangefloat import Oracle as RangeFloat
from tests.oracles.rangefloat import mantissa_of


def lengths(n: int, block: int) -> list[int]:
    block = min(block or n, n)
    return [block] * (n // block) + [n % block] * (n % block > 0) if n else []


def matrix(length: int) -> np.ndarray:
    """Return the unitary DFT of a real vector of this length, from its definition [bins, length]."""
    turns = np.outer(np.arange(length // 2 + 1), np.arange(length)) % length / length
    return np.exp(-2j * np.pi * turns) / np.sqrt(length)


def weights(length: int) -> np.ndarray:
    """Return how often each bin occurs in the full spectrum: DC and Nyquist once, all others twice."""
    return np.array([1 if 2 * k in (0, length) else 2 for k in range(length // 2 + 1)])


class Oracle:
    """The paper's algorithm with matrices in float64, sorting and no bytes, without the package's code."""

    def __init__(self, world_size: int, n: int, density: float, block: int, feedback: bool = False, bits: int = 0):
        self.parts = np.cumsum([0, *lengths(n, block)])
        self.k = max(1, int(sum(length // 2 + 1 for length in lengths(n, block)) * density + 1e-9))
        self.memory = [np.zeros(n) for _ in range(world_size)]
        self.feedback, self.bits = feedback, bits

    def spectrum(self, x: np.ndarray) -> np.ndarray:
        bounds = zip(self.parts[:-1], self.parts[1:], strict=True)
        return np.concatenate([matrix(stop - start) @ x[start:stop] for start, stop in bounds])

    def inverse(self, spectrum: np.ndarray) -> np.ndarray:
        out, at = [], 0
        for length in np.diff(self.parts):
            bins = length // 2 + 1
            out.append((matrix(length).conj().T @ (weights(length) * spectrum[at : at + bins])).real)
            at += bins
        return np.concatenate(out)

    def kept(self, x: np.ndarray) -> np.ndarray:
        spectrum = self.spectrum(x)
        order = sorted(range(len(spectrum)), key=lambda i: (-abs(spectrum[i]), i))
        spectrum[order[self.k :]] = 0
        if self.bits:
            sent = spectrum[order[: self.k]]
            flat = np.float32(np.concatenate([sent.real, sent.imag]))
            coder = RangeFloat(flat, self.bits, mantissa_of(flat, RangeFloatCodec(self.bits)))
            decoded = np.array([coder.decode(coder.encode(float(f))) for f in flat])
            spectrum[order[: self.k]] = decoded[: self.k] + 1j * decoded[self.k :]
        return spectrum

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = 0
        for rank, gradient in enumerate(gradients):
            u = gradient + self.memory[rank]
            sent = self.kept(u)
            total = total + sent
            self.memory[rank] = u - self.inverse(sent) if self.feedback else 0 * u
        return self.inverse(total)
