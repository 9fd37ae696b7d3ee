"""The ops of ``arithmetic.py``: add, subtract and write dense and sparse vectors."""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.scan import Found, Scan, Velocity
from hvdcompress.ops.vectors import Codes, Fields, Half, Joined, LevelCodes, Shares, Sparse, Sum, piece_of
from tests.unit.ops.comparing import MAX, SPECIAL, Put, call, changed, chosen, get, host, vector

INDEX = ("int32", "int64")


def cut(n: int) -> list[int]:
    """Sizes that add up to n, some of them 0."""
    return [0, n // 3, 0, n // 2 - n // 3, n - n // 2]


# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


def runs(x: np.ndarray) -> np.ndarray:
    """Three ascending runs of indices, as three ranks send them; the second is empty for few elements."""
    return np.concatenate([chosen(x), chosen(x, 7)[1:], chosen(x, 2)])


def parts_of(kind: str, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """What is written to several parts, of which each third one is 0 before."""
    outs = [put(np.full(size, number % 3, np.float32), changes=True) for number, size in enumerate(cut(x.size))]
    index = runs(x)[::-1].copy() if kind == "descending" else runs(x)
    given = Sparse(put(index), put(r[index]))
    half = Half(put(reference.to_fp16(x, 1.0)[0]), 0.5)
    total = {"sparse": given, "descending": given, "dense": put(x), "half": half, "shares": Shares([given, given])}[
        kind
    ]
    o.write_parts(outs, total, 0.3)
    return tuple(outs)


for kind in ("sparse", "descending", "dense", "half", "shares"):
    call("write_parts")(partial(parts_of, kind))


def told(found: Found) -> tuple[Any, ...]:
    """What was found; where an element is not finite, nothing but that."""
    if not found.finite:
        return (False,)
    above = None if found.above is None else tuple(found.above)
    return True, found.offsets, above, found.signs, found.moments is not None


def accumulated(scan: Scan, scale: float, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """What is found when gradient and residual are added, and what is written."""
    gradient, out = put(x), put(np.ones_like(r), changes=True)
    found = o.accumulate(gradient, put(r), scale, out, scan)
    return *told(found), out


def accumulated_parts(scans: list[Scan], velocity: bool, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """The same of several gradients, in another order than their parts; some are empty."""
    spans = list(itertools.pairwise(itertools.accumulate(cut(x.size), initial=0)))[::-1]
    gradients = [put(x[start:stop]) for start, stop in spans]
    out, new = put(np.ones_like(r), changes=True), put(np.ones_like(r), changes=velocity)
    moved = Velocity(put(r[::-1].copy()), new, 0.9) if velocity else None
    given = gradients, put(r), [1.0, 0.3, 2.0, 0.5, 1.0], out, spans, [scans[n % len(scans)] for n in range(5)]
    return *map(told, o.accumulate_parts(*given, moved)), out, new


ABOVE = Scan(above=0.5, capacity=10**6), Scan(above=np.float32(0), capacity=3), Scan(above=1.5, capacity=10**6)
for scans in (
    [Scan()],
    list(ABOVE),
    [Scan(), *ABOVE],
    [Scan(chunk=7)],
    [Scan(moments=True), *ABOVE],
    [Scan(above=-1.0, capacity=10**6)],
):
    for velocity in (False, True):
        call("accumulate_parts")(partial(accumulated_parts, scans, velocity))


def with_velocity(scan: Scan, scale: float, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """The same, with momentum."""
    gradient, out, new = put(x), put(np.ones_like(r), changes=True), put(0 * r, changes=True)
    found = o.accumulate(gradient, put(r[::-1].copy()), scale, out, scan, Velocity(put(r), new, 0.9))
    return *told(found), out, new


def coded(kind: str, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """Coded vectors of n elements, made by the reference."""
    n, key = x.size, np.array([77], np.uint32)
    mean = reference.bucket_norms(x, n, "mean") if n else np.zeros(1, np.float32)
    if kind == "fp16":
        return Half(put(reference.to_fp16(r, 1.0)[0]), 3.0)
    if kind == "bf16":
        return Half(put(reference.to_bf16(r)), 0.3)
    if kind == "signs":
        return Codes(put(reference.pack_signs(r)), put(mean), max(n, 1), 1, 0, n)
    if kind == "fields":
        words = reference.quantize_fields(r, 1.5, np.float32([1.5]), 3, key)
        return Fields(put(words), 3, 2, put(np.float32([0.7])), 0, n)
    if kind.startswith("levels"):
        bits, bucket = (int(word) for word in kind.split()[1].split("/"))
        table = np.linspace(-1, 1, (1 << bits) - 1, dtype=np.float32)
        norms = reference.bucket_norms(r, bucket, "max")
        codes = reference.encode_levels(r, norms, bucket, table, bits)
        return LevelCodes(put(codes), put(norms), bucket, table, bits, 0, n)
    bits, bucket = map(int, kind.split("/"))
    norms, codes = reference.quantize_max(r, bucket, bits, key)
    return Codes(put(codes), put(norms), bucket, bits, 0, n)


KINDS = ["fp16", "bf16", "signs", "fields", *(f"{bits}/512" for bits in range(2, 9)), "4/3", "2/1000000", "8/1"]
KINDS += ["levels 4/256", "levels 8/3", "levels 9/1000000", "levels 3/7"]
CUT = ("fp16", "bf16", "signs", "fields", "3/512", "8/1", "levels 4/256", "levels 9/1000000")


def totals(put: Any, x: np.ndarray, r: np.ndarray) -> dict[str, Any]:
    """Coded vectors of all kinds; sums, pieces, and vectors end to end."""
    found = {kind: coded(kind, put, x, r) for kind in KINDS}
    found |= {f"two of {kind}": Sum([coded(kind, put, x, r), coded(kind, put, r, x)]) for kind in CUT}
    found["three"] = Sum([coded("4/512", put, x, r), put(x), coded("bf16", put, x, r)])
    found["array first"] = Sum([put(r), coded("signs", put, x, r)])
    third, n = x.size // 3, x.size
    for kind in (*CUT, "two of 8/1", "two of signs", "three"):
        cuts = [piece_of(found[kind], a, b) for a, b in ((third, 2 * third), (2 * third, n), (0, third))]
        found[f"{kind}, cut"] = Joined([cuts[2], cuts[0], put(np.full(0, 1, np.float32)), cuts[1]])
        found[f"{kind}, cut again"] = Joined([found[f"{kind}, cut"].piece(third // 2, n), put(r[: third // 2])])
    return found


def each(o: Any, put: Any, x: np.ndarray, r: np.ndarray, function: Any, dtype: str = "float32") -> Any:
    return tuple(
        changed(o, put, x.astype(dtype), lambda out, y=y: function(out, y)) for y in totals(put, x, r).values()
    )


def sum_of_parts(o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """The first of two summands is one array, which stays as it is."""
    return o.dense(Sum([Joined([put(x)]), put(r)]))


call("dense")(sum_of_parts)
call("dense")(lambda o, put, x, r: tuple(o.dense(y) for y in totals(put, x, r).values()))
call("dense")(lambda o, put, x, r: o.dense(put(x)))
for factor in (1.0, 1 / 3):
    call("write")(lambda o, put, x, r, f=factor: each(o, put, x, r, lambda out, y: o.write(out, y, f)))
    call("subtract")(lambda o, put, x, r, f=factor: each(o, put, x, r, lambda out, y: o.subtract(out, y, f)))
call("write")(lambda o, put, x, r: each(o, put, x, r, lambda out, y: o.write(out, y, 0.3), "float64"))


for scale in (1.0, 0.3, 2.0**-16):
    for scan in (
        Scan(),
        Scan(moments=True),
        Scan(chunk=1),
        Scan(chunk=7),
        Scan(chunk=10**6),
        Scan(above=0.5, capacity=10**6),
        Scan(above=np.float32(0), capacity=3),
        Scan(above=-1.0, capacity=10**6),
        Scan(moments=True, above=0.5, capacity=10**6),
        Scan(moments=True, chunk=7, above=0.5, capacity=10**6),
        Scan(signs=True),
        Scan(signs=True, chunk=7),
    ):
        call("accumulate")(partial(accumulated, scan, scale))
    for scan in (Scan(), Scan(above=0.5, capacity=10**6), Scan(moments=True), Scan(chunk=7), Scan(signs=True)):
        call("accumulate")(partial(with_velocity, scan, scale))
    call("subtract")(lambda o, put, x, r, s=scale: changed(o, put, x, lambda out: o.subtract(out, put(r), s)))
    call("subtract")(
        lambda o, put, x, r, s=scale: changed(
            o, put, x, lambda out: o.subtract(out, Sparse(put(chosen(x)), put(r[chosen(x)])), s)
        )
    )
    call("write")(lambda o, put, x, r, s=scale: changed(o, put, x, lambda out: o.write(out, put(r), s)))
    call("write")(
        lambda o, put, x, r, s=scale: changed(
            o,
            put,
            np.zeros_like(r),
            lambda out: o.write(out, Sparse(put(chosen(x)), put(r[chosen(x)])), s),
        )
    )
    call("write")(
        lambda o, put, x, r, s=scale: changed(
            o, put, np.ones(x.size, np.float64), lambda out: o.write(out, put(r.astype(np.float64)), s)
        )
    )
for finite in (True, False, np.array([1], np.int32), np.array([0], np.int32)):  # the latter as a device has them

    def kept(other: bool, o: Any, put: Any, x: np.ndarray, r: np.ndarray, flag: Any = finite) -> Any:
        flag = flag if isinstance(flag, bool) else put(flag)
        return changed(o, put, x, lambda out: o.keep_if(flag, out, put(r)) if other else o.keep_if(flag, out))

    call("keep_if")(partial(kept, True))
    call("keep_if")(partial(kept, False))
for beta in (0.1, 1.0):
    call("blend")(lambda o, put, x, r, b=beta: changed(o, put, x, lambda out: o.blend(out, put(r), b)))
call("zero_where")(lambda o, put, x, r: changed(o, put, x, lambda out: o.zero_where(out, put(r))))
call("zero_where")(
    lambda o, put, x, r: changed(o, put, x, lambda out: o.zero_where(out, Sparse(put(chosen(x)), put(r[chosen(x)]))))
)
call("add_all")(lambda o, put, x, r: o.add_all([put(x), put(r), put(x)]))
call("add_all")(lambda o, put, x, r: changed(o, put, x, lambda out: o.add_all([out, put(r)], into_first=True)))
for factor in (1.0, 0.3, 2.0**40):
    call("scaled")(lambda o, put, x, r, f=factor: (o.scaled(put(x), f), o.scaled(put(x), f, 0.1)))


@call("subtract")
def _(o, put, x, r):  # the padding of Gaussian-k: the last index again and again, with 0
    index = np.r_[chosen(x), [max(x.size - 1, 0)] * min(x.size, 3)].astype(np.int64)
    values = np.r_[r[chosen(x)], [0.0] * min(x.size, 3)].astype(np.float32)
    return changed(o, put, x, lambda out: o.subtract(out, Sparse(put(index), put(values)), 1.0))


@call("write")
def _(o, put, x, r):  # three ranks' shares, which overlap: sums in the order of ranks
    index = np.concatenate([chosen(x, 2), chosen(x, 3), chosen(x, 1)])
    values = np.concatenate([x[chosen(x, 2)], r[chosen(x, 3)], x[::-1]])
    return changed(o, put, x, lambda out: o.write(out, Sparse(put(index), put(values)), 1 / 3))


@call("write")
def _(o, put, x, r):  # distinct indices, 64 bits
    total = Sparse(put(chosen(x).astype(np.int64)), put(r[chosen(x)]))
    return changed(o, put, x, lambda out: o.write(out, total, 1.0))


def two(x: np.ndarray, y: np.ndarray, overlap: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two sparse vectors of the numbers in x and y; their places overlap in part."""
    step = 2 if overlap else 3
    return [(2 * np.arange(x.size), x), (step * np.arange(y.size) + (0 if overlap else 1), y)]


def merged(ops: Any, put: Any, pair: list[tuple[np.ndarray, np.ndarray]], n: int, dtypes: Any = INDEX[:1] * 2) -> Any:
    parts = [Sparse(put(i.astype(d)), put(v)) for (i, v), d in zip(pair, dtypes, strict=True)]
    return ops.merge(*parts, n)


for dtypes in (INDEX, INDEX[:1] * 2, INDEX[1:] * 2):
    for n in (10**6, 2**31):
        call("merge")(lambda o, put, x, r, d=dtypes, n=n: merged(o, put, two(x, r), n, d))
call("merge")(lambda o, put, x, r: merged(o, put, two(x, r[: r.size // 2], overlap=False), 10**6))
call("merge")(lambda o, put, x, r: merged(o, put, two(x, -x), 10**6))  # to zeros, whatever their sign was


# -- sums in a fixed order ----------------------------------------------------------------------------------------


def test_sums_of_many_ranks_are_added_in_rank_order(backend: Any) -> None:
    rng = np.random.default_rng(5)
    shares = [np.sort(rng.choice(200, 50, replace=False)) for _ in range(16)]
    index = np.concatenate([*shares, [0] * 40]).astype(np.int32)
    values = (rng.normal(size=index.size) * 10.0 ** rng.integers(-8, 8, index.size)).astype(np.float32)
    values[-40:] = 0
    put, expected = Put(backend), np.zeros(200, np.float32)
    reference.write(expected, Sparse(index, values), 0.7)
    out = put(expected * 0 + 1, changes=True)
    backend.write(out, Sparse(put(index), put(values)), 0.7)
    assert get(out) == get(expected)


@pytest.mark.parametrize("op", ["write", "merge"])
def test_torch_adds_no_index_twice_at_once(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """A device would do it in any order, or one of them would be lost."""
    torch, ops = pytest.importorskip("torch"), importlib.import_module("hvdcompress.ops.torch")
    calls, add = [], ops.arithmetic._add_at

    def watch(out: Any, index: Any, values: Any) -> None:
        assert len(index.unique()) == len(index)
        calls.append(len(index))
        add(out, index, values)

    monkeypatch.setattr("hvdcompress.ops.torch.arithmetic._add_at", watch)
    index = torch.tensor([0, 2, 5, 5, 5, 2, 5, 7, 0, 1, 2, 2])
    values = torch.tensor([1.0, 2, 3, 0, 0, 4, 5, 6, 7, 8, 9, 0])
    if op == "write":
        ops.write(torch.ones(8), Sparse(index, values), 1.0)
        assert calls == [5, 3, 1]  # the third for index 2, which three ranks sent
    else:
        merged(ops, Put(ops), two(vector("normal", 50), vector("normal", 50)), 100)
        assert calls == [50, 50]


# -- merge, against an independent word for it --------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(0, 40), st.floats(-10, 10, width=32)),
    st.dictionaries(st.integers(0, 40), st.floats(-10, 10, width=32)),
)
def test_merge_is_the_sum_of_two_dictionaries(a: dict[int, float], b: dict[int, float]) -> None:
    parts = [Sparse(np.array(sorted(d), np.int32), np.array([d[i] for i in sorted(d)], np.float32)) for d in (a, b)]
    index, values = reference.merge(*parts, 41)
    assert index.tolist() == sorted(a | b) and index.dtype == np.int32
    expected = [np.float32(np.float32(a.get(i, 0)) + np.float32(b.get(i, 0))) for i in sorted(a | b)]
    assert values.tolist() == [float(e) for e in expected] and values.dtype == np.float32


def test_merge_sums_in_either_order_alike(backend: Any) -> None:
    x, y = vector("heavy", 500), vector("special", 500)
    with np.errstate(over="ignore"):
        there = merged(backend, Put(backend), two(x, y), 1000)
        back = merged(backend, Put(backend), two(x, y)[::-1], 1000)
    assert get(there) == get(back)


# -- scaled -------------------------------------------------------------------------------------------------------


def test_scaled_keeps_the_special_ones_finite(backend: Any) -> None:
    found = host(backend.scaled(Put(backend)(np.array(SPECIAL, np.float32)), 64.0))
    assert np.isfinite(found).all() and found.max() == np.float32(MAX)
