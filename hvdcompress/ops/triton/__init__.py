"""Array ops on CUDA tensors: Triton kernels where they save passes over memory; the other ops are those of ops/torch.

Kernels take contiguous tensors of the dtypes that the drivers use, with at least one element. The ops pass all other
inputs to ops/torch. Results are the reference's bits, except for ops "to rounding".

With ``TRITON_INTERPRET=1`` in the environment before Triton is imported, kernels run in Triton's interpreter, on CPU
tensors; the tests use it. :mod:`hvdcompress.ops.torch.tensors` lists the ops in which the host waits for the device,
and :mod:`hvdcompress.ops.triton.tensors` the differences in this backend.
"""

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.torch import (
    add_all,
    add_once,
    all_below,
    asarray,
    bucket_norms,
    chunk_positions,
    combine,
    concat,
    distinct_indices,
    elias_fano,
    fill,
    find_bits,
    float_bounds,
    from_bytes,
    from_elias_fano,
    head_bytes,
    index_range,
    irfft,
    kth_magnitude,
    l2_norm,
    largest_frequencies,
    largest_of,
    magnitudes,
    matmul,
    matmul_transposed,
    max_abs,
    merge,
    pack_fields,
    permute,
    principal,
    quantize_fields,
    range_codes,
    range_mantissa,
    range_values,
    rfft,
    scaled,
    searchsorted,
    set_bits,
    sort,
    stamp,
    take,
    take_weighted,
    to_bytes,
    top_k_parts,
    unpack_fields,
    zeros,
)
from hvdcompress.ops.triton.arithmetic import (
    accumulate,
    accumulate_parts,
    blend,
    dense,
    inspect,
    keep_if,
    subtract,
    write,
    write_parts,
    zero_where,
)
from hvdcompress.ops.triton.bits import pack_bits, unpack_bits
from hvdcompress.ops.triton.codes import dequantize, pack_signs, quantize, quantize_max, uniform, unpack_signs
from hvdcompress.ops.triton.floats import from_bf16, from_fp16, to_bf16, to_fp16
from hvdcompress.ops.triton.levels import decode_levels, encode_levels
from hvdcompress.ops.triton.matrices import hadamard, orthonormalise
from hvdcompress.ops.triton.selection import chunk_argmax, count_above, first_above, first_equal, top_k
from hvdcompress.ops.triton.statistics import all_finite, moments

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
