"""The specification of the array ops: what each op does, written once for all backends.

Methods are written in the ops of :class:`Ops`. Every backend (``ops/numpy``, ``ops/numba``, ``ops/torch``,
``ops/triton``) is a module that has exactly these functions. ``ops/numpy`` is the reference; the others return the same
bytes, except where an op says "to rounding".

Conventions. Arrays are one-dimensional; [n] after an array is its length, and a matrix [rows × m] is its flat memory,
row by row. Unless an op says otherwise, values are float32, indices are int32 (int64 if the tensor has 2^31 elements
or more), payloads are uint8 in little-endian order, and results are new arrays. Inputs are never changed, except by
the ops that say "in place" or have an argument ``out``. |x| is the elementwise absolute value.
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

    # -- memory: make, view and rearrange arrays ------------------------------------------------------------------

    def zeros(self, size: int, dtype: str, like: Array) -> Array:
        """Return [size] zeros of ``dtype`` on the device of ``like``."""

    def asarray(self, values: NumpyArray, like: Array) -> Array:
        """Move a numpy array to the device of ``like``. The result may share memory with ``values``."""

    def concat(self, arrays: list[Array], out: Array | None = None) -> Array:
        """Join arrays end to end, in ``out`` if it is given. Without, a list of one returns that array, not a copy."""

    def to_bytes(self, x: Array) -> Array:
        """Return the memory of ``x`` as uint8, little-endian; may be a view."""

    def from_bytes(self, buffer: Array, dtype: str) -> Array:
        """Interpret uint8 memory as ``dtype``; a view where the bytes are aligned.

        Args:
            buffer: uint8; its length is a multiple of the size of ``dtype``.
            dtype: numpy's name of the dtype. "uint16" may be any 16-bit integer type, as in :meth:`to_bf16`.
        """

    def head_bytes(self, buffer: Array, num_bytes: int) -> bytes:
        """Copy the first ``num_bytes`` bytes of ``buffer`` (uint8) to the host. Meant for headers."""

    def fill(self, out: Array, value: float) -> None:
        """Set every element of ``out`` to ``value``, in place."""

    def take(self, x: Array, index: Array) -> Array:
        """Return x[index] [k]. ``index`` [k] is int32 or int64, and each index is in [0, n)."""

    def take_by_age(self, table: Array, stamps: Array, now: int) -> Array:
        """Return the entries of a table for the ages of elements: table[min(max(age, 1), m) − 1] [n].

        Args:
            table: [m] float32; m is less than 128.
            stamps: [n] int8, when each element was last seen. Its age is now − stamp modulo 2^8, as an int8.
            now: an int8.
        """

    def stamp(self, table: Array, stamps: Array, now: int, index: Array, out: Array) -> Array:
        """Do :meth:`take_by_age` for the elements at ``index`` [k], and set out = stamps, with ``now`` at ``index``.

        Args:
            table: as for :meth:`take_by_age`.
            stamps: as for :meth:`take_by_age`.
            now: an int8.
            index: as in :meth:`take`; an index may occur several times. Few ascending runs are fast.
            out: [n] int8; not ``stamps`` itself.

        Returns:
            [k] float32.
        """

    def sort(self, x: Array) -> Array:
        """Return the elements of ``x`` in ascending order."""

    def index_dtype(self, n: int) -> str:
        """Return the dtype of indices below ``n``: "int32" if it can hold them all, otherwise "int64"."""

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
        """Set out = scale·gradient + residual, in place, and report on ``out``, in one pass over memory where possible.

        All arrays have one length. Products are rounded to float32 before sums are, on every device (no fused
        multiply-add).

        Args:
            gradient: [n].
            residual: [n].
            scale: Rounded to float32 first.
            out: [n]. It is neither of the two others.
            scan: What is asked for besides whether ``out`` is finite.
            velocity: If given, velocity.new = velocity.momentum·velocity.old + scale·gradient is set, too, and is
                added to the residual instead of scale·gradient.

        Returns:
            What was found. If ``out`` is not finite, the rest of it means nothing.
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
        """Do :meth:`accumulate` for several gradients, each with a part of the other vectors.

        Args:
            gradients: Each as long as its span.
            residual: [n].
            scales: Of each gradient, what it is multiplied by.
            out: [n].
            spans: Of each gradient, where its part begins and ends; no two overlap.
            scans: What is asked for of each part.
            velocity: Of vectors [n].

        Returns:
            What was found in each part, in the order of the gradients.
        """

    def look(self, x: Array, scan: Scan) -> Found:
        """Report on ``x`` as :meth:`accumulate` does on its result."""

    def keep_if(self, finite: Flag, x: Array, other: Array | None = None) -> None:
        """Unless ``finite``, set x to ``other``, or to 0 without one, in place. The host waits for no flag.

        Args:
            finite: what :meth:`accumulate`, :meth:`look` or :meth:`all_finite` found.
            x: [n].
            other: [n].
        """

    def blend(self, x: Array, residual: Array, beta: float) -> None:
        """Set x = beta·x + (1−beta)·residual, in place."""

    def subtract(self, x: Array, own: Array | Sparse | Coded, factor: float) -> None:
        """Set x = x − factor·own, in place.

        Args:
            x: [n].
            own: Dense [n], coded or sparse. Sparse indices are in [0, n) and distinct, except that repeats with the
                value 0 are allowed. Check indices that came over the network with :meth:`all_below` first.
            factor: Rounded to float32 first.
        """

    def zero_where(self, x: Array, own: Array | Sparse) -> None:
        """Set x = 0 at the places where ``own`` (dense [n] or sparse) is not 0, in place."""

    def write(self, out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
        """Set out = factor·total, in place and in the dtype of ``out``.

        Args:
            out: [n] float32 or float64.
            total: Dense [n], coded, or sparse vectors, with indices in [0, n). Values of equal indices are added in
                the order in which they stand, so that all ranks, and all devices, get the same bits.
            factor: Rounded to float32 first, unless ``total`` is float64.
        """

    def dense(self, x: Array | Coded) -> Array:
        """Return a coded vector as float32 [n]; an array is returned as it is."""

    def write_parts(self, outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
        """Set outs = factor·total, of which each of them has a part, as :meth:`write` does.

        Args:
            outs: The parts in their order, of one dtype.
            total: Dense, coded (neither :class:`Outer` nor :class:`Waves`), or sparse: ascending runs of indices, one
                after another. As long as the parts together.
            factor: Rounded to float32 first, unless ``total`` is float64.
        """

    def add_all(self, arrays: list[Array], into_first: bool = False) -> Array:
        """Return the sum of arrays of one shape and dtype, added in their order and rounded after each addition.

        Args:
            arrays: The arrays, one at least.
            into_first: Whether the sum is written over the first of them.
        """

    def merge(self, a: Sparse, b: Sparse, n: int) -> Sparse:
        """Add two sparse vectors.

        Args:
            a: A sparse vector with distinct indices.
            b: Another one.
            n: The length of the dense vectors that they stand for; it determines the dtype of the indices.

        Returns:
            Distinct ascending indices, and their values [m] float32. No place receives more than two values, and
            the sum of two does not depend on their order, so every device returns the same bits.
        """

    def scaled(self, x: Array, factor: float, limit: float = FP32_MAX) -> Array:
        """Return factor·x, clipped to ±limit."""

    # -- statistics: numbers about an array ----------------------------------------------------------------------

    def moments(self, x: Array) -> tuple[float, float]:
        """Return the mean and the unbiased standard deviation of ``x``, accumulated in float64.

        Backends agree to about 1e-14 of the root mean square. The deviation of equal elements, of one element and
        of none is exactly 0.
        """

    def max_abs(self, x: Array) -> float:
        """Return the largest |x|, or 0 for an empty array."""

    def l2_norm(self, x: Array) -> float:
        """Return the Euclidean norm of ``x``, to rounding. The sum is float64: no square overflows or underflows."""

    def bucket_norms(self, x: Array, bucket: int, norm: Norm) -> Array:
        """Return the norm of each bucket of ``bucket`` consecutive elements; the last bucket may be shorter.

        Sums are float64 and added in a fixed order: pieces of 512 elements are folded by halves, then the sums of
        the pieces in the same way. All backends so return the same bits.

        Args:
            x: [n].
            bucket: 1 or more; may exceed n.
            norm: "max", "l2" or "mean".

        Returns:
            [⌈n/bucket⌉]. No |x| exceeds the "max" or "l2" norm of its bucket. An "l2" norm that float32 cannot
            hold becomes the largest finite float32.
        """

    def all_finite(self, x: Array) -> Flag:
        """Return whether ``x`` (float32 or float64) contains neither infinities nor NaNs."""

    def all_below(self, index: Array, n: int) -> bool:
        """Return whether every index is in [0, n)."""

    # -- selection: choose elements by magnitude -----------------------------------------------------------------

    def top_k(self, x: Array, k: int) -> Array:
        """Return the indices of the k largest |x|, ascending [min(k, n)]; among equals, the lowest indices."""

    def top_k_parts(self, x: Array, counts: Sequence[int], sizes: Sequence[int]) -> Array:
        """Return the indices of :meth:`top_k` of each of the consecutive parts of a vector, ascending.

        Args:
            x: [n].
            counts: Of each part, how many; all of its elements where they are fewer.
            sizes: The parts' numbers of elements.
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
        """Choose the entries of largest |value| in each of the parts of a vector; among equals, the first.

        Args:
            candidates: Of each part, ascending indices in it, at least as many as ``counts`` says.
            counts: Of each part, how many.
            starts: Where the parts begin.

        Returns:
            The entries, by their indices in the vector, one part's after another's [Σ counts]; and of each part the
            least magnitude that was chosen, 0 where none was.
        """

    def chunk_argmax(self, x: Array, chunk: int) -> Array:
        """Return where the largest |x| of each chunk of ``chunk`` consecutive elements is.

        Returns:
            [⌈n/chunk⌉] int32: the offset from the chunk's first element; among equals, the lowest. The last chunk
            may be shorter.
        """

    def chunk_positions(self, offset: Array, chunk: int, sizes: Sequence[int]) -> Array:
        """Convert offsets within chunks [k], as of :meth:`chunk_argmax` of consecutive pieces of a vector, to indices.

        Args:
            offset: The pieces' offsets, one after another [k], k = Σ ⌈sizes[i]/chunk⌉.
            chunk: The number of elements of a chunk. Chunks begin again with each piece.
            sizes: The pieces' numbers of elements.

        Returns:
            Indices of the whole vector [k]. Those beyond the end of their piece, which only a damaged payload has,
            become its last.
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
            [n] float16, rounded to nearest even, and the number of elements that were clipped: a number or, on a
            device, a tensor of one, for which the host need not wait.
        """

    def from_fp16(self, x: Array, scale: float) -> Array:
        """Return scale·x as float32. ±Inf, which a sum that exceeded float16 becomes, reads as ±65504."""

    def to_bf16(self, x: Array, out: Array | None = None) -> Array:
        """Convert float32 to bfloat16, rounded to nearest even.

        Args:
            x: [n].
            out: [2n] uint8 that receives the result; by default a new array.

        Returns:
            [n] the 16 bits of each number, as uint16 (int16 in torch, which hardly supports uint16). Finite numbers
            stay finite: one that would round to infinity becomes the largest bfloat16.
        """

    def from_bf16(self, bits: Array) -> Array:
        """Convert the bits of bfloat16 to float32, exactly."""

    def float_bounds(self, x: Array) -> Array:
        """Return the largest x and the largest −x [2] float32, each at least 0."""

    def range_mantissa(self, x: Array, bounds: Array, bits: int) -> Array:
        """Choose the mantissa bits of range floats for data like ``x``: those of the least expected squared error.

        A value that has a code errs by width²/12 of its bin, and one below the smallest bin by itself. It is computed
        in integers, so that all backends choose alike.

        Args:
            x: [n], n ≤ 4096: a sample of the data.
            bounds: [2], of all data, as returned by :meth:`float_bounds`.
            bits: The size of a code, 2 to 24.

        Returns:
            [1] uint8, from max(1, bits − 8) to bits − 1, and 22 at most. Of equals, the least.
        """

    def range_codes(self, x: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
        """Encode ``x`` as range floats: codes that divide a range into bins of constant relative width.

        A bin is what float32 numbers with equal sign, exponent and first ``mantissa`` bits share. Code 0 is zero;
        then come the positive bins, then the negative ones, each from the smallest magnitude up. Magnitudes below
        the smallest bin that ``bits`` have room for become 0.

        Args:
            x: [n], within the bounds.
            bounds: [2], as returned by :meth:`float_bounds`.
            bits: The size of a code, 4 to 16.
            mantissa: The number of mantissa bits that a bin keeps, 1 to 22; or [1] uint8 with it.

        Returns:
            [n] int32, below 2^bits.
        """

    def range_values(self, codes: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
        """Decode :meth:`range_codes`: return the middle of each code's bin, clipped to the bounds [n] float32.

        Codes that do not exist are read as the last code, bounds that are not finite or negative as finite ones, and
        an array's ``mantissa`` as one from 1 to 22, so that a damaged payload decodes to finite numbers.
        """

    # -- bits: numbers of a few bits, and bitmaps ----------------------------------------------------------------

    def pack_bits(self, values: Array, width: int) -> Array:
        """Pack unsigned integers of ``width`` bits each without gaps, lowest bit first.

        Args:
            values: [n] int32 or int64, in [0, 2^width).
            width: 0 or more.

        Returns:
            [⌈n·width/8⌉] uint8.
        """

    def unpack_bits(self, buffer: Array, width: int, count: int) -> Array:
        """Undo :meth:`pack_bits` [count] int64. A buffer that is too short counts as if zeros followed it."""

    def set_bits(self, positions: Array, num_bits: int) -> Array:
        """Return a bitmap of ``num_bits`` bits in which the given positions are set.

        Args:
            positions: [k] int32 or int64, distinct and in [0, num_bits).
            num_bits: The length of the bitmap in bits.

        Returns:
            [⌈num_bits/8⌉] uint8, lowest bit first.
        """

    def find_bits(self, buffer: Array, num_bits: int) -> Array:
        """Return the positions below ``num_bits`` of the bits that are set, ascending int64.

        A buffer that is too short counts as if zeros followed it.
        """

    def elias_fano(self, index: Array, low: int, num_bits: int) -> tuple[Array, Array]:
        """Split ascending indices into their low bits and, in unary, the rest (Elias 1974; Fano 1971).

        Args:
            index: [k] int32 or int64, ascending.
            low: The number of low bits, at most 56.
            num_bits: The length of the bitmap: more than index[k − 1] >> low, plus k − 1.

        Returns:
            The low bits, as of :meth:`pack_bits` [⌈k·low/8⌉] uint8; and a bitmap in which the bits
            (index[i] >> low) + i are set [⌈num_bits/8⌉] uint8.
        """

    def from_elias_fano(self, lows: Array, highs: Array, low: int, num_bits: int) -> Array:
        """Undo :meth:`elias_fano`.

        Returns:
            As many indices as bits below ``num_bits`` are set, ascending int64. Buffers that are too short count as if
            zeros followed them.
        """

    # -- codes: random rounding to levels, signs, and fields that add ----------------------------------------------

    def uniform(self, key: NumpyArray, count: int, like: Array, start: int = 0) -> Array:
        """Return numbers ``start``, ``start`` + 1, … of the random stream of a key.

        Args:
            key: [1] uint32, on the host.
            count: How many numbers to return.
            like: The numbers are made on the device of this array.
            start: The position in the stream of the first one; start + count ≤ 2^32.

        Returns:
            [count] float32: multiples of 2^-24 in [0, 1). The number at position i is the hash h(h(i + key) ^ key),
            with h the finalizer of MurmurHash3 (:func:`hvdcompress.ops.shared.mix`).
        """

    def distinct_indices(self, key: NumpyArray, k: int, n: int) -> NumpyArray:
        """Draw k distinct indices below n: the first k of a random permutation of 0 … n − 1.

        The permutation is a Feistel network of four rounds over the least power of four ≥ n. Images beyond n − 1 are
        permuted again until they are in range ("cycle walking", Black & Rogaway 2002), so that the cost is
        proportional to k, not n.

        Args:
            key: [1] uint32, on the host.
            k: The number of indices, at most n.
            n: The number of elements, 1 or more.

        Returns:
            Indices [k], ascending, on the host.
        """

    def quantize(
        self, x: Array, norms: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None
    ) -> Array:
        """Round each element at random to one of the two nearest levels, and pack sign and level.

        The levels are 0 … s with s = 2^(bits−1) − 1. |x|/norm·s lies between two levels, and the position of x in the
        stream of ``key`` decides between them, so that the expectation is exact. |x| > norm counts as norm.

        Args:
            x: [n].
            norms: The norm of each bucket [⌈n/bucket⌉] or more. A norm of 0 or less counts as 1.
            bucket: The number of elements that share a norm.
            bits: The size of a code, 2 to 8; its highest bit is the sign.
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
        """Do :meth:`quantize` with the "max" :meth:`bucket_norms` of ``x``, in one pass over memory where possible.

        Returns:
            The norms [⌈n/bucket⌉], and the codes.
        """

    def quantize_fields(
        self, x: Array, limit: float, norm: Array, width: int, key: NumpyArray, out: Array | None = None
    ) -> Array:
        """Round each element at random to −1, 0 or 1, as :meth:`quantize` with 2 bits does, and pack them as fields.

        Args:
            x: [n], which counts as clipped to ±limit.
            limit: Rounded to float32 first.
            norm: [1]: what 1 stands for. A norm of 0 or less counts as 1.
            width: The size of a field in bits, as for :meth:`pack_fields`.
            key: [1] uint32, on the host, as for :meth:`uniform`.
            out: Int32 that receives the result; by default a new array.

        Returns:
            What :meth:`pack_fields` returns.
        """

    def dequantize(self, buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
        """Undo :meth:`quantize`: return ±norm·level/s [count]. Zero has no sign.

        Norms that are negative, infinite or NaN are read as finite numbers, so that a damaged payload decodes to
        finite numbers.

        Args:
            buffer: What :meth:`quantize` returned.
            norms: The norm of each bucket [⌈count/bucket⌉] or more.
            bucket: The number of elements that share a norm.
            bits: The size of a code.
            count: How many numbers to return.

        Raises:
            IndexError: There are fewer norms than buckets (RuntimeError in torch).
        """

    def pack_signs(self, x: Array) -> Array:
        """Return one bit per element, lowest bit first: whether x < 0 [⌈n/8⌉] uint8."""

    def unpack_signs(self, buffer: Array, scale: Array, count: int) -> Array:
        """Undo :meth:`pack_signs`: return −scale where the bit is set and +scale elsewhere [count].

        ``scale`` is [1] float32; one that is negative, infinite or NaN is read as a finite number.
        """

    def pack_fields(self, values: Array, width: int) -> Array:
        """Pack whole numbers into words whose sums are words of the sums.

        Args:
            values: [n] float32, whole numbers. No sum may leave ±(2^width − 1)/2.
            width: The size of a field in bits, 2 to 32.

        Returns:
            [⌈n/p⌉] int32 with p = ⌊32/width⌋ numbers in each word: Σ v_j·2^(width·j). No word overflows.
        """

    def unpack_fields(self, words: Array, width: int, count: int, bound: int) -> Array:
        """Undo :meth:`pack_fields` for (sums of) numbers within ±bound [count] float32."""

    # -- spectra: blockwise Fourier transforms --------------------------------------------------------------------

    def rfft(self, x: Array, block: int) -> Array:
        """Return the spectra of consecutive blocks of ``x``, one after another, to rounding.

        Args:
            x: [n].
            block: The length of a block; the last block may be shorter.

        Returns:
            [2·bins] float32, real and imaginary parts in turns; a block of L elements has ⌊L/2⌋ + 1 bins. A spectrum
            is divided by √(L·block). Bins of all blocks then compare as their energies do, and no number exceeds
            max|x|, so that nothing overflows.
        """

    def irfft(self, spectrum: Array, n: int, block: int) -> Array:
        """Undo :meth:`rfft` [n] float32, to rounding. No |result| exceeds the sum of the block's |numbers|."""

    def magnitudes(self, pairs: Array) -> Array:
        """Return the magnitudes [m] of complex numbers given as real and imaginary parts in turns [2m].

        Squares are float64, so that none overflows or underflows.
        """

    def largest_waves(self, x: Array, block: int, k: int) -> Sparse:
        """Return the k frequencies of :meth:`rfft` with the largest :meth:`magnitudes`, to rounding.

        Args:
            x: [n], finite.
            block: The length of a block.
            k: At most the number of bins.

        Returns:
            The indices of bins [k], ascending, and their real and imaginary parts in turns [2k].
        """

    # -- matrices: layouts, products, orthonormal rows, principal components --------------------------------------

    def permute(self, x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
        """Read ``x`` [n] as an array of ``shape``, transpose its axes, and return it flat [n]; may be a view."""

    def matmul(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        """Return a · b [rows × columns], to rounding, for a [rows × m] and b [m × columns]."""

    def matmul_transposed(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        """Return a · bᵀ [rows × columns], to rounding, for a [rows × m] and b [columns × m]."""

    def orthonormalise(self, x: Array, rows: int, key: NumpyArray | None = None) -> Array:
        """Return orthonormal rows with the span of the rows of ``x``, by Gram-Schmidt in float64.

        It uses no matrix library, whose sums depend on the processor and its threads: unlike machines agree to the
        bit, and so do the reference and the compiled op, whose sums are added as those of :meth:`bucket_norms`.

        Args:
            x: [rows × m] float32 or float64.
            rows: The number of rows.
            key: [1] uint32, on the host, as for :meth:`uniform`. A row of ``x`` that is zero, or depends on those
                before it, is replaced by the row of :meth:`uniform` [rows × m] less 1/2; without ``key`` it becomes
                zero.

        Returns:
            [rows × m] float32, to rounding.
        """

    def principal(
        self, x: Array, rows: int, least: int, most: int, dropped: float, centre: bool = True
    ) -> tuple[Array, Array]:
        """Return the principal components of the rows of ``x``, as combinations of these rows.

        Args:
            x: [rows × m].
            rows: The number of rows.
            least: The least number of components.
            most: The greatest number of components.
            dropped: The share of the variance that may be left out: of the sum of squares where it is not centred.
            centre: Whether the rows' mean is taken from them first.

        Returns:
            [1] int32: the least number d of components, within least … most, that leaves out a share of at most
            ``dropped``; and [most × rows] float32: the combinations, to rounding and up to their signs, of which
            those after the d-th are zero.
        """

    def combine(self, weights: Array, x: Array, rows: int, centre: bool = True) -> Array:
        """Return combinations of the rows of ``x``, added in a fixed order in float64.

        It uses no matrix library either.

        Args:
            weights: [count × rows].
            x: [rows × m].
            rows: The number of rows.
            centre: Whether the rows' mean is taken from them first.

        Returns:
            [count × m] float64.
        """

    def coordinates(self, x: Array, basis: Array, rows: int) -> Array | None:
        """Return the weights of the rows of ``basis`` in the rows of ``x``, which are combinations of them.

        It uses no matrix library either.

        Args:
            x: [count × m] float32.
            basis: [rows × m] float32, orthonormal; rows may be zero.
            rows: The number of rows.

        Returns:
            [rows × count] float64, as :meth:`combine` takes them; None where the rows of ``x`` are no such
            combinations, to the rounding of float32, or where the host would have to wait for a device to tell.
        """
