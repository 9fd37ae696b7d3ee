"""Array ops in numpy: the reference that tests compare every other backend with.

The code is written to be simple and obviously right. :mod:`hvdcompress.ops.spec` documents each op.
"""

from hvdcompress.ops.numpy.arithmetic import (
    accumulate,
    accumulate_parts,
    add_all,
    blend,
    dense,
    inspect,
    keep_if,
    merge,
    scaled,
    subtract,
    write,
    write_parts,
    zero_where,
)
from hvdcompress.ops.numpy.bits import elias_fano, find_bits, from_elias_fano, pack_bits, set_bits, unpack_bits
from hvdcompress.ops.numpy.codes import (
    dequantize,
    distinct_indices,
    pack_fields,
    pack_signs,
    quantize,
    quantize_fields,
    quantize_max,
    uniform,
    unpack_fields,
    unpack_signs,
)
from hvdcompress.ops.numpy.floats import (
    float_bounds,
    from_bf16,
    from_fp16,
    range_codes,
    range_mantissa,
    range_values,
    to_bf16,
    to_fp16,
)
from hvdcompress.ops.numpy.levels import decode_levels, encode_levels
from hvdcompress.ops.numpy.matrices import (
    combine,
    hadamard,
    matmul,
    matmul_transposed,
    orthonormalise,
    permute,
    principal,
)
from hvdcompress.ops.numpy.memory import (
    add_once,
    asarray,
    concat,
    fill,
    from_bytes,
    head_bytes,
    index_range,
    searchsorted,
    sort,
    stamp,
    take,
    take_weighted,
    to_bytes,
    zeros,
)
from hvdcompress.ops.numpy.selection import (
    chunk_argmax,
    chunk_positions,
    count_above,
    first_above,
    first_equal,
    kth_magnitude,
    largest_of,
    top_k,
    top_k_parts,
)
from hvdcompress.ops.numpy.spectra import irfft, largest_frequencies, magnitudes, rfft
from hvdcompress.ops.numpy.statistics import all_below, all_finite, bucket_norms, l2_norm, max_abs, moments
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
