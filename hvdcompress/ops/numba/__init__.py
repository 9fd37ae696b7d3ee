"""Array ops on numpy arrays, compiled with numba where a benchmark shows a gain (``experiments/results/ops.json``).

Kernels take contiguous, aligned float32 arrays. The ops pass all other inputs to the numpy backend, the reference, and
return the reference's bits, except for ops "to rounding". Ops without a kernel are the reference's own functions.
"""

from hvdcompress.ops.numba.arithmetic import (
    accumulate,
    accumulate_parts,
    blend,
    dense,
    inspect,
    merge,
    scaled,
    subtract,
    write,
    write_parts,
    zero_where,
)
from hvdcompress.ops.numba.bits import elias_fano, find_bits, from_elias_fano, pack_bits, set_bits, unpack_bits
from hvdcompress.ops.numba.codes import (
    dequantize,
    distinct_indices,
    pack_signs,
    quantize,
    quantize_fields,
    quantize_max,
    unpack_fields,
    unpack_signs,
)
from hvdcompress.ops.numba.floats import (
    add_all,
    from_bf16,
    from_fp16,
    range_codes,
    range_mantissa,
    range_values,
    to_bf16,
    to_fp16,
)
from hvdcompress.ops.numba.levels import decode_levels, encode_levels
from hvdcompress.ops.numba.matrices import hadamard, matmul, matmul_transposed, orthonormalise
from hvdcompress.ops.numba.memory import add_once, stamp, take, take_weighted
from hvdcompress.ops.numba.selection import (
    chunk_argmax,
    chunk_positions,
    count_above,
    first_above,
    first_equal,
    kth_magnitude,
    largest_of,
    top_k,
)
from hvdcompress.ops.numba.spectra import largest_frequencies, magnitudes
from hvdcompress.ops.numba.statistics import all_finite, bucket_norms, l2_norm, max_abs, moments
from hvdcompress.ops.numpy import (
    all_below,
    asarray,
    combine,
    concat,
    fill,
    float_bounds,
    from_bytes,
    head_bytes,
    index_range,
    irfft,
    keep_if,
    pack_fields,
    permute,
    principal,
    rfft,
    searchsorted,
    sort,
    to_bytes,
    top_k_parts,
    uniform,
    zeros,
)
from hvdcompress.ops.shared import index_dtype

__all__ = [
    "accumulate", "accumulate_parts", "add_all", "add_once", "all_below", "all_finite", "asarray", "blend",
    "bucket_norms", "chunk_argmax", "chunk_positions", "combine", "concat", "count_above", "decode_levels", "dense",
    "dequantize", "distinct_indices", "elias_fano", "encode_levels", "fill", "find_bits", "first_above", "first_equal",
    "float_bounds", "from_bf16", "from_bytes", "from_elias_fano", "from_fp16", "hadamard", "head_bytes", "index_dtype",
    "index_range", "inspect", "irfft", "keep_if", "kth_magnitude", "l2_norm", "largest_frequencies", "largest_of",
    "magnitudes", "matmul", "matmul_transposed", "max_abs", "merge", "moments", "orthonormalise", "pack_bits",
    "pack_fields", "pack_signs", "permute", "principal", "quantize", "quantize_fields", "quantize_max", "range_codes",
    "range_mantissa", "range_values", "rfft", "scaled", "searchsorted", "set_bits", "sort", "stamp", "subtract", "take",
    "take_weighted", "to_bf16", "to_bytes", "to_fp16", "top_k", "top_k_parts", "uniform", "unpack_bits",
    "unpack_fields", "unpack_signs", "write", "write_parts", "zero_where", "zeros",
]  # fmt: skip
