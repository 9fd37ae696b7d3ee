"""The ops of ``statistics.py``: numbers about an array."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.scan import Halves, Scan
from hvdcompress.parts import select
from tests.unit.ops.comparing import MAX, Put, call, chosen, host, vector

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


call("moments")(lambda o, put, x, r: None)  # in float64: test_moments
for scan in (Scan(), Scan(largest=True), Scan(moments=True, largest=True), Scan(signs=True), Scan(chunk=7)):

    @call("inspect")
    def _(o, put, x, r, scan=scan):  # the moments, in float64: test_moments
        found = o.inspect(put(x), scan)
        if not found.finite:
            return False
        return found.moments is None, found.offsets, found.signs, found.largest


call("max_abs")(lambda o, put, x, r: o.max_abs(put(x)))
call("l2_norm")(lambda o, put, x, r: float(np.float32(o.l2_norm(put(x / np.float32(1e4))))))
for bucket in (1, 3, 512, 1 << 62):
    for norm in ("max", "l2", "mean"):
        call("bucket_norms")(lambda o, put, x, r, b=bucket, m=norm: o.bucket_norms(put(x), b, m))
call("all_finite")(lambda o, put, x, r: bool(o.all_finite(put(x))))
call("all_finite")(lambda o, put, x, r: bool(o.all_finite(put(np.append(x, np.float32(np.inf))))))
call("all_finite")(lambda o, put, x, r: bool(o.all_finite(put(np.append(x, np.float32(np.nan))))))
call("all_finite")(lambda o, put, x, r: bool(o.all_finite(put(np.append(x.astype(np.float64), [np.inf, -np.inf])))))
call("all_finite")(lambda o, put, x, r: bool(o.all_finite(put(np.full(3, 1e300)))))
call("all_below")(lambda o, put, x, r: (o.all_below(put(chosen(x)), x.size), o.all_below(put(chosen(x)), x.size // 2)))
call("all_below")(lambda o, put, x, r: o.all_below(put(np.array([3, -1], np.int64)), 5))


# -- moments ------------------------------------------------------------------------------------------------------


def accumulated(backend: Any, x: np.ndarray, out: np.ndarray, scan: Scan) -> Any:
    put = Put(backend)
    found = backend.accumulate(put(x), put(0 * x), 1.0, put(out, changes=True), scan)
    return found.moments


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "ties", "special"])
def test_moments(backend: Any, kind: str) -> None:
    for n in (0, 1, 2, 257, 65_537, 1_000_003):
        if n > 10**4 and backend.__name__.endswith(".triton"):
            break  # too long in its interpreter
        x = vector(kind, n)
        size = float(np.sqrt(np.square(x, dtype=np.float64).mean())) if n else 0.0
        mean, std = reference.moments(x)
        out = np.zeros_like(x)
        for found in (
            backend.moments(Put(backend)(x)),
            accumulated(backend, x, out, Scan(moments=True)),
            accumulated(backend, x, out, Scan(moments=True, above=0.5, capacity=n)),
            backend.inspect(Put(backend)(x), Scan(moments=True, largest=True)).moments,
        ):
            assert abs(found[0] - mean) <= 1e-12 * size
            assert abs(found[1] - std) <= 1e-12 * size
            if kind == "normal":  # the threshold of Gaussian-k is the same float
                start = [np.float32(select.gaussian_threshold(*m, 0.01)) for m in (found, (mean, std))]
                assert start[0] == start[1]


@call("inspect")
def _(o, put, x, r):  # and what is written to the array of halves
    out = put(np.zeros(x.size, np.float16), changes=True)
    found = o.inspect(put(x), Scan(halves=Halves(0.5, 60000.0, out)))
    return (int(found.saturated), out) if found.finite else False


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_look_tells_what_is_not_finite(backend: Any, bad: float) -> None:
    for place in (0, 300, 999):
        x = np.full(1000, MAX, np.float32)
        for scan in (Scan(), Scan(moments=True, largest=True)):
            assert backend.inspect(Put(backend)(x), scan).finite
        x[place] = bad
        for scan in (Scan(), Scan(moments=True, largest=True)):
            with np.errstate(all="ignore"):
                assert not backend.inspect(Put(backend)(x), scan).finite


def test_equal_elements_deviate_by_nothing(backend: Any) -> None:
    for value in (0.1, -3e37, 1e-30):
        assert backend.moments(Put(backend)(np.full(1000, value, np.float32)))[1] == 0.0


# -- norms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1.0, 1e37])
def test_norm_neither_overflows_nor_vanishes(backend: Any, size: float) -> None:
    for n in (1, 2, 1000, 65_537):
        x = (vector("normal", n).clip(-3, 3) * np.float32(size)).astype(np.float32)
        expected = math.sqrt(math.fsum(float(value) ** 2 for value in x))
        assert backend.l2_norm(Put(backend)(x)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert backend.l2_norm(Put(backend)(np.zeros(0, np.float32))) == 0.0


@pytest.mark.parametrize("n,bucket", [(1, 1), (7, 3), (512, 512), (513, 512), (1500, 1025), (4099, 10**9)])
def test_norms_are_their_definition(backend: Any, n: int, bucket: int) -> None:
    for kind in ("normal", "heavy", "special", "constant"):
        x, put = vector(kind, n), Put(backend)
        parts = [x[i : i + bucket].astype(np.float64) for i in range(0, n, bucket)]
        for norm, function in (
            ("max", lambda part: np.abs(part).max()),
            ("l2", lambda part: min(math.sqrt(math.fsum(part**2)), MAX)),
            ("mean", lambda part: math.fsum(np.abs(part)) / len(part)),
        ):
            found = host(backend.bucket_norms(put(x), bucket, norm))
            np.testing.assert_array_equal(found, np.float32([function(part) for part in parts]))
            put.check()


def test_no_element_exceeds_its_norm(backend: Any) -> None:
    """Or a level above s would be wanted. Largest elements in all company, and at the ends of float32's range."""
    rng = np.random.default_rng(0)
    for scale in (1e-45, 1e-38, 1.0, 1e37, MAX / 8):
        x = (scale * rng.normal(size=(2000, 4))).astype(np.float32)
        x[:, 1:] *= (10.0 ** -rng.uniform(0, 9, (2000, 3))).astype(np.float32)
        for norm in ("max", "l2"):
            norms = host(backend.bucket_norms(Put(backend)(x.ravel()), 4, norm))
            assert np.isfinite(norms).all() and (np.abs(x).max(1) <= norms).all()
    huge = host(backend.bucket_norms(Put(backend)(np.full(5000, MAX, np.float32)), 5000, "l2"))
    assert huge.tolist() == [MAX]
