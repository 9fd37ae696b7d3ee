"""Table of calls of the array ops. Every backend must return the bytes that the numpy reference returns.

A call has the arguments ``o`` (a backend), ``put`` (copies a numpy array to the backend), and ``x`` and ``r`` (float32
vectors of equal length, from which the call makes its inputs). ``CALLS`` has the calls of each op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.scan import Found, Halves, Scan, Velocity
from hvdcompress.ops.vectors import (
    Codes,
    Fields,
    Half,
    Joined,
    Outer,
    Shares,
    Sparse,
    Sum,
    piece_of,
    quantized_levels,
    signs_of,
)  # fmt: skip
from tests.unit.ops.inputs import MAX, TINY, damaged_norms, every, key, sizes_of_parts, vector

Call = Callable[..., Any]
#: ops that may differ in the last bits, or that not every backend offers; the test of each subject has them
TO_ROUNDING = {
    "largest_frequencies", "matmul", "matmul_transposed", "moments", "orthonormalise",
    "principal",
}  # fmt: skip
KEY = key(5)
BUCKETS = (1, 3, 512, 1 << 62)
INT32 = np.int32
INT64 = np.int64
SCALES = (1.0, 0.3, 2.0**-16)
CASES: list[tuple[str, list[Call]]] = []


def case(op: str, function: Call, **choices: Any) -> tuple[str, list[Call]]:
    """Return an op's name, and a function's calls: one for each combination of the choices."""
    combinations = itertools.product(*choices.values())
    return op, [partial(function, **dict(zip(choices, values, strict=True))) for values in combinations]


def changed(put: Any, array: np.ndarray, function: Callable[[Any], Any]) -> Any:
    """Return an array after a function has changed it in place."""
    out = put(array, changes=True)
    function(out)
    return out


# -- memory ---------------------------------------------------------------------------------------------------------


def bytes_at(start: int, x: np.ndarray) -> np.ndarray:
    """Return ``start`` bytes, then whole 8-byte words."""
    return np.frombuffer(b"\1" * start + x[: x.size // 2 * 2].tobytes(), np.uint8)


NOW = (-(2**7), 7, 2**7 - 1)  # stamps are any 8 bits, so ages overflow


def call_distinct(o, put, x, r, dtype):
    index = np.concatenate([every(3, x), every(2, x)[1:], every(3, x), every(5, x)[::-1]]).astype(dtype)
    return o.distinct(put(index), len(x))


def in_parts(x):
    """Return the parts of a vector, one of them empty, and their spans; the last elements are in none."""
    edges = [0, 0, x.size // 3, x.size // 2]
    spans = list(itertools.pairwise(edges))
    return [x[start:stop] for start, stop in spans], spans


def call_take_parts(o, put, x, r, dtype, scales):
    parts, spans = in_parts(x)
    index = every(3, x).astype(dtype)
    table = r[: min(r.size, 128)]
    entries = (np.arange(index.size) % max(table.size, 1)).astype(np.int8)
    factors = (put(table), put(entries)) if scales else ()
    return o.take_parts([put(part) for part in parts], spans, put(index), *factors)[: int((index < x.size // 2).sum())]


def call_add_parts(o, put, x, r, dtype):
    parts, spans = in_parts(x)
    outs = [put(part.copy(), changes=True) for part in parts]
    if dtype:
        o.add_parts(outs, spans, put(every(3, x).astype(dtype)), put(r[: every(3, x).size]), 0.5)
    else:
        o.add_parts(outs, spans, None, [put(r[start:stop]) for start, stop in spans], 0.5)
    return tuple(outs)


def call_stamp(o, put, x, r, now, order):
    index = {
        "ascending": every(3, x),
        "runs": np.concatenate([every(3, x), every(2, x)[1:], every(5, x)]),  # with duplicates
        "descending": np.ascontiguousarray(every(3, x)[::-1]),
    }[order]
    out = put(np.zeros(4 * x.size, np.int8), changes=True)
    return o.stamp(put(x.view(np.int8)), now, put(index), out), out


CASES += [
    case("zeros", lambda o, put, x, r: tuple(o.zeros(x.size, d, like=put(x)) for d in ("float32", "int16", "int64"))),
    case("asarray", lambda o, put, x, r: o.asarray(np.frombuffer(x.tobytes(), np.uint8), like=put(r))),  # read-only
    case("concat", lambda o, put, x, r: o.concat([put(x), put(r)])),
    case("concat", lambda o, put, x, r: o.concat([put(reference.to_bf16(x)), o.zeros(3, "int16", like=put(x))])),
    case("to_bytes", lambda o, put, x, r: (o.to_bytes(put(x)), o.to_bytes(o.to_bf16(put(x))))),
    case(
        "from_bytes",
        lambda o, put, x, r, start, dtype: o.from_bytes(put(bytes_at(start, x))[start:], dtype),
        start=(0, 1, 2, 4),
        dtype=("float32", "float16", "int16", "int32", "int64"),
    ),
    case("head_bytes", lambda o, put, x, r: o.head_bytes(put(x.view(np.uint8)), 24)),
    case("take", lambda o, put, x, r, dtype: o.take(put(x), put(every(3, x).astype(dtype))), dtype=(INT32, INT64)),
    case("take", lambda o, put, x, r: o.take(put(x.view(np.int8)), put(every(3, x)))),
    case("take_parts", call_take_parts, dtype=(INT32, INT64), scales=(False, True)),
    case("add_parts", call_add_parts, dtype=(INT32, INT64, None)),
    case("distinct", call_distinct, dtype=(INT32, INT64)),
    case("stamp", call_stamp, now=NOW, order=("ascending", "runs", "descending")),
    case("sort", lambda o, put, x, r: o.sort(put(x.view(INT32)))),
    case("searchsorted", lambda o, put, x, r: o.searchsorted(put(np.sort(x.view(INT32))), put(r.view(INT32)))),
]

# -- arithmetic: accumulate -----------------------------------------------------------------------------------------

SCANS = (
    Scan(),
    Scan(chunk=1),
    Scan(chunk=7),
    Scan(chunk=10**6),
    Scan(above=0.5, capacity=10**6),
    Scan(above=np.float32(0), capacity=3),
    Scan(above=-1.0, capacity=10**6),
    Scan(chunk=7, above=0.5, capacity=10**6),
)


def contents(found: Found) -> tuple[Any, ...]:
    """Return the results of a scan; only ``finite`` if an element is not finite."""
    if not found.finite:
        return (False,)
    above = None if found.above is None else tuple(found.above)
    return True, found.offsets, above


def call_accumulate(o, put, x, r, scan, scale):
    gradient, out = put(x), put(np.ones_like(r), changes=True)
    return *contents(o.accumulate(gradient, put(r), scale, out, scan)), out


def accumulate_with_velocity(o, put, x, r, scan):
    out, new = put(np.ones_like(r), changes=True), put(0 * r, changes=True)
    found = o.accumulate(put(x), put(r[::-1].copy()), 0.3, out, scan, Velocity(put(r), new, 0.9))
    return *contents(found), out, new


ABOVE = [Scan(above=0.5, capacity=10**6), Scan(above=np.float32(0), capacity=3), Scan(above=1.5, capacity=10**6)]
SCANS_OF_PARTS = (
    [Scan()],
    [Scan(), *ABOVE],
    [Scan(chunk=7)],
    [Scan(above=-1.0, capacity=10**6)],
)


def call_accumulate_parts(o, put, x, r, scans, momentum):  # gradients in another order than their parts
    spans = list(itertools.pairwise(itertools.accumulate(sizes_of_parts(x.size), initial=0)))[::-1]
    gradients = [put(x[start:stop]) for start, stop in spans]
    out, new = put(np.ones_like(r), changes=True), put(np.ones_like(r), changes=momentum)
    velocity = Velocity(put(r[::-1].copy()), new, 0.9) if momentum else None
    scans = [scans[part % len(scans)] for part in range(5)]
    found = o.accumulate_parts(gradients, put(r), [1.0, 0.3, 2.0, 0.5, 1.0], out, spans, scans, velocity)
    return *map(contents, found), out, new


def call_inspect(o, put, x, r, scan):
    found = o.inspect(put(x), scan)
    return contents(found)


def call_inspect_with_halves(o, put, x, r):
    out = put(np.zeros(x.size, np.float16), changes=True)
    found = o.inspect(put(x), Scan(halves=Halves(0.5, 60000.0, out)))
    return (int(found.saturated), out) if found.finite else False


CASES += [
    case("accumulate", call_accumulate, scan=SCANS, scale=(0.3,)),
    case("accumulate", call_accumulate, scan=SCANS[:1], scale=(1.0, 2.0**-16)),
    case(
        "accumulate",
        accumulate_with_velocity,
        scan=(Scan(), Scan(above=0.5, capacity=10**6), Scan(chunk=7)),
    ),
    case("accumulate_parts", call_accumulate_parts, scans=SCANS_OF_PARTS, momentum=(False, True)),
    case(
        "inspect",
        call_inspect,
        scan=(Scan(), Scan(chunk=7)),
    ),
    case("inspect", call_inspect_with_halves),
]

# -- arithmetic: dense, sparse and coded vectors --------------------------------------------------------------------


def quantized(put: Any, r: np.ndarray, bits: int, bucket: int) -> Codes:
    norms = reference.bucket_norms(r, bucket, "max")
    codes = reference.quantize(r, norms, bucket, bits, KEY)
    return Codes(put(codes), put(norms), bucket, quantized_levels(bits), bits, 0, r.size)


def on_levels(put: Any, r: np.ndarray, bits: int, bucket: int) -> Codes:
    table = np.linspace(-1, 1, (1 << bits) - 1, dtype=np.float32)
    norms = reference.bucket_norms(r, bucket, "max")
    codes = reference.encode_levels(r, norms, bucket, table, bits)
    return Codes(put(codes), put(norms), bucket, table, bits, 0, r.size)


def fields(put: Any, r: np.ndarray) -> Fields:
    words = reference.quantize_fields(r, 1.5, np.float32([1.5]), 3, KEY)
    return Fields(put(words), 3, 2, put(np.float32([0.7])), 0, r.size)


def signs(put: Any, r: np.ndarray) -> Codes:
    mean = reference.bucket_norms(r, r.size, "mean") if r.size else np.zeros(1, np.float32)
    return signs_of(put(reference.pack_signs(r)), put(mean), r.size)


def coded_vectors(put: Any, r: np.ndarray) -> list[Any]:
    """Return vectors of all coded types and widths, made by the reference. The first eight differ most."""
    return [
        Half(put(reference.to_fp16(r, 1.0)[0]), 3.0),
        Half(put(reference.to_bf16(r)), 0.3),
        signs(put, r),
        fields(put, r),
        quantized(put, r, 3, 512),
        quantized(put, r, 8, 1),
        on_levels(put, r, 4, 256),
        on_levels(put, r, 9, 1_000_000),
        *(quantized(put, r, bits, 512) for bits in (2, 4, 5, 6, 7, 8)),
        quantized(put, r, 4, 3),
        quantized(put, r, 2, 1_000_000),
        on_levels(put, r, 8, 3),
        on_levels(put, r, 3, 7),
    ]


def single(put: Any, x: np.ndarray, r: np.ndarray) -> list[Any]:
    return coded_vectors(put, r)


def composed(put: Any, x: np.ndarray, r: np.ndarray) -> list[Any]:
    """Return sums of coded vectors, and vectors that are joined from pieces of them."""
    a, b = coded_vectors(put, r)[:8], coded_vectors(put, x)[:8]
    sums = [*map(Sum, zip(a, b, strict=True)), Sum([a[4], put(x), b[1]]), Sum([put(r), a[2]])]
    joined, third, n = [], x.size // 3, x.size
    for whole in [*a, sums[2], sums[5], sums[8]]:
        start, middle, end = (piece_of(whole, *span) for span in ((0, third), (third, 2 * third), (2 * third, n)))
        joined.append(Joined([start, middle, put(np.zeros(0, np.float32)), end]))
        joined.append(Joined([joined[-1].piece(third // 2, n), put(r[: third // 2])]))
    return sums + joined


def write_coded(o, put, x, r, vectors, factor, dtype=np.float32):
    return tuple(changed(put, x.astype(dtype), lambda out, y=y: o.write(out, y, factor)) for y in vectors(put, x, r))


def subtract_coded(o, put, x, r, vectors, factor):
    return tuple(changed(put, x, lambda out, y=y: o.subtract(out, y, factor)) for y in vectors(put, x, r))


def sparse(put: Any, x: np.ndarray, values: np.ndarray, dtype: Any = INT32) -> Sparse:
    """Return every third element of a vector."""
    return Sparse(put(every(3, x).astype(dtype)), put(values[every(3, x)]))


def subtract_padded(o, put, x, r):  # the padding of Gaussian-k: the last index again and again, with 0
    index = np.r_[every(3, x), [max(x.size - 1, 0)] * min(x.size, 3)].astype(np.int64)
    values = np.r_[r[every(3, x)], [0.0] * min(x.size, 3)].astype(np.float32)
    return changed(put, x, lambda out: o.subtract(out, Sparse(put(index), put(values)), 1.0))


def write_shares_of_three_ranks(o, put, x, r):  # overlapping shares of three ranks: sums in the order of ranks
    index = np.concatenate([every(2, x), every(3, x), every(1, x)])
    values = np.concatenate([x[every(2, x)], r[every(3, x)], x[::-1]])
    return changed(put, x, lambda out: o.write(out, Sparse(put(index), put(values)), 1 / 3))


def call_write_parts(o, put, x, r, kind):
    outs = [put(np.full(size, part % 3, np.float32), changes=True) for part, size in enumerate(sizes_of_parts(x.size))]
    runs = np.concatenate([every(3, x), every(7, x)[1:], every(2, x)])  # of three ranks; the second may be empty
    index = runs[::-1].copy() if kind == "descending" else runs
    given = Sparse(put(index), put(r[index]))
    half = Half(put(reference.to_fp16(x, 1.0)[0]), 0.5)
    total = {"dense": put(x), "half": half, "shares": Shares([given, given])}.get(kind, given)
    o.write_parts(outs, total, 0.3)
    return tuple(outs)


def call_keep_if(o, put, x, r, flag, other):
    flag = flag if isinstance(flag, bool) else put(flag)
    return changed(put, x, lambda out: o.keep_if(flag, out, *([put(r)] if other else [])))


def overlapping(put: Any, x: np.ndarray, r: np.ndarray, step: int, dtypes: Any = (INT32, INT32)) -> list[Sparse]:
    """Return two sparse vectors: even indices, and every ``step``-th index from 0 or, for odd steps, from 1."""
    index = 2 * np.arange(x.size), step * np.arange(r.size) + step % 2
    return [Sparse(put(i.astype(d)), put(v)) for i, d, v in zip(index, dtypes, (x, r), strict=True)]


CASES += [
    case(
        "dense",
        lambda o, put, x, r, vectors: tuple(o.dense(total) for total in vectors(put, x, r)),
        vectors=(single, composed),
    ),
    case("dense", lambda o, put, x, r: o.dense(put(x))),
    case("write", write_coded, vectors=(single,), factor=(1.0,)),
    case("write", write_coded, vectors=(single,), factor=(0.3,), dtype=(np.float64,)),
    case("write", write_coded, vectors=(composed,), factor=(1 / 3,)),
    case("subtract", subtract_coded, vectors=(single,), factor=(1.0,)),
    case("subtract", subtract_coded, vectors=(composed,), factor=(1 / 3,)),
    case("dense", lambda o, put, x, r: o.dense(Sum([Joined([put(x)]), put(r)]))),  # must not add to the first array
    case("subtract", lambda o, put, x, r, s: changed(put, x, lambda out: o.subtract(out, put(r), s)), s=SCALES),
    case(
        "subtract", lambda o, put, x, r, s: changed(put, x, lambda out: o.subtract(out, sparse(put, x, r), s)), s=SCALES
    ),
    case("write", lambda o, put, x, r, s: changed(put, x, lambda out: o.write(out, put(r), s)), s=SCALES),
    case(
        "write", lambda o, put, x, r, s: changed(put, 0 * r, lambda out: o.write(out, sparse(put, x, r), s)), s=SCALES
    ),
    case(
        "write",
        lambda o, put, x, r, s: changed(put, np.ones(x.size), lambda out: o.write(out, put(r.astype(np.float64)), s)),
        s=SCALES,
    ),
    case("write", lambda o, put, x, r: changed(put, x, lambda out: o.write(out, sparse(put, x, r, INT64), 1.0))),
    case("subtract", subtract_padded),
    case("write", write_shares_of_three_ranks),
    case("write_parts", call_write_parts, kind=("sparse", "descending", "dense", "half", "shares")),
    case("keep_if", call_keep_if, flag=(True, False, np.int32([1]), np.int32([0])), other=(False, True)),
    case("blend", lambda o, put, x, r, beta: changed(put, x, lambda out: o.blend(out, put(r), beta)), beta=(0.1, 1.0)),
    case("zero_where", lambda o, put, x, r: changed(put, x, lambda out: o.zero_where(out, put(r)))),
    case("zero_where", lambda o, put, x, r: changed(put, x, lambda out: o.zero_where(out, sparse(put, x, r)))),
    case(
        "add_all",
        lambda o, put, x, r, dtype: o.add_all([put(each.astype(dtype)) for each in (x, r, x)]),
        dtype=(np.float32, np.float16),
    ),
    case("add_all", lambda o, put, x, r: changed(put, x, lambda out: o.add_all([out, put(r)], into_first=True))),
    case(
        "scaled",
        lambda o, put, x, r, factor, limit: o.scaled(put(x), factor, limit),
        factor=(1.0, 0.3, 2.0**40),
        limit=(MAX, 0.1),
    ),
    case(
        "merge",
        lambda o, put, x, r, dtypes, n: o.merge(*overlapping(put, x, r, 2, dtypes), n),
        dtypes=((INT32, INT64), (INT32, INT32), (INT64, INT64)),
        n=(10**6, 2**31),
    ),
    case("merge", lambda o, put, x, r: o.merge(*overlapping(put, x, r[: r.size // 2], 3), 10**6)),
    case("merge", lambda o, put, x, r: o.merge(*overlapping(put, x, -x, 2), 10**6)),  # sums to zero, of any sign
]

# -- bits -----------------------------------------------------------------------------------------------------------


def integers(x: np.ndarray, width: int, dtype: Any = INT64) -> np.ndarray:
    """Return integers of ``width`` bits."""
    return (x.view(np.uint32) & ((1 << width) - 1)).astype(dtype)


WIDTHS = (0, 1, 7, 8, 13, 31)


def call_from_elias_fano(o, put, x, r, low, short):
    lows, highs = reference.elias_fano(every(3, x).astype(np.int64), low, 2 * x.size + 9)
    return o.from_elias_fano(put(lows[short:]), put(highs[: highs.size - short]), low, 2 * x.size + 9)


CASES += [
    case(
        "pack_bits",
        lambda o, put, x, r, width, dtype: o.pack_bits(put(integers(x, width, dtype)), width),
        width=WIDTHS,
        dtype=(INT32, INT64),
    ),
    case(
        "unpack_bits",
        lambda o, put, x, r, width: o.unpack_bits(put(reference.pack_bits(integers(x, width), width)), width, x.size),
        width=WIDTHS,
    ),
    case(
        "find_bits",
        lambda o, put, x, r, missing: o.find_bits(put(x.view(np.uint8)), max(32 * x.size - missing, 0)),
        missing=(0, 1, 9),
    ),
    case("find_bits", lambda o, put, x, r: o.find_bits(put(np.r_[x.view(np.uint8), np.uint8(255)]), 32 * x.size + 20)),
    case("set_bits", lambda o, put, x, r: o.set_bits(put(every(3, x)), x.size)),
    case("set_bits", lambda o, put, x, r: o.set_bits(put(every(3, x).astype(np.int64)), x.size + 5)),
    case(
        "elias_fano", lambda o, put, x, r, low: o.elias_fano(put(every(3, x)), low, 2 * x.size + 9), low=(0, 1, 7, 31)
    ),
    case("from_elias_fano", call_from_elias_fano, low=(0, 1, 7, 31), short=(0, 1)),
]

# -- codes ----------------------------------------------------------------------------------------------------------


def call_quantize(o, put, x, r, bucket, bits, norm):  # arbitrary norms: |x| may exceed the norm
    norms = np.abs(r) if norm == "arbitrary" else reference.bucket_norms(x, bucket, norm)
    return o.quantize(put(x), put(norms), bucket, bits, KEY)


def quantize_into(o, put, x, r, bucket, bits):  # an existing array
    norms = reference.bucket_norms(x, bucket, "max")
    there = np.full(-(-x.size * bits // 8), 7, np.uint8)
    return changed(put, there, lambda out: o.quantize(put(x), put(norms), bucket, bits, KEY, out))


def decode_damaged(o, put, x, r, bucket, bits, table):
    n = 32 * x.size // bits
    return o.dense(Codes(put(x.view(np.uint8)), put(damaged_norms(x, 32 * x.size)), bucket, table, bits, 0, n))


def decode_signs(o, put, x, r, scale):
    return o.dense(signs_of(put(x.view(np.uint8)), put(np.float32([scale])), max(32 * x.size - 5, 0)))


def decode_fields(o, put, x, r, width, small):
    bound = 1 if small else 2 ** (width - 1) - 1
    one = put(np.ones(1, np.float32))
    return o.dense(Fields(put(x.view(INT32)), width, bound, one, 0, x.size * (32 // width)))


def call_quantize_fields(o, put, x, r, width, limit):  # norms above the limit, below it, and 0
    there = np.full(-(-x.size // (32 // width)), 7, np.int32)
    norms = [put(np.float32([norm])) for norm in (2 * limit, 0.5 * limit, 0.0)]
    new = [o.quantize_fields(put(x), limit, norm, width, KEY) for norm in norms]
    existing = [
        changed(put, there, lambda out, norm=norm: o.quantize_fields(put(x), limit, norm, width, KEY, out))
        for norm in norms
    ]
    return *new, *existing


CASES += [
    case(
        "uniform",
        lambda o, put, x, r, count, start: o.uniform(KEY, count, like=put(x), start=start),
        count=(0, 1, 7, 5000),
        start=(0, 2**31 - 3, 2**32 - 5000),
    ),
    case(
        "distinct_indices",
        lambda o, put, x, r: tuple(o.distinct_indices(KEY, k, x.size + 1) for k in (1, x.size // 3 + 1, x.size + 1)),
    ),
    case("quantize", call_quantize, bucket=BUCKETS, bits=(2, 3, 8), norm=("max", "arbitrary")),
    case("quantize", quantize_into, bucket=(512,), bits=range(2, 9)),
    case("quantize", quantize_into, bucket=(1, 3, 1 << 62), bits=(2, 5)),
    *(case("dense", decode_damaged, bucket=BUCKETS, bits=(b,), table=(quantized_levels(b),)) for b in (2, 3, 8)),
    case("dense", decode_signs, scale=(0.0, 0.3, MAX, -1.0, np.nan, np.inf)),
    case("dense", decode_fields, width=(2, 3, 5, 12, 17, 32), small=(True, False)),
    case("quantize_fields", call_quantize_fields, width=(2, 3, 5, 8, 17), limit=(0.4, MAX)),
    case("pack_signs", lambda o, put, x, r: o.pack_signs(put(x))),
]

# -- levels ---------------------------------------------------------------------------------------------------------

TABLES = {  # bits per index, levels
    "ternary": (2, np.float32([-1, 0, 1])),
    "uneven": (3, np.float32([-0.5, -0.1, 0, 0.25, 0.3, 1])),
    "full": (8, np.linspace(-1, 1, 256, dtype=np.float32)),
    "powers": (9, np.float32([*-(2.0 ** np.arange(127, -127, -1)), 0, *2.0 ** np.arange(-126, 128)])),
}


def call_encode_levels(o, put, x, r, table, bucket, rounding_key):  # with the norms of x and with arbitrary norms
    bits, levels = TABLES[table]
    rest = bucket, levels, bits, rounding_key
    there = np.full(-(-x.size * bits // 8), 7, np.uint8)
    norms = reference.bucket_norms(x, bucket, "max")
    existing = changed(put, there, lambda out: o.encode_levels(put(x), put(norms), *rest, out))
    return existing, o.encode_levels(put(x), put(norms), *rest), o.encode_levels(put(x), put(np.abs(r)), *rest)


CASES += [
    case("encode_levels", call_encode_levels, table=TABLES, bucket=(3, 1 << 62), rounding_key=(None, KEY)),
    *(case("dense", decode_damaged, bucket=(3, 1 << 62), bits=(b,), table=(t,)) for b, t in TABLES.values()),
]

# -- 16-bit floats and range floats ---------------------------------------------------------------------------------


def to_halves(o: Any, x: Any, scale: float, limit: float = 65504.0) -> tuple[Any, int]:
    """Return the result of ``to_fp16``, with the number of clipped elements, which may be on a device, as an int."""
    half, clipped = o.to_fp16(x, scale, limit)
    return half, int(clipped)


FORMATS = ((4, 1), (8, 4), (10, 6), (16, 22))  # bits, mantissa bits
BOUNDS = (None, [0, 0], [1, 0], [TINY, MAX])


def bounds_of(x: np.ndarray, bounds: list[float] | None = None) -> np.ndarray:
    """Return the given bounds; by default, those of x."""
    return reference.float_bounds(x) if bounds is None else np.float32(bounds)


CASES += [
    case(
        "to_fp16",
        lambda o, put, x, r, scale, limit: to_halves(o, put(x), scale, limit),
        scale=SCALES,
        limit=(65504.0, 65504.0 * (1 - 2**-9) / 3),
    ),
    case("to_bf16", lambda o, put, x, r: o.to_bf16(put(x))),
    case(
        "to_bf16",
        lambda o, put, x, r: changed(put, np.full(2 * x.size, 7, np.uint8), lambda out: o.to_bf16(put(x), out)),
    ),
    case(
        "float_bounds",
        lambda o, put, x, r, sign: o.float_bounds(put(x if sign is None else sign * np.abs(x))),
        sign=(None, 1, -1),
    ),
    case(
        "range_codes",
        lambda o, put, x, r, form, bounds: o.range_codes(put(x), put(bounds_of(x, bounds)), *form),
        form=FORMATS,
        bounds=BOUNDS,
    ),
    case(
        "range_codes",
        lambda o, put, x, r, bits: o.range_codes(put(x), put(bounds_of(x)), bits, put(np.uint8([bits // 2]))),
        bits=(4, 10, 16),
    ),
    case(
        "range_values",
        lambda o, put, x, r, form, bounds: o.range_values(put(integers(x, form[0])), put(bounds_of(x, bounds)), *form),
        form=FORMATS,
        bounds=BOUNDS,
    ),
    case(  # also bytes that a damaged payload may contain
        "range_values",
        lambda o, put, x, r, mantissa: o.range_values(
            put(np.arange(x.size) % 1024), put(bounds_of(x)), 10, put(np.uint8([mantissa]))
        ),
        mantissa=(0, 5, 255),
    ),
    case(  # damaged bounds
        "range_values",
        lambda o, put, x, r: o.range_values(put(np.arange(x.size) % 256), put(np.float32([np.nan, -np.inf])), 8, 4),
    ),
    case(
        "range_mantissa",
        lambda o, put, x, r, bits: o.range_mantissa(put(x[:4096]), put(bounds_of(x)), bits),
        bits=(4, 10, 16),
    ),
]

# -- matrices -------------------------------------------------------------------------------------------------------


def few_rows(x: np.ndarray, rows: int = 3, columns: int = 40) -> np.ndarray:
    """Return a few whole rows of numbers whose products are finite."""
    size = min(x.size, rows * columns) // rows * rows
    return np.clip(x[:size], -1e18, 1e18)


def low_rank(o: Any, op: str, put: Any, p: np.ndarray, q: np.ndarray, t: int, factor: float, scale: float) -> Any:
    """Return a matrix to which a matrix of rank t was written, or from which it was subtracted."""
    out, matrix = vector("normal", p.size // t * (q.size // t)), Outer(put(p), put(q), t, scale)
    return changed(put, out, lambda out: getattr(o, op)(out, matrix, factor))


TERMS = (1, 2, 3, 4, 5, 9)
FACTORS = ((1.0, 1.0), (0.3, 1.0), (1.0, 1 / 3), (0.1, 0.7))  # factor, scale; kernels multiply by one of them

CASES += [
    case(
        "write",
        lambda o, put, x, r, t, factors: low_rank(o, "write", put, few_rows(x, t), few_rows(r, t, 7), t, *factors),
        t=TERMS,
        factors=FACTORS,
    ),
    case(
        "subtract",
        lambda o, put, x, r, t, factors: low_rank(o, "subtract", put, few_rows(x, t, 7), few_rows(r, t), t, *factors),
        t=TERMS,
        factors=FACTORS,
    ),
    case(  # several blocks
        "write", lambda o, put, x, r: low_rank(o, "write", put, few_rows(x, 2, 3), few_rows(r, 2, 2000), 2, 1.0, 1.0)
    ),
    case("permute", lambda o, put, x, r: o.permute(put(x), (x.size, 1), (1, 0))),
    case(
        "permute",
        lambda o, put, x, r: o.permute(put(few_rows(x, 12)), (2, few_rows(x, 12).size // 12, 3, 2), (2, 3, 1, 0)),
    ),
    case(
        "hadamard",
        lambda o, put, x, r, block: o.hadamard(put(x[: x.size // block * block]), block),
        block=(1, 2, 8, 64, 2048),
    ),
    case(
        "combine",
        lambda o, put, x, r, count, centre: o.combine(
            put(few_rows(r, 12)[: 4 * count]), put(few_rows(x, 4)), 4, centre
        ),
        count=(1, 2, 3),
        centre=(True, False),
    ),
]

# -- selection ------------------------------------------------------------------------------------------------------


def thirds(n: int) -> list[int]:
    """Return three sizes that add up to n; some may be 0."""
    return [n // 3, n // 2 - n // 3, n - n // 2]


DIVISORS = (1, 2, 10, 100)


def call_chunk_positions(o, put, x, r, chunk):  # of three parts; the last offset is beyond the end of its part
    parts = np.split(x, np.cumsum(thirds(x.size))[:-1])
    offsets = np.concatenate([reference.chunk_argmax(part, chunk) for part in parts])
    offsets[-1:] = chunk - 1
    return o.chunk_positions(put(offsets), chunk, thirds(x.size))


def call_largest_of(o, put, x, r, d):  # all, none and some of the candidates
    candidates, k = sparse(put, x, x), -(-x.size // (4 * d))
    found, least = o.largest_of([candidates] * 3, [k, 0, -(-k // 2)], [0, x.size, 2 * x.size + 3])
    return tuple(found), least


LEVELS = tuple(map(np.float32, (0.0, TINY, 0.1, 1.0, MAX, np.inf)))

CASES += [
    case("top_k", lambda o, put, x, r, d: o.top_k(put(x), -(-x.size // d)), d=DIVISORS),
    case(
        "top_k_parts",
        lambda o, put, x, r, d: o.top_k_parts(put(x), [x.size // d + 1, 1, 9], thirds(x.size)),
        d=DIVISORS,
    ),
    case("kth_magnitude", lambda o, put, x, r, d: o.kth_magnitude(put(x), -(-x.size // d)), d=DIVISORS),
    case("chunk_argmax", lambda o, put, x, r, chunk: o.chunk_argmax(put(x), chunk), chunk=DIVISORS),
    case(
        "chunk_positions",
        lambda o, put, x, r, chunk: o.chunk_positions(put(reference.chunk_argmax(x, chunk)), chunk, (x.size,)),
        chunk=DIVISORS,
    ),
    case("chunk_positions", call_chunk_positions, chunk=DIVISORS),
    case("largest_of", call_largest_of, d=DIVISORS),
    case("count_above", lambda o, put, x, r, t: o.count_above(put(x), t), t=LEVELS),
    case("first_above", lambda o, put, x, r, t, room: o.first_above(put(x), t, room), t=LEVELS, room=(1, 5, 10**6)),
    case("first_equal", lambda o, put, x, r, t, room: o.first_equal(put(x), t, room), t=LEVELS, room=(1, 5, 10**6)),
]

# -- spectra and statistics -----------------------------------------------------------------------------------------


CASES += [
    case("max_abs", lambda o, put, x, r: o.max_abs(put(x))),
    case("l2_norm", lambda o, put, x, r: float(np.float32(o.l2_norm(put(x / np.float32(1e4)))))),
    case(
        "bucket_norms",
        lambda o, put, x, r, bucket, norm: o.bucket_norms(put(x), bucket, norm),
        bucket=BUCKETS,
        norm=("max", "l2", "mean"),
    ),
    case("all_finite", lambda o, put, x, r: bool(o.all_finite(put(x)))),
    case(
        "all_finite",
        lambda o, put, x, r, last, dtype: bool(o.all_finite(put(np.append(x, last).astype(dtype)))),
        last=([np.inf], [np.nan], [np.inf, -np.inf], [1e300]),
        dtype=(np.float32, np.float64),
    ),
    case(
        "all_below",
        lambda o, put, x, r: (o.all_below(put(every(3, x)), x.size), o.all_below(put(every(3, x)), x.size // 2)),
    ),
    case("all_below", lambda o, put, x, r: o.all_below(put(np.array([3, -1], np.int64)), 5)),
]

CALLS: dict[str, list[Call]] = {}
for op, calls in CASES:
    CALLS.setdefault(op, []).extend(calls)
