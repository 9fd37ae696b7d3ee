"""Specification of the array ops: the documentation of each op, for all backends.

Methods call the ops of :class:`Ops`. Every backend (``ops/numpy``, ``ops/numba``, ``ops/torch``, ``ops/triton``) is a
module that has exactly these functions. ``ops/numpy`` is the reference. The other backends return the same bytes; an
op marked "to rounding" may differ in the last bits.

Conventions:

- Arrays are one-dimensional. [n] after an array is its length. A matrix [rows × m] is stored flat, row by row.
- Values are float32, indices are int32 (int64 if the tensor has 2^31 elements or more), and payloads are uint8 in
  little-endian order, unless an op says otherwise.
- Results are new arrays. Inputs are never changed, except by ops that say "in place" or have an argument ``out``.
- |x| is the elementwise absolute value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hvdcompress.ops.scan import NOTHING, Found, Norm, Scan, Span, Velocity
from hvdcompress.ops.vectors import (
    FP16_MAX,
    FP32_MAX,
    Array,
    Coded,
    Flag,
    NumpyArray,
    Scalar,
    Shares,
    Sparse,
)


class Ops(Protocol):
    """The array ops. A backend is a module with these functions."""

    # -- memory: create, view and rearrange arrays ------------------------------------------------------------------

    def zeros(self, size: int, dtype: str, like: Array) -> Array:
        """Return [size] zeros of ``dtype`` on the device of ``like``."""

    def asarray(self, values: NumpyArray, like: Array) -> Array:
        """Move a numpy array to the device of ``like``. The result may share memory with ``values``."""

    def concat(self, arrays: list[Array], out: Array | None = None) -> Array:
        """Concatenate arrays, into ``out`` if given. A list of one array without ``out`` returns it, not a copy."""

    def to_bytes(self, x: Array) -> Array:
        """Return the bytes of ``x`` as uint8, little-endian; may be a view."""

    def from_bytes(self, buffer: Array, dtype: str) -> Array:
        """Interpret bytes as ``dtype``; a view if the bytes are aligned, otherwise a copy.

        Args:
            buffer: uint8; its length is a multiple of the item size of ``dtype``.
            dtype: numpy's name of the dtype. "uint16" may return any 16-bit integer type, as :meth:`to_bf16` does.
        """

    def head_bytes(self, buffer: Array, num_bytes: int) -> bytes:
        """Copy the first ``num_bytes`` bytes of ``buffer`` (uint8) to the host. Meant for payload headers."""

    def fill(self, out: Array, value: float) -> None:
        """Set every element of ``out`` to ``value``, in place."""

    def take(self, x: Array, index: Array) -> Array:
        """Return x[index] [k]. ``index`` [k] is int32 or int64, each index in [0, n)."""

    def stamp(self, stamps: Array, now: int, index: Array, out: Array) -> Array:
        """Return the ages of the elements at ``index``, and mark these elements as updated now.

        Sets out = stamps, with ``now`` at ``index``.

        Args:
            stamps: [n] int8, the time of each element's last update. Its age is now − stamp modulo 2^8, as an int8.
            now: The current time, an int8.
            index: [k], as for :meth:`take`; may contain duplicates. A few ascending runs are fast.
            out: [n] int8; not ``stamps`` itself.

        Returns:
            The ages before the update [k] int8.
        """

    def take_weighted(self, x: Array, index: Array, weights: Array, which: Array) -> Array:
        """Return x[index]·weights[which] [k].

        Args:
            x: [n] float32.
            index: [k], as for :meth:`take`.
            weights: [128] float32.
            which: [k] int8, not negative.
        """

    def add_once(self, x: Array, index: Array, values: Array, factor: float) -> None:
        """Set x[i] = x[i] + factor·v for each entry (i, v), in place.

        Args:
            x: [n].
            index: [k], as for :meth:`take`. Entries of the same index have the same value, which is added once.
            values: [k].
            factor: Rounded to float32 first.
        """

    def sort(self, x: Array) -> Array:
        """Return the elements of ``x`` in ascending order."""

    def searchsorted(self, ascending: Array, x: Array) -> Array:
        """Return for each element of ``x`` the number of elements of ``ascending`` below it [len(x)] int64.

        Both are int32 or int64.
        """

    def index_dtype(self, n: int) -> str:
        """Return the dtype of indices into n elements: "int32" for n < 2^31, otherwise "int64"."""

    def index_range(self, n: int, like: Array) -> Array:
        """Return 0, 1, …, n−1 in the dtype of :meth:`index_dtype`, on the device of ``like``."""

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

    def inspect(self, x: Array, scan: Scan) -> Found:
        """Compute what ``scan`` requests of ``x``, as :meth:`accumulate` does of its output."""

    def keep_if(self, finite: Flag, x: Array, other: Array | None = None) -> None:
        """Keep x if ``finite``; otherwise set x = other in place, or x = 0 without ``other``.

        The host does not wait for a flag that is on a device.

        Args:
            finite: The flag from :meth:`accumulate`, :meth:`inspect` or :meth:`all_finite`.
            x: [n].
            other: [n].
        """

    def blend(self, x: Array, residual: Array, beta: float) -> None:
        """Set x = beta·x + (1−beta)·residual, in place."""

    def subtract(self, x: Array, own: Array | Sparse | Coded, factor: float) -> None:
        """Set x = x − factor·own, in place.

        Args:
            x: [n].
            own: Dense [n], coded or sparse. Sparse indices are in [0, n) and distinct; duplicates with the value 0
                are allowed. Check indices from the network with :meth:`all_below` first.
            factor: Rounded to float32 first.
        """

    def zero_where(self, x: Array, own: Array | Sparse) -> None:
        """Set x = 0, in place, wherever ``own`` (dense [n] or sparse) is not 0."""

    def write(self, out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
        """Set out = factor·total, in place and in the dtype of ``out``.

        Args:
            out: [n] float32 or float64.
            total: Dense [n], coded, or sparse vectors with indices in [0, n). Values with equal indices are added in
                their order, so that all ranks and all devices get the same bits.
            factor: Rounded to float32 first, unless ``total`` is float64.
        """

    def dense(self, x: Array | Coded) -> Array:
        """Decode a coded vector to float32 [n]; return an array unchanged."""

    def write_parts(self, outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
        """Call :meth:`write` for an output that consists of several arrays.

        Args:
            outs: The parts of the output, in their order, of one dtype.
            total: As long as all parts together. Dense, coded (neither :class:`Outer` nor :class:`Spectra`), or sparse
                with indices in several ascending runs.
            factor: Rounded to float32 first, unless ``total`` is float64.
        """

    def add_all(self, arrays: list[Array], into_first: bool = False) -> Array:
        """Return the sum of arrays of one length and dtype, added in their order and rounded after each addition.

        Args:
            arrays: At least one array.
            into_first: Whether to write the sum over the first array.
        """

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

    def scaled(self, x: Array, factor: float, limit: float = FP32_MAX) -> Array:
        """Return factor·x, clipped to ±limit."""

    # -- statistics: means, norms and other numbers about an array ---------------------------------------------------

    def moments(self, x: Array) -> tuple[float, float]:
        """Return the mean and the unbiased standard deviation of ``x``, accumulated in float64.

        Backends agree to about 1e-14 of the root mean square. The standard deviation is exactly 0 if all elements are
        equal, and for one element or none.
        """

    def max_abs(self, x: Array) -> float:
        """Return the largest |x|, or 0 for an empty array."""

    def l2_norm(self, x: Array) -> float:
        """Return the Euclidean norm of ``x``, to rounding. The float64 squares neither over- nor underflow."""

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

    def all_finite(self, x: Array) -> Flag:
        """Return whether ``x`` (float32 or float64) contains neither NaN nor Inf."""

    def all_below(self, index: Array, n: int) -> bool:
        """Return whether every index is in [0, n)."""

    # -- selection: select elements by magnitude -----------------------------------------------------------------

    def top_k(self, x: Array, k: int) -> Array:
        """Return the indices of the k largest |x|, ascending [min(k, n)]; among equal magnitudes, the lowest."""

    def top_k_parts(self, x: Array, counts: Sequence[int], sizes: Sequence[int]) -> Array:
        """Return the indices of the largest |x| in each part of a vector, ascending, as :meth:`top_k` does.

        Args:
            x: [n], the concatenation of the parts.
            counts: k of each part. A part with fewer elements returns all of them.
            sizes: Number of elements of each part.
        """

    def kth_magnitude(self, x: Array, k: int) -> float:
        """Return the k-th largest |x|, for 1 ≤ k ≤ n, or 0 for an empty array."""

    def count_above(self, x: Array, threshold: Scalar) -> int:
        """Return the number of elements with |x| > threshold. The threshold is rounded to float32 first."""

    def first_above(self, x: Array, threshold: Scalar, capacity: int) -> Array:
        """Return the first ``capacity`` indices with |x| > threshold, ascending."""

    def first_equal(self, x: Array, threshold: Scalar, capacity: int) -> Array:
        """Return the first ``capacity`` indices with |x| = threshold, ascending."""

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

    def chunk_argmax(self, x: Array, chunk: int) -> Array:
        """Return the offset of the largest |x| in each chunk of ``chunk`` consecutive elements.

        Returns:
            Offsets from each chunk's first element [⌈n/chunk⌉] int32; among equal magnitudes, the lowest offset. The
            last chunk may be shorter.
        """

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

    def from_fp16(self, x: Array, scale: float) -> Array:
        """Return scale·x as float32. ±Inf, the result of a float16 sum that overflowed, reads as ±65504."""

    def to_bf16(self, x: Array, out: Array | None = None) -> Array:
        """Convert float32 to bfloat16, rounded to nearest even.

        Args:
            x: [n].
            out: [2n] uint8 that receives the result; by default a new array.

        Returns:
            The 16 bits of each number [n] as uint16 (int16 in torch, which has little support for uint16). Finite
            numbers stay finite: a number that would round to infinity becomes the largest bfloat16.
        """

    def from_bf16(self, bits: Array) -> Array:
        """Convert the bits of bfloat16 to float32, exactly."""

    def float_bounds(self, x: Array) -> Array:
        """Return max(x) and max(−x) [2] float32, each at least 0."""

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

    def range_values(self, codes: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
        """Decode :meth:`range_codes`: return the middle of each code's bin, clipped to the bounds [n] float32.

        A damaged payload decodes to finite numbers too: undefined codes are read as the last code, bounds that are
        negative, NaN or Inf as finite bounds, and ``mantissa`` in an array is clipped to 1 … 22.
        """

    # -- bits: integers of a few bits, and bitmaps ----------------------------------------------------------------

    def pack_bits(self, values: Array, width: int) -> Array:
        """Pack unsigned integers of ``width`` bits each without gaps, lowest bit first.

        Args:
            values: [n] int32 or int64, in [0, 2^width).
            width: Bits per integer, 0 or more.

        Returns:
            [⌈n·width/8⌉] uint8.
        """

    def unpack_bits(self, buffer: Array, width: int, count: int) -> Array:
        """Undo :meth:`pack_bits` [count] int64. A buffer that is too short is read as if zeros followed."""

    def set_bits(self, positions: Array, num_bits: int) -> Array:
        """Return a bitmap in which the bits at the given positions are set.

        Args:
            positions: [k] int32 or int64, distinct and in [0, num_bits).
            num_bits: Length of the bitmap in bits.

        Returns:
            [⌈num_bits/8⌉] uint8, lowest bit first.
        """

    def find_bits(self, buffer: Array, num_bits: int) -> Array:
        """Return the positions of the set bits among the first ``num_bits`` bits, ascending int64.

        A buffer that is too short is read as if zeros followed.
        """

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

    def from_elias_fano(self, lows: Array, highs: Array, low: int, num_bits: int) -> Array:
        """Undo :meth:`elias_fano`.

        Returns:
            Ascending indices int64, one for each set bit among the first ``num_bits`` bits of ``highs``. Buffers that
            are too short are read as if zeros followed.
        """

    # -- codes: rounding to levels, signs, and packed fields that can be added ---------------------------------------

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
            IndexError: There are fewer norms than buckets (RuntimeError in torch).
        """

    def quantize_max(
        self, x: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None
    ) -> tuple[Array, Array]:
        """Call :meth:`quantize` with the "max" :meth:`bucket_norms` of ``x``, in one pass over memory where possible.

        Returns:
            The norms [⌈n/bucket⌉], and the codes.
        """

    def quantize_fields(
        self, x: Array, limit: float, norm: Array, width: int, key: NumpyArray, out: Array | None = None
    ) -> Array:
        """Round x/norm stochastically to −1, 0 or 1, as :meth:`quantize` with 2 bits does, and pack the integers.

        Args:
            x: [n]; it is clipped to ±limit first.
            limit: Rounded to float32 first.
            norm: [1]; a norm of 0 or less is read as 1.
            width: Bits per field, as for :meth:`pack_fields`.
            key: [1] uint32, on the host, as for :meth:`uniform`.
            out: int32 array that receives the result; by default a new array.

        Returns:
            The words that :meth:`pack_fields` returns for the integers.
        """

    def dequantize(self, buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
        """Undo :meth:`quantize`: return ±norm·level/s [count]. Zeros are +0.

        Norms that are negative, NaN or Inf are read as finite numbers, so that a damaged payload decodes to finite
        numbers.

        Args:
            buffer: Codes from :meth:`quantize`.
            norms: The norm of each bucket [⌈count/bucket⌉] or more.
            bucket: Number of elements that share a norm.
            bits: Bits per code.
            count: Number of elements.

        Raises:
            IndexError: There are fewer norms than buckets (RuntimeError in torch).
        """

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

    def decode_levels(
        self, buffer: Array, norms: Array, bucket: int, levels: NumpyArray, bits: int, count: int
    ) -> Array:
        """Undo :meth:`encode_levels` [count]: level·norm. Damaged norms are read as by :meth:`dequantize`."""

    def pack_signs(self, x: Array) -> Array:
        """Return one bit per element, set if x < 0 [⌈n/8⌉] uint8, lowest bit first."""

    def unpack_signs(self, buffer: Array, scale: Array, count: int) -> Array:
        """Undo :meth:`pack_signs`: return −scale where the bit is set and +scale elsewhere [count].

        ``scale`` is [1] float32; a scale that is negative, NaN or Inf is read as a finite number.
        """

    def pack_fields(self, values: Array, width: int) -> Array:
        """Pack integers into words such that adding words adds the integers.

        Args:
            values: [n] float32, integers. All sums must stay within ±(2^width − 1)/2.
            width: Bits per field, 2 to 32.

        Returns:
            [⌈n/p⌉] int32 with p = ⌊32/width⌋ integers v_j per word: Σ v_j·2^(width·j). No word overflows.
        """

    def unpack_fields(self, words: Array, width: int, count: int, bound: int) -> Array:
        """Undo :meth:`pack_fields` for integers, or sums of integers, within ±bound [count] float32."""

    # -- spectra: blockwise Fourier transforms --------------------------------------------------------------------

    def rfft(self, x: Array, block: int) -> Array:
        """Return the spectra of consecutive blocks of ``x``, concatenated, to rounding.

        Args:
            x: [n].
            block: Block length; the last block may be shorter.

        Returns:
            [2·bins] float32, real and imaginary parts alternating; a block of L elements has ⌊L/2⌋ + 1 bins. Each
            spectrum is divided by √(L·block). With this scale, magnitudes of bins from blocks of different lengths
            are comparable, and no number exceeds max|x|, so that nothing overflows.
        """

    def irfft(self, spectrum: Array, n: int, block: int) -> Array:
        """Undo :meth:`rfft` [n] float32, to rounding. No |result| exceeds the sum of its block's |spectrum|."""

    def magnitudes(self, pairs: Array) -> Array:
        """Return the magnitudes [m] of complex numbers, given as alternating real and imaginary parts [2m].

        Squares are float64 and neither over- nor underflow.
        """

    def largest_frequencies(self, x: Array, block: int, k: int) -> Sparse:
        """Return the k frequencies of :meth:`rfft` with the largest :meth:`magnitudes`, to rounding.

        Args:
            x: [n], finite.
            block: Block length.
            k: Number of frequencies, at most the number of bins.

        Returns:
            The indices of the bins [k], ascending, and their alternating real and imaginary parts [2k].
        """

    # -- matrices: layouts, products, orthonormal rows, principal components --------------------------------------

    def permute(self, x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
        """Reshape ``x`` [n] to ``shape``, transpose its axes, and return it flat [n]; may be a view."""

    def hadamard(self, x: Array, block: int) -> Array:
        """Multiply each block of ``x`` [n] by the orthonormal Hadamard matrix H[i, j] = (−1)^popcount(i & j) / √block.

        Elements are multiplied by 1/√block in float32; then one pass for each bit of the index, from the lowest one,
        replaces the elements a, where the bit is 0, and b, where it is 1, by a + b and a − b.

        Args:
            x: [n], where n is a multiple of ``block``.
            block: Block length, a power of two.
        """

    def matmul(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        """Return a · b [rows × columns], to rounding, for a [rows × m] and b [m × columns]."""

    def matmul_transposed(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        """Return a · bᵀ [rows × columns], to rounding, for a [rows × m] and b [columns × m]."""

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
