"""The array verbs on torch tensors, for gradients that live on a GPU: payload bytes equal the reference's.

No tensor passes through host memory. :mod:`hvdcompress.ops.torch.tensors` lists where the host waits for the device.
"""

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.torch.arithmetic import (
    accumulate,
    accumulate_above,
    accumulate_argmax,
    accumulate_moments,
    add_all,
    blend,
    keep_if,
    merge,
    scaled,
    split,
    subtract,
    write,
    zero_where,
)
from hvdcompress.ops.torch.bits import find_bits, pack_bits, set_bits, unpack_bits
from hvdcompress.ops.torch.codes import (
    dequantize,
    pack_fields,
    pack_signs,
    quantize,
    uniform,
    unpack_fields,
    unpack_signs,
)
from hvdcompress.ops.torch.floats import float_bounds, from_bf16, from_fp16, range_codes, range_values, to_bf16, to_fp16
from hvdcompress.ops.torch.matrices import (
    combine,
    matmul,
    matmul_transposed,
    orthonormalise,
    outer_sum,
    permute,
    principal,
)
from hvdcompress.ops.torch.memory import (
    asarray,
    concat,
    fill,
    from_bytes,
    head_bytes,
    index_range,
    sort,
    take,
    to_bytes,
    zeros,
)
from hvdcompress.ops.torch.selection import (
    chunk_argmax,
    chunk_positions,
    count_above,
    first_above,
    first_equal,
    kth_magnitude,
    largest_of,
    top_k,
)
from hvdcompress.ops.torch.spectra import irfft, magnitudes, pair_places, rfft
from hvdcompress.ops.torch.statistics import all_below, all_finite, bucket_norms, l2_norm, max_abs, moments

__all__ = [
    "accumulate", "accumulate_above", "accumulate_argmax", "accumulate_moments", "add_all", "all_below",
    "all_finite", "asarray", "blend", "bucket_norms", "chunk_argmax", "chunk_positions", "combine", "concat",
    "count_above", "dequantize", "fill", "find_bits", "first_above", "first_equal", "float_bounds", "from_bf16",
    "from_bytes", "from_fp16", "head_bytes", "index_dtype", "index_range", "irfft", "keep_if", "kth_magnitude",
    "l2_norm", "largest_of", "magnitudes", "matmul", "matmul_transposed", "max_abs", "merge", "moments",
    "orthonormalise", "outer_sum", "pack_bits", "pack_fields", "pack_signs", "pair_places", "permute", "principal",
    "quantize", "range_codes", "range_values", "rfft", "scaled", "set_bits", "sort", "split", "subtract", "take",
    "to_bf16", "to_bytes", "to_fp16", "top_k", "uniform", "unpack_bits", "unpack_fields", "unpack_signs", "write",
    "zero_where", "zeros",
]  # fmt: skip
