"""Specification of the array ops: the base class of all backends, with the documentation of each op.

Methods call the ops of :class:`Ops`. Every backend (``ops/numpy``, ``ops/numba``, ``ops/torch``, ``ops/triton``) is a
subclass. ``ops/numpy`` is the reference. The other backends return the same bytes; an op marked "to rounding" may
differ in the last bits.

Conventions:

- Arrays are one-dimensional. [n] after an array is its length. A matrix [rows × m] is stored flat, row by row.
- Values are float32, indices are int32 (int64 if the tensor has 2^31 elements or more), and payloads are uint8 in
  little-endian order, unless an op says otherwise.
- Results are new arrays. Inputs are never changed, except by ops that say "in place" or have an argument ``out``.
- |x| is the elementwise absolute value.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdcompress.ops.scan import NOTHING, Found, Norm, Scan, Span, Velocity
from hvdcompress.ops.shared import (
    FP32_MAX_BITS,
    PIECE,
    between,
    bins,
    centred,
    chunks_of,
    combined,
    f32,
    forward_scale,
    half_bits,
    index_dtype,
    inverse_scale,
    mix,
    moments_of,
    outer_sum,
    range_bits_of,
    range_codes_of,
    range_errors,
    range_space,
    range_span,
    round_keys,
)
from hvdcompress.ops.vectors import (
    FP16_MAX,
    FP32_MAX,
    Array,
    Coded,
    Codes,
    Fields,
    Flag,
    Half,
    Joined,
    NumpyArray,
    Outer,
    Scalar,
    Shares,
    Sparse,
    Spectra,
    Sum,
    dtype_name,
)


class Ops(ABC):
    """The array ops. Each backend is a subclass.

    An op has code here if it can be written in functions that numpy and torch have under the same name.

    Attributes:
        xp: The array library: the module ``numpy`` or ``torch``.
    """

    xp: Any

    @property
    @abstractmethod
    def fft(self) -> Any:
        """The library's Fourier transforms: the module ``scipy.fft`` or ``torch.fft``."""

    # -- memory: create, view and rearrange arrays ------------------------------------------------------------------

    @abstractmethod
    def zeros(self, size: int, dtype: str, like: Array) -> Array:
        """Return [size] zeros of ``dtype`` on the device of ``like``."""

    @abstractmethod
    def asarray(self, values: NumpyArray, like: Array) -> Array:
        """Move a numpy array to the device of ``like``. The result may share memory with ``values``."""

    def concat(self, arrays: list[Array], out: Array | None = None) -> Array:
        """Concatenate arrays, into ``out`` if given. A list of one array without ``out`` returns it, not a copy."""
        return arrays[0] if len(arrays) == 1 and out is None else self.xp.concatenate(arrays, out=out)

    @abstractmethod
    def to_bytes(self, x: Array) -> Array:
        """Return the bytes of ``x`` as uint8, little-endian; may be a view."""

    @abstractmethod
    def from_bytes(self, buffer: Array, dtype: str) -> Array:
        """Interpret bytes as ``dtype``; a view if the bytes are aligned, otherwise a copy.

        Args:
            buffer: uint8; its length is a multiple of the item size of ``dtype``.
            dtype: numpy's name of the dtype.
        """

    def head_bytes(self, buffer: Array, num_bytes: int) -> bytes:
        """Copy the first ``num_bytes`` bytes of ``buffer`` (uint8) to the host. Meant for payload headers."""
        return bytes(buffer[:num_bytes].tolist())

    def take(self, x: Array, index: Array) -> Array:
        """Return x[index] [k]. ``index`` [k] is int32 or int64, each index in [0, n)."""
        return x[self._cast(index, "int64")]

    def take_parts(
        self,
        parts: Sequence[Array],
        spans: Sequence[Span],
        index: Array,
        table: Array | None = None,
        entries: Array | None = None,
    ) -> Array:
        """Return x[index]·table[entries] [k] of a vector x that is given by its parts; x[index] without a table.

        Args:
            parts: float32 arrays.
            spans: (start, stop) of the parts in the vector. Results are undefined for indices outside of all of them.
            index: [k], as for :meth:`take`, ascending.
            table: factors [m], float32.
            entries: for each index, that of its factor: [k] int8 in [0, m).
        """
        values = self.zeros(len(index), "float32", like=index)
        for part, (inside, at) in zip(parts, self._inside(spans, index), strict=True):
            taken = self.take(part, at)
            values[inside] = taken if table is None or entries is None else taken * self.take(table, entries[inside])
        return values

    def add_parts(
        self, parts: Sequence[Array], spans: Sequence[Span], index: Array | None, values: Any, factor: float
    ) -> None:
        """Add factor·values to the elements at ``index`` of a vector that is given by its parts, in place.

        Args:
            parts: float32 arrays.
            spans: as for :meth:`take_parts`. Indices outside of all of them are ignored.
            index: [k], as for :meth:`take`, ascending and without duplicates. None for all elements of the parts.
            values: [k] float32; without ``index`` an array for each part.
            factor: the factor.
        """
        if index is None:
            for part, own in zip(parts, values, strict=True):
                part += own * f32(factor)
            return
        for part, (inside, at) in zip(parts, self._inside(spans, index), strict=True):
            part[at] += values[inside] * f32(factor)

    def _inside(self, spans: Sequence[Span], index: Array) -> Iterator[tuple[slice, Array]]:
        """For each span, return where its elements are in an ascending index, and the index relative to the span."""
        for span in spans:
            bounds = self.asarray(np.array(span, dtype_name(index)), like=index)
            inside = slice(*self.searchsorted(index, bounds).tolist())
            yield inside, index[inside] - span[0]

    def stamp(self, stamps: Array, now: int, index: Array, out: Array) -> Array:
        """Return the ages of the elements at ``index``, and mark these elements as updated now.

        Sets out = stamps, with ``now`` at ``index``.

        Args:
            stamps: [n] int8, the time of each element's last update. Its age is now − stamp modulo 2^8, as an int8.
            now: The current time, an int8.
            index: [k], as for :meth:`take`; may contain duplicates. Ascending ones are fast.
            out: [n] int8; not ``stamps`` itself.

        Returns:
            The ages before the update [k] int8.
        """
        out[...] = stamps
        out[index] = now
        return now - stamps[index]

    def distinct(self, index: Array, n: int) -> Array:
        """Return the different elements of ``index``, ascending, in the dtype of ``index_dtype(n)``.

        Args:
            index: [k], as for :meth:`take`.
            n: The length of the vector that the indices refer to.
        """
        return self.xp.unique(self._cast(index, index_dtype(n)))

    @abstractmethod
    def sort(self, x: Array) -> Array:
        """Return the elements of ``x`` in ascending order."""

    def searchsorted(self, ascending: Array, x: Array) -> Array:
        """Return for each element of ``x`` the number of elements of ``ascending`` below it [len(x)] int64.

        Both are int32 or int64.
        """
        return self.xp.searchsorted(self._cast(ascending, "int64"), self._cast(x, "int64"))

    # -- arithmetic: add, subtract and write dense and sparse vectors -----------------------------------------------

    def accumulate(
        self,
        gradient: Array,
        residual: Array,
        scale: float,
        out: Array,
        scan: Scan = NOTHING,
        velocity: Velocity | None = None,
    ) -> Found:
        """Set out = scale·gradient + residual, in place, and compute what ``scan`` requests of ``out``.

        Backends do both in one pass over memory where they can. Products are rounded to float32 before they are added,
        on every device (no fused multiply-add).

        Args:
            gradient: [n].
            residual: [n].
            scale: Factor of the gradient; rounded to float32 first.
            out: [n]; neither ``gradient`` nor ``residual``.
            scan: The statistics to compute.
            velocity: If given, set velocity.new = velocity.momentum·velocity.old + scale·gradient, and add
                velocity.new to the residual instead of scale·gradient.

        Returns:
            The statistics. If ``out`` contains NaN or Inf, only ``finite`` is defined.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # Found.finite reports NaN and Inf
            if velocity is not None:
                self.xp.multiply(velocity.old, f32(velocity.momentum), out=velocity.new)
                velocity.new[...] += gradient if scale == 1.0 else gradient * f32(scale)
                return self.accumulate(velocity.new, residual, 1.0, out, scan)
            if scale == 1.0:
                self.xp.add(gradient, residual, out=out)
            else:  # two steps, because one call may fuse them and round once
                self.xp.multiply(gradient, f32(scale), out=out)
                out += residual
        return self.inspect(out, scan)

    def accumulate_parts(
        self,
        gradients: Sequence[Array],
        residual: Array,
        scales: Sequence[float],
        out: Array,
        spans: Sequence[Span],
        scans: Sequence[Scan],
        velocity: Velocity | None = None,
    ) -> list[Found]:
        """Call :meth:`accumulate` for several gradients, each of which belongs to one part of the other vectors.

        Args:
            gradients: Arrays, each as long as its span.
            residual: [n].
            scales: Factor of each gradient.
            out: [n].
            spans: (start, stop) of each gradient's part; the parts do not overlap.
            scans: The statistics to compute for each part.
            velocity: Momentum of all parts, arrays [n].

        Returns:
            The statistics of each part, in the order of the gradients.
        """
        found = []
        for gradient, scale, (start, stop), scan in zip(gradients, scales, spans, scans, strict=True):
            part = slice(start, stop)
            velocity_part = None
            if velocity is not None:
                velocity_part = Velocity(velocity.old[part], velocity.new[part], velocity.momentum)
            found.append(self.accumulate(gradient, residual[part], scale, out[part], scan, velocity_part))
        return found

    def inspect(self, x: Array, scan: Scan) -> Found:
        """Compute what ``scan`` requests of ``x``, as :meth:`accumulate` does of its output."""
        return self._results(x, self.all_finite(x), scan)

    def keep_if(self, finite: Flag, x: Array, other: Array | None = None) -> None:
        """Keep x if ``finite``; otherwise set x = other in place, or x = 0 without ``other``.

        The host does not wait for a flag that is on a device.

        Args:
            finite: The flag from :meth:`accumulate`, :meth:`inspect` or :meth:`all_finite`.
            x: [n].
            other: [n].
        """
        if not finite:
            x[...] = 0 if other is None else other

    def blend(self, x: Array, residual: Array, beta: float) -> None:
        """Set x = beta·x + (1−beta)·residual, in place."""
        x *= f32(beta)
        x += residual * f32(1.0 - beta)

    def subtract(self, x: Array, own: Array | Sparse | Coded, factor: float) -> None:
        """Set x = x − factor·own, in place.

        Args:
            x: [n].
            own: Dense [n], coded or sparse. Sparse indices are in [0, n) and distinct; duplicates with the value 0
                are allowed. Check indices from the network with :meth:`all_below` first.
            factor: Rounded to float32 first.
        """
        own = self.dense(own) if isinstance(own, Coded) else own
        if isinstance(own, Sparse):
            self._add_sparse(x, own.index, own.values * -f32(factor))
        else:
            x -= own if factor == 1.0 else own * f32(factor)

    def zero_where(self, x: Array, own: Array | Sparse) -> None:
        """Set x = 0, in place, wherever ``own`` (dense [n] or sparse) is not 0."""
        chosen = own.index[own.values != 0] if isinstance(own, Sparse) else own != 0
        x[chosen] = 0

    def write(self, out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
        """Set out = factor·total, in place and in the dtype of ``out``.

        Args:
            out: [n] float32 or float64.
            total: Dense [n], coded, or sparse vectors with indices in [0, n). Values with equal indices are added in
                their order, so that all ranks and all devices get the same bits.
            factor: Rounded to float32 first, unless ``total`` is float64.
        """
        if isinstance(total, Shares):
            index, values = zip(*total.each, strict=True)
            total = Sparse(self.concat([*index]), self.concat([*values]))
        total = self.dense(total) if isinstance(total, Coded) else total
        if isinstance(total, Sparse):
            out[...] = 0
            self._add_in_order(out, total.index, self._cast(total.values * f32(factor), dtype_name(out)))
        elif factor == 1.0:
            out[...] = total
        else:
            self.xp.multiply(total, factor if dtype_name(total) == "float64" else f32(factor), out=out)

    def dense(self, x: Array | Coded) -> Array:
        """Decode a coded vector to float32 [n]; return an array unchanged."""
        if isinstance(x, Half):
            return self._halves(x)
        if isinstance(x, Codes):
            return self._look_up(x)
        if isinstance(x, Fields):
            return self._separate(x)
        if isinstance(x, Sum):
            return self.add_all([self.dense(share) for share in x.shares])
        if isinstance(x, Joined):
            return self.concat([self.dense(part) for part in x.parts])
        if isinstance(x, Outer):
            return outer_sum(x)
        return self.scaled(self._inverse(x), x.after, x.limit) if isinstance(x, Spectra) else x

    def write_parts(self, outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
        """Call :meth:`write` for an output that consists of several arrays.

        Args:
            outs: The parts of the output, in their order, of one dtype.
            total: As long as all parts together. Dense, coded (neither :class:`Outer` nor :class:`Spectra`), or sparse
                with indices in several ascending runs.
            factor: Rounded to float32 first, unless ``total`` is float64.
        """
        whole = self.zeros(sum(map(len, outs)), dtype_name(outs[0]), like=outs[0])
        self.write(whole, total, factor)
        start = 0
        for out in outs:
            out[...] = whole[start : start + len(out)]
            start += len(out)

    def add_all(self, arrays: list[Array], into_first: bool = False) -> Array:
        """Return the sum of arrays of one length and dtype, added in their order and rounded after each addition.

        Args:
            arrays: At least one array.
            into_first: Whether to write the sum over the first array.
        """
        total = arrays[0] if into_first else arrays[0] * 1  # a copy, in every library
        for array in arrays[1:]:
            total += array
        return total

    def merge(self, a: Sparse, b: Sparse, n: int) -> Sparse:
        """Return the sum of two sparse vectors.

        Args:
            a: A sparse vector with distinct indices.
            b: A sparse vector with distinct indices.
            n: The length of the dense vectors; it determines the dtype of the indices.

        Returns:
            Distinct ascending indices and their values [m] float32. Each value is the sum of at most two numbers, which
            does not depend on their order, so every device returns the same bits.
        """
        index, place = self.xp.unique(self.concat([a.index, b.index]), return_inverse=True)
        values = self.zeros(len(index), "float32", like=index)
        values[place[: len(a.index)]] += a.values  # the indices of each vector are distinct
        values[place[len(a.index) :]] += b.values
        return Sparse(self._cast(index, index_dtype(n)), values)

    def scaled(self, x: Array, factor: float, limit: float = FP32_MAX) -> Array:
        """Return factor·x, clipped to ±limit."""
        with np.errstate(over="ignore"):  # Inf is clipped
            return (x * f32(factor)).clip(-f32(limit), f32(limit))

    # -- statistics: means, norms and other numbers about an array ---------------------------------------------------

    def moments(self, x: Array) -> tuple[float, float]:
        """Return the mean and the unbiased standard deviation of ``x``, accumulated in float64.

        Backends agree to about 1e-14 of the root mean square. The standard deviation is exactly 0 if all elements are
        equal, and for one element or none.
        """
        wide = self._cast(x, "float64")
        total, squares = self.xp.stack([wide.sum(), (wide * wide).sum()]).tolist()
        return moments_of(total, squares, len(x))

    def max_abs(self, x: Array) -> float:
        """Return the largest |x|, or 0 for an empty array."""
        return float(abs(x).max()) if len(x) else 0.0

    def l2_norm(self, x: Array) -> float:
        """Return the Euclidean norm of ``x``, to rounding. The float64 squares neither over- nor underflow."""
        wide = self._cast(x, "float64")
        return math.sqrt((wide * wide).sum())

    def bucket_norms(self, x: Array, bucket: int, norm: Norm) -> Array:
        """Return the norm of each bucket of ``bucket`` consecutive elements; the last bucket may be shorter.

        Sums are float64 and added in a fixed order, so that all backends return the same bits: a piece of 512 elements
        is folded in half (the second half is added to the first) until one number is left; then the sums of the pieces
        are folded in the same way.

        Args:
            x: [n].
            bucket: Bucket size, 1 or more; may exceed n.
            norm: "max", "l2" or "mean" (the mean |x|).

        Returns:
            The norms [⌈n/bucket⌉]. No |x| exceeds the "max" or "l2" norm of its bucket. An "l2" norm beyond float32
            becomes the largest finite float32.
        """
        bucket = max(1, min(bucket, len(x)))
        rows = abs(self._rows(x, bucket))
        if norm == "max":
            return self.xp.amax(rows, 1)
        rows = self._cast(rows, "float64")
        if norm == "mean":
            starts = self.xp.arange(0, len(x), bucket, device=x.device)
            return self._cast(self._folded(rows) / (len(x) - starts).clip(max=bucket), "float32")
        # a sum is at least its largest term, and every step rounds to nearest, so no |x| exceeds the norm
        return self._cast((self._folded(rows * rows) ** 0.5).clip(max=FP32_MAX), "float32")

    @abstractmethod
    def all_finite(self, x: Array) -> Flag:
        """Return whether ``x`` (float32 or float64) contains neither NaN nor Inf."""

    def all_below(self, index: Array, n: int) -> bool:
        """Return whether every index is in [0, n)."""
        return bool(((index >= 0) & (index < n)).all())

    # -- selection: select elements by magnitude -----------------------------------------------------------------

    def top_k(self, x: Array, k: int) -> Array:
        """Return the indices of the k largest |x|, ascending [min(k, n)]; among equal magnitudes, the lowest."""
        if not 0 < k < len(x):
            return self.xp.arange(min(k, len(x)), dtype=getattr(self.xp, index_dtype(len(x))), device=x.device)
        magnitude = abs(x)
        threshold = self._kth(magnitude, k)
        above = self._where(magnitude > threshold)
        ties = self._where(magnitude == threshold)[: k - len(above)]
        return self.sort(self.concat([above, ties]))

    def top_k_parts(self, x: Array, counts: Sequence[int], sizes: Sequence[int]) -> Array:
        """Return the indices of the largest |x| in each part of a vector, ascending, as :meth:`top_k` does.

        Args:
            x: [n], the concatenation of the parts.
            counts: k of each part. A part with fewer elements returns all of them.
            sizes: Number of elements of each part.
        """
        starts = itertools.accumulate(sizes, initial=0)
        given = zip(counts, sizes, starts, strict=False)
        chosen = [self.top_k(x[start : start + size], k) + start for k, size, start in given]
        return self._cast(self.concat(chosen), index_dtype(len(x)))

    def kth_magnitude(self, x: Array, k: int) -> float:
        """Return the k-th largest |x|, for 1 ≤ k ≤ n, or 0 for an empty array."""
        return float(self._kth(abs(x), k)) if len(x) else 0.0

    def count_above(self, x: Array, threshold: Scalar) -> int:
        """Return the number of elements with |x| > threshold. The threshold is rounded to float32 first."""
        return int((abs(x) > f32(threshold)).sum())

    def first_above(self, x: Array, threshold: Scalar, capacity: int) -> Array:
        """Return the first ``capacity`` indices with |x| > threshold, ascending."""
        return self._where(abs(x) > f32(threshold))[:capacity]

    def first_equal(self, x: Array, threshold: Scalar, capacity: int) -> Array:
        """Return the first ``capacity`` indices with |x| = threshold, ascending."""
        return self._where(abs(x) == f32(threshold))[:capacity]

    def largest_of(
        self, candidates: Sequence[Sparse], counts: Sequence[int], starts: Sequence[int]
    ) -> tuple[Sparse, Array]:
        """Select the candidates of largest magnitude in each part of a vector; among equal magnitudes, the first.

        Args:
            candidates: Sparse vector of each part with at least ``counts`` entries; ascending indices in the part.
            counts: Number of entries to select in each part.
            starts: Index of each part's first element in the vector.

        Returns:
            The selected entries of all parts, one part after another, by their indices in the vector [Σ counts]; and
            for each part the smallest selected magnitude, 0 if none was selected.
        """
        index, values, least = [], [], []
        for candidate, k, start in zip(candidates, counts, starts, strict=True):
            chosen = self.top_k(candidate.values, k)
            index.append(candidate.index[chosen] + start)
            values.append(candidate.values[chosen])
            least.append(abs(values[-1]).min() if k else self.zeros(1, "float32", like=values[-1])[0])
        return Sparse(self.concat(index), self.concat(values)), self.xp.stack(least)

    def chunk_argmax(self, x: Array, chunk: int) -> Array:
        """Return the offset of the largest |x| in each chunk of ``chunk`` consecutive elements.

        Returns:
            Offsets from each chunk's first element [⌈n/chunk⌉] int32; among equal magnitudes, the lowest offset. The
            last chunk may be shorter.
        """
        whole = len(x) // chunk * chunk
        parts = [x[:whole].reshape(-1, chunk), x[whole:].reshape(1, -1)]
        return self._cast(self.concat([abs(part).argmax(1) for part in parts if len(part.ravel())] or [x]), "int32")

    def chunk_positions(self, offset: Array, chunk: int, sizes: Sequence[int]) -> Array:
        """Convert offsets within chunks, as :meth:`chunk_argmax` returns them, to indices.

        Args:
            offset: The offsets of consecutive parts of a vector, concatenated [k], k = Σ ⌈sizes[i]/chunk⌉.
            chunk: Number of elements of a chunk. Each part begins with a new chunk.
            sizes: Number of elements of each part.

        Returns:
            Indices in the whole vector [k]. An index beyond the end of its part, which only a damaged payload has,
            becomes the part's last index.
        """
        first, last = (self.asarray(each, like=offset) for each in chunks_of(tuple(sizes), chunk))
        return self._cast(self.xp.minimum(first + offset, last), index_dtype(sum(sizes)))

    # -- floats: 16-bit floats and range floats ------------------------------------------------------------------

    def to_fp16(self, x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, Any]:
        """Convert scale·x to float16, clipped to ±limit.

        Args:
            x: [n].
            scale: Rounded to float32 first.
            limit: At most the largest finite float16.
            out: [n] float16 that receives the result; by default a new array.

        Returns:
            [n] float16, rounded to nearest even; and the number of clipped elements, which is a tensor [1] if ``x`` is
            on a device, so that the host need not wait.
        """
        scaled = x * f32(scale)
        half = self._cast(scaled.clip(-f32(limit), f32(limit)), "float16")
        if out is not None:
            out[...] = half
        return half if out is None else out, (abs(scaled) > f32(limit)).sum()

    def to_bf16(self, x: Array, out: Array | None = None) -> Array:
        """Convert float32 to bfloat16, rounded to nearest even.

        Args:
            x: [n].
            out: [2n] uint8 that receives the result; by default a new array.

        Returns:
            The 16 bits of each number [n] as int16. Finite numbers stay finite: a number that would round to infinity
            becomes the largest bfloat16.
        """
        bits = x.view(self.xp.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # a signed shift: fits int16
        largest = ((bits >> 31) & -0x8000) | 0x7F7F
        half = self._cast(self.xp.where((rounded & 0x7FFF) >= 0x7F80, largest, rounded), "int16")
        if out is None:
            return half
        out[...] = self.to_bytes(half)
        return out

    def float_bounds(self, x: Array) -> Array:
        """Return max(x) and max(−x) [2] float32, each at least 0."""
        if not len(x):
            return self.zeros(2, "float32", like=x)
        return self.xp.stack([x.max(), -x.min()]).clip(0) + 0.0  # -0 becomes 0

    def range_mantissa(self, x: Array, bounds: Array, bits: int) -> Array:
        """Choose the number of mantissa bits of range floats that minimises the expected squared error.

        The expected squared error of a value is width²/12 of its bin; a value below the smallest bin becomes zero, and
        its error is the value itself. The errors are integers, so that all backends choose the same number.

        Args:
            x: A sample of the data [n], n ≤ 4096.
            bounds: Bounds of all data [2], as returned by :meth:`float_bounds`.
            bits: Bits per code, 2 to 24.

        Returns:
            [1] uint8, from max(1, bits − 8) to bits − 1, at most 22. If errors are equal, the smallest number.
        """
        xp = self.xp
        tried = xp.arange(*range_span(bits), dtype=xp.int32, device=x.device)
        errors = range_errors(x.view(xp.int32), self._edges(bounds), bits, 23 - tried[:, None], xp)
        return self._cast(tried[errors.argmin()].reshape(1), "uint8")

    def range_codes(self, x: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
        """Encode ``x`` as range floats: codes of the bins of constant relative width that cover the data's range.

        A bin contains the float32 numbers with equal sign, exponent and first ``mantissa`` bits. Code 0 is zero; then
        come the positive bins, then the negative bins, each in the order of their magnitudes. Magnitudes below the
        smallest bin that has a code become 0.

        Args:
            x: [n], within the bounds.
            bounds: [2], as returned by :meth:`float_bounds`.
            bits: Bits per code, 4 to 16.
            mantissa: Number of mantissa bits of a bin, 1 to 22; a number, or an array [1] uint8.

        Returns:
            Codes [n] int32, below 2^bits.
        """
        shift = self._shift(mantissa)
        space = range_space(self._edges(bounds), bits, shift, self.xp)
        return range_codes_of(x.view(self.xp.int32), space, shift, self.xp)

    def range_values(self, codes: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
        """Decode :meth:`range_codes`: return the middle of each code's bin, clipped to the bounds [n] float32.

        A damaged payload decodes to finite numbers too: undefined codes are read as the last code, bounds that are
        negative, NaN or Inf as finite bounds, and ``mantissa`` in an array is clipped to 1 … 22.
        """
        shift = self._shift(mantissa)
        edges = self._edges(bounds)
        space = range_space(edges, bits, shift, self.xp)
        return range_bits_of(self._cast(codes, "int32"), edges, space, shift, self.xp).view(self.xp.float32)

    # -- bits: integers of a few bits, and bitmaps ----------------------------------------------------------------

    def pack_bits(self, values: Array, width: int) -> Array:
        """Pack unsigned integers of ``width`` bits each without gaps, lowest bit first.

        Args:
            values: [n] int32 or int64, in [0, 2^width).
            width: Bits per integer, 0 or more.

        Returns:
            [⌈n·width/8⌉] uint8.
        """
        values = self._cast(values, "uint8" if width <= 8 else "int64")
        bits = (values[:, None] >> self._shifts(width, values)) & 1
        eight = self._rows(self._cast(bits, "uint8").reshape(-1), 8)
        return (eight << self._shifts(8, eight)).sum(1, dtype=self.xp.uint8)

    def unpack_bits(self, buffer: Array, width: int, count: int) -> Array:
        """Undo :meth:`pack_bits` [count] int64. A buffer that is too short is read as if zeros followed."""
        bits = self._bits(buffer, count * width).reshape(count, width)
        bits = bits if width <= 8 else self._cast(bits, "int64")
        return self._cast((bits << self._shifts(width, bits)).sum(1, dtype=bits.dtype), "int64")

    def set_bits(self, positions: Array, num_bits: int) -> Array:
        """Return a bitmap in which the bits at the given positions are set.

        Args:
            positions: [k] int32 or int64, distinct and in [0, num_bits).
            num_bits: Length of the bitmap in bits.

        Returns:
            [⌈num_bits/8⌉] uint8, lowest bit first.
        """
        bits = self.zeros(num_bits, "uint8", like=positions)
        bits[positions] = 1
        return self.pack_bits(bits, 1)

    def find_bits(self, buffer: Array, num_bits: int) -> Array:
        """Return the positions of the set bits among the first ``num_bits`` bits, ascending int64.

        A buffer that is too short is read as if zeros followed.
        """
        return self.xp.argwhere(self._bits(buffer, num_bits)).reshape(-1)

    def elias_fano(self, index: Array, low: int, num_bits: int) -> tuple[Array, Array]:
        """Code ascending indices: their low bits in binary, their high bits in unary (Elias 1974; Fano 1971).

        Args:
            index: [k] int32 or int64, ascending.
            low: Number of low bits, at most 56.
            num_bits: Length of the bitmap, more than (index[k − 1] >> low) + k − 1.

        Returns:
            The low bits, packed by :meth:`pack_bits` [⌈k·low/8⌉] uint8; and a bitmap in which the bits
            (index[i] >> low) + i are set [⌈num_bits/8⌉] uint8.
        """
        index = self._cast(index, "int64")
        place = self.xp.arange(len(index), device=index.device)
        return self.pack_bits(index & ((1 << low) - 1), low), self.set_bits((index >> low) + place, num_bits)

    def from_elias_fano(self, lows: Array, highs: Array, low: int, num_bits: int) -> Array:
        """Undo :meth:`elias_fano`.

        Returns:
            Ascending indices int64, one for each set bit among the first ``num_bits`` bits of ``highs``. Buffers that
            are too short are read as if zeros followed.
        """
        positions = self.find_bits(highs, num_bits)
        place = self.xp.arange(len(positions), device=positions.device)
        return ((positions - place) << low) + self.unpack_bits(lows, low, len(positions))

    # -- codes: rounding to levels, signs, and packed fields that can be added ---------------------------------------

    @abstractmethod
    def uniform(self, key: NumpyArray, count: int, like: Array, start: int = 0) -> Array:
        """Return uniform random numbers: ``count`` numbers of the stream of ``key``, from index ``start`` on.

        Args:
            key: [1] uint32, on the host.
            count: Number of random numbers.
            like: An array on the device of the result.
            start: Index of the first number in the stream; start + count ≤ 2^32.

        Returns:
            [count] float32: multiples of 2^-24 in [0, 1). Number i has the upper 24 bits of h(h(i + key) ^ key), where
            h is the finalizer of MurmurHash3 (:func:`hvdcompress.ops.shared.mix`).
        """

    def distinct_indices(self, key: NumpyArray, k: int, n: int) -> NumpyArray:
        """Draw k distinct indices below n: the first k of a random permutation of 0 … n − 1.

        The permutation is a Feistel network of four rounds over the smallest power of four ≥ n. Results beyond n − 1
        are permuted again until they are in range ("cycle walking", Black & Rogaway 2002). The cost is proportional to
        k, not to n.

        Args:
            key: [1] uint32, on the host.
            k: Number of indices, at most n.
            n: Number of elements, 1 or more.

        Returns:
            Indices [k], ascending, on the host.
        """
        half = half_bits(n)
        keys = round_keys(key)
        mask = np.uint32((1 << half) - 1)

        def permute(x: NumpyArray) -> NumpyArray:
            left, right = (x >> half).astype(np.uint32), (x & int(mask)).astype(np.uint32)
            for round_key in keys:
                left, right = right, left ^ mix(right * np.uint32(0x9E3779B1) ^ round_key) & mask
            return left.astype(np.int64) << half | right.astype(np.int64)

        index = permute(np.arange(k, dtype=np.int64))
        while (outside := index >= n).any():
            index[outside] = permute(index[outside])
        return np.sort(index.astype(index_dtype(n)))

    def quantize(
        self, x: Array, norms: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None
    ) -> Array:
        """Round each element stochastically to one of the two nearest levels, and pack sign and level.

        The levels are 0 … s with s = 2^(bits−1) − 1. |x|/norm·s lies between two levels. Element i is rounded up if its
        distance from the lower level exceeds number i of the stream of ``key``, so the rounding is unbiased. |x| > norm
        is clipped to the norm.

        Args:
            x: [n].
            norms: The norm of each bucket [⌈n/bucket⌉] or more. A norm of 0 or less is read as 1.
            bucket: Number of elements that share a norm.
            bits: Bits per code, 2 to 8; the highest bit is the sign.
            key: [1] uint32, on the host, as for :meth:`uniform`.
            out: [⌈n·bits/8⌉] uint8 that receives the result; by default a new array.

        Returns:
            [⌈n·bits/8⌉] uint8, lowest bit first.

        Raises:
            IndexError: There are fewer norms than buckets.
        """
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf: the step will be discarded
            share = abs(self._in_norms(x, norms, bucket))
        share = self.xp.where(share < 1, share, 1.0) * ((1 << (bits - 1)) - 1)
        level = self.xp.floor(share)
        # share − level is exact, so a number that is equal to a level is not rounded
        level = level + (self.uniform(key, len(x), x) < share - level)
        codes = self._cast(level, "uint8") | (self._cast(self.xp.signbit(x), "uint8") << (bits - 1))
        return self._stored(self.pack_bits(codes, bits), out)

    def quantize_fields(
        self, x: Array, limit: float, norm: Array, width: int, key: NumpyArray, out: Array | None = None
    ) -> Array:
        """Round x/norm stochastically to −1, 0 or 1, as :meth:`quantize` with 2 bits does, and pack the integers.

        Args:
            x: [n]; it is clipped to ±limit first.
            limit: Rounded to float32 first.
            norm: [1]; a norm of 0 or less is read as 1.
            width: Bits per field, 2 to 32. All sums of fields must stay within ±(2^width − 1)/2.
            key: [1] uint32, on the host, as for :meth:`uniform`.
            out: int32 array that receives the result; by default a new array.

        Returns:
            Words [⌈n/p⌉] int32 with p = ⌊32/width⌋ integers v_j each: Σ v_j·2^(width·j). Adding words adds the
            integers.
        """
        share = abs(x).clip(max=f32(limit)) / self.xp.where(norm > 0, norm, 1.0)
        fields = self._cast((self.uniform(key, len(x), x) < share) * self.xp.sign(x), "int32")
        shift = self.xp.arange(0, 32 // width * width, width, dtype=self.xp.int32, device=x.device)
        return self._stored((self._rows(fields, len(shift)) << shift).sum(1, dtype=self.xp.int32), out)

    def encode_levels(
        self, x: Array, norms: Array, bucket: int, levels: NumpyArray, bits: int,
        key: NumpyArray | None = None, out: Array | None = None,
    ) -> Array:  # fmt: skip
        """Round x/norm to a table of levels, and pack each level's index.

        Args:
            x: [n].
            norms: As for :meth:`quantize`.
            bucket: Number of elements that share a norm.
            levels: [m] float32 on the host, ascending, 2 ≤ m ≤ 2^bits.
            bits: Bits per index.
            key: None: the nearest level; of two, the lower. Otherwise, as for :meth:`uniform`: the upper neighbour
                if number i < (x/norm − lower)/(upper − lower), else the lower one. Beyond the table: its end.
            out: [⌈n·bits/8⌉] uint8 that receives the result; by default a new array.
        """
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf: the step will be discarded
            share = self._in_norms(x, norms, bucket)
            if key is None:
                codes = self.xp.searchsorted(self.asarray(between(levels), like=x), share)
            else:
                table = self.asarray(levels, like=x)
                low = (self.xp.searchsorted(table, share, side="right") - 1).clip(0, len(levels) - 2)
                codes = low + (self.uniform(key, len(x), x) < (share - table[low]) / (table[low + 1] - table[low]))
        return self._stored(self.pack_bits(codes, bits), out)

    def pack_signs(self, x: Array) -> Array:
        """Return one bit per element, set if x < 0 [⌈n/8⌉] uint8, lowest bit first."""
        return self.pack_bits(x < 0, 1)

    # -- spectra: blockwise Fourier transforms --------------------------------------------------------------------

    def largest_frequencies(self, x: Array, block: int, k: int) -> Sparse:
        """Return the k frequencies of largest magnitude in the spectra of consecutive blocks of ``x``, to rounding.

        Each spectrum is divided by √(L·block), where L is the number of elements of its block. With this scale,
        magnitudes of bins from blocks of different lengths are comparable, and no number exceeds max|x|, so that
        nothing overflows.

        Args:
            x: [n], finite.
            block: Block length; the last block may be shorter. A block of L elements has ⌊L/2⌋ + 1 bins.
            k: Number of frequencies, at most the number of bins.

        Returns:
            The indices of the bins [k], ascending, and their alternating real and imaginary parts [2k].
        """
        whole = len(x) // block * block
        spectra = []
        for part, length in ((x[:whole], block), (x[whole:], len(x) - whole)):
            if len(part):
                wave = part.reshape(-1, length) * f32(forward_scale(length, block))
                spectra.append(self.fft.rfft(wave).reshape(-1).view(self.xp.float32))
        pairs = self.concat(spectra or [x]).reshape(-1, 2)
        wide = self._cast(pairs, "float64")
        index = self.top_k(self._cast((wide * wide).sum(1) ** 0.5, "float32"), k)
        return Sparse(index, pairs[index].reshape(-1))

    # -- matrices: layouts, products, orthonormal rows, principal components --------------------------------------

    def permute(self, x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
        """Reshape ``x`` [n] to ``shape``, transpose its axes, and return it flat [n]; may be a view."""
        return self.xp.moveaxis(x.reshape(shape), axes, tuple(range(len(axes)))).reshape(-1)

    def hadamard(self, x: Array, block: int) -> Array:
        """Multiply each block of ``x`` [n] by the orthonormal Hadamard matrix H[i, j] = (−1)^popcount(i & j) / √block.

        Elements are multiplied by 1/√block in float32; then one pass for each bit of the index, from the lowest one,
        replaces the elements a, where the bit is 0, and b, where it is 1, by a + b and a − b.

        Args:
            x: [n], where n is a multiple of ``block``.
            block: Block length, a power of two.
        """
        x = x * float(np.float32(block**-0.5))
        apart = 1
        while apart < block:
            pairs = x.reshape(-1, 2, apart)  # a view
            sums = pairs[:, 0] + pairs[:, 1]
            pairs[:, 1] = pairs[:, 0] - pairs[:, 1]
            pairs[:, 0] = sums
            apart *= 2
        return x

    def matmul(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        """Return a · b [rows × columns], to rounding, for a [rows × m] and b [m × columns]."""
        return (a.reshape(rows, -1) @ b.reshape(-1, columns)).ravel()

    def matmul_transposed(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        """Return a · bᵀ [rows × columns], to rounding, for a [rows × m] and b [columns × m]."""
        return (a.reshape(rows, -1) @ b.reshape(columns, -1).T).ravel()

    @abstractmethod
    def orthonormalise(self, x: Array, rows: int, key: NumpyArray | None = None) -> Array:
        """Return orthonormal rows with the span of the rows of ``x``, by Gram-Schmidt in float64.

        The op uses no matrix library, because its sums would depend on the processor and the number of threads. The
        numpy and numba backends add in the order of :meth:`bucket_norms`, so that different machines, and these two
        backends, agree to the bit.

        Args:
            x: [rows × m] float32 or float64.
            rows: Number of rows.
            key: [1] uint32, on the host, as for :meth:`uniform`. A row of ``x`` that is zero or linearly dependent on
                the rows before it is replaced by the same row of ``uniform(key, rows·m) − 1/2``; without ``key`` it
                becomes zero.

        Returns:
            [rows × m] float32, to rounding.
        """

    def principal(
        self, x: Array, rows: int, least: int, most: int, dropped: float, centre: bool = True
    ) -> tuple[Array, Array]:
        """Return the principal components of the rows of ``x``, as linear combinations of these rows.

        Args:
            x: [rows × m].
            rows: Number of rows.
            least: Minimum number of components.
            most: Maximum number of components.
            dropped: Share of the variance (without ``centre``, of the sum of squares) that may be dropped.
            centre: Whether to subtract the mean row first.

        Returns:
            d [1] int32, the smallest number of components from ``least`` to ``most`` that drops at most the share
            ``dropped``; and the weights of the rows in each component [most × rows] float32, to rounding and up to
            their signs. The weights after the d-th component are zero.
        """
        xp = self.xp
        # Rᵀ has the same left singular vectors and values as x, but only as many columns as rows
        triangle = xp.linalg.qr(self._wide(x, rows, centre).T, mode="r")
        left, sizes, _ = xp.linalg.svd(getattr(triangle, "R", triangle).T, full_matrices=False)
        beyond = xp.flip(xp.cumsum(xp.flip(sizes * sizes, (0,)), 0), (0,))  # beyond[i]: dropped with i components
        count = (beyond > dropped * beyond[:1]).sum().clip(least, most)
        weights = self.zeros(most * rows, "float32", like=x).reshape(most, rows)
        found = self._cast(left.T[:most], "float32")
        weights[: len(found)] = xp.where(xp.arange(len(found), device=x.device)[:, None] < count, found, 0.0)
        return self._cast(count, "int32").reshape(1), weights.reshape(-1)

    def combine(self, weights: Array, x: Array, rows: int, centre: bool = True) -> Array:
        """Return linear combinations of the rows of ``x``, added in a fixed order in float64.

        The op uses no matrix library, for the reason given at :meth:`orthonormalise`.

        Args:
            weights: [count × rows].
            x: [rows × m].
            rows: Number of rows.
            centre: Whether to subtract the mean row first.

        Returns:
            [count × m] float64.
        """
        return combined(self._cast(weights, "float64").reshape(-1, rows), self._wide(x, rows, centre))

    # -- parts of the ops ------------------------------------------------------------------------------------------

    def _results(self, x: Array, finite: Flag, scan: Scan) -> Found:
        """Compute what ``scan`` requests of ``x``, in one pass over ``x`` per result.

        ``finite``, whether x is finite, may be a tensor on a device, for which the host does not wait.
        """
        found = Found(finite)
        if finite is False:
            return found
        if scan.chunk:
            found = found._replace(offsets=self.chunk_argmax(x, scan.chunk))
        if scan.above is not None:
            index = self.first_above(x, scan.above, scan.capacity)
            if len(index) < scan.capacity:
                found = found._replace(above=Sparse(index, x[index]))
        if scan.product is not None:
            a, rows, _ = scan.product
            found = found._replace(product=self.matmul_transposed(a, x, rows, len(x) * rows // len(a)))
        if scan.halves is not None:
            _, saturated = self.to_fp16(x, *scan.halves)
            found = found._replace(saturated=saturated)
        return found

    def _halves(self, x: Half) -> Array:
        """Decode a vector of 16-bit floats."""
        if dtype_name(x.values) == "float16":
            return self._cast(x.values, "float32").clip(-FP16_MAX, FP16_MAX) * f32(x.scale)
        return (self._cast(x.values, "int32") << 16).view(self.xp.float32) * f32(x.scale)

    def _look_up(self, x: Codes) -> Array:
        """Decode a vector of indices of levels."""
        count = x.start + x.size
        indices = self.unpack_bits(x.codes, x.bits, count).clip(max=len(x.table) - 1)
        # the norms of a damaged payload may be negative, infinite or NaN
        norms = x.norms.view(self.xp.int32).clip(0, FP32_MAX_BITS).view(self.xp.float32)
        rows, norms = self._buckets(self.asarray(x.table, like=x.codes)[indices], norms, x.bucket)
        return (rows * norms).reshape(-1)[x.start : count]

    def _separate(self, x: Fields) -> Array:
        """Decode a vector of packed integers."""
        shifts = range(0, 32 // x.width * x.width, x.width)
        # after bound has been added to each field, no field is negative, and none borrows from the next field
        raised = self._cast(x.words, "int64") + sum(x.bound << distance for distance in shifts)
        shift = self.xp.arange(shifts.start, shifts.stop, shifts.step, device=x.words.device)
        fields = ((raised[:, None] >> shift) & ((1 << x.width) - 1)).reshape(-1)[x.start : x.start + x.size]
        return self._cast(fields - x.bound, "float32") * x.scale

    def _inverse(self, x: Spectra) -> Array:
        """Return the inverse transform of before · Σ shares [n], to rounding."""
        spectrum = self.zeros(2 * bins(x.n, x.block), "float32", like=x.shares[0].values).reshape(-1, 2)
        for share in x.shares:
            spectrum[share.index] += share.values.reshape(-1, 2) * f32(x.before)
        edge = x.n // x.block * (x.block // 2 + 1)
        waves = []
        for part, length in ((spectrum[:edge], x.block), (spectrum[edge:], x.n % x.block)):
            if len(part):
                bins_of_blocks = part.reshape(-1).view(self.xp.complex64).reshape(-1, length // 2 + 1)
                wave = self.fft.irfft(bins_of_blocks, length, norm="forward").reshape(-1)
                waves.append(wave * f32(inverse_scale(length, x.block)))
        return self.concat(waves or [spectrum.reshape(-1)])

    def _cast(self, x: Array, dtype: str) -> Array:
        """Convert an array to a dtype; ``x`` itself if it has it."""
        return self.xp.asarray(x, dtype=getattr(self.xp, dtype))

    def _where(self, condition: Array) -> Array:
        """Return the indices at which ``condition`` is true, ascending."""
        return self._cast(self.xp.argwhere(condition).reshape(-1), index_dtype(len(condition)))

    def _stored(self, x: Array, out: Array | None) -> Array:
        """Return ``x``, in ``out`` if given."""
        if out is None:
            return x
        out[...] = x
        return out

    def _rows(self, x: Array, width: int) -> Array:
        """Reshape ``x`` to rows of ``width`` elements; the last row is padded with zeros. May be a view."""
        missing = -len(x) % width
        return (self.concat([x, self.zeros(missing, dtype_name(x), like=x)]) if missing else x).reshape(-1, width)

    def _buckets(self, x: Array, norms: Array, bucket: int) -> tuple[Array, Array]:
        """Return the buckets of ``x`` as rows, and their norms as a column.

        Raises:
            IndexError: There are fewer norms than buckets.
        """
        rows = self._rows(x, max(1, min(bucket, len(x))))
        if len(norms) < len(rows):
            raise IndexError(f"{len(norms)} norms are too few for {len(x)} elements in buckets of {bucket}")
        return rows, norms[: len(rows), None]

    def _in_norms(self, x: Array, norms: Array, bucket: int) -> Array:
        """Return x/norm [n]; a norm of 0 or less is read as 1."""
        rows, norms = self._buckets(x, self.xp.where(norms > 0, norms, 1.0), bucket)
        return (rows / norms).reshape(-1)[: len(x)]

    def _folded(self, rows: Array) -> Array:
        """Return the sum of each row of ``rows``, float64, added in the order given at :meth:`bucket_norms`."""
        count, width = rows.shape
        if width > PIECE:
            padded = self.zeros(count * (width + -width % PIECE), "float64", like=rows).reshape(count, -1)
            padded[:, :width] = rows
            return self._folded(self._folded(padded.reshape(-1, PIECE)).reshape(count, -1))
        while width > 1:
            half = (width + 1) // 2
            rows[:, : width - half] += rows[:, half:width]
            width = half
        return rows[:, 0]

    def _shifts(self, width: int, like: Array) -> Array:
        return self.xp.arange(width, dtype=like.dtype, device=like.device)

    def _bits(self, buffer: Array, count: int) -> Array:
        """Return the first ``count`` bits of a buffer [count] uint8, lowest bit first; zeros follow its end."""
        bits = ((buffer[: -(-count // 8), None] >> self._shifts(8, buffer)) & 1).reshape(-1)[:count]
        return self.concat([bits, self.zeros(count - len(bits), "uint8", like=buffer)])

    def _shift(self, mantissa: int | Array) -> Any:
        """Return 23 − mantissa: a number, or [1] int32 for an array; an array may be damaged and is clipped."""
        return 23 - (mantissa if isinstance(mantissa, int) else self._cast(mantissa, "int32").clip(1, 22))

    def _edges(self, bounds: Array) -> Array:
        """Return the bits of the bounds [2] int32; damaged bounds become finite."""
        return bounds.view(self.xp.int32).clip(0, FP32_MAX_BITS)

    def _wide(self, x: Array, rows: int, centre: bool) -> Array:
        """Return x [rows × m] in float64, with ``centre`` minus the mean row."""
        wide = self._cast(x, "float64").reshape(rows, -1)
        return centred(wide) if centre else wide

    def _add_sparse(self, out: Array, index: Array, values: Array) -> None:
        """As :meth:`_add_in_order`; the values of duplicates are 0."""
        self._add_in_order(out, index, values)

    @abstractmethod
    def _add_in_order(self, out: Array, index: Array, values: Array) -> None:
        """Add values to ``out``, in place; values with equal indices are added in their order."""

    @abstractmethod
    def _kth(self, magnitudes: Array, k: int) -> Array:
        """Return the k-th largest number, as a scalar or an array of no dimension."""
