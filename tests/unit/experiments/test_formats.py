"""Number formats: their errors on data for which they are known."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.papers.fft import formats


def test_errors_of_formats_on_normal_data() -> None:
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    found = {name: formats.error([x], change) for _, name, change in formats.formats()}
    step = np.abs(x).max() / 127  # of a uniform code of 8 bits: the error of rounding is step/√12
    assert formats.error([x], lambda x: formats.uniform(x, 8)) == pytest.approx(step / 12**0.5, rel=0.02)
    assert (
        found["rangefloat8"]
        == formats.error([x], lambda x: formats.coded(x, "rangefloat8m4"))
        == pytest.approx(0.0133, abs=5e-4)
    )
    assert found["rangefloat10"] == pytest.approx(0.0036, abs=2e-4)
    assert found["fp8 e5m2"] == pytest.approx(2 * found["fp8 e4m3"], rel=0.1)
    assert found["e4m3"] == pytest.approx(found["fp8 e4m3"], rel=0.05)
    assert found["e5m2"] == pytest.approx(found["fp8 e5m2"], rel=0.05)
    assert found["bf16"] == pytest.approx(2.0**-9 * 0.85, rel=0.1)


def test_small_floats_are_those_of_the_mx_formats() -> None:
    """OCP Microscaling Formats 1.0, table 5: all numbers of e2m3 and e3m2, whose largest are 7.5 and 28."""
    for exponent, mantissa, bias, largest in ((2, 3, 1, 7.5), (3, 2, 3, 28.0)):
        steps = np.arange(2**mantissa) / 2**mantissa
        normal = np.concatenate([(1 + steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent)])
        numbers = np.concatenate([steps * 2.0 ** (1 - bias), normal]).astype(np.float32)
        assert numbers.max() == largest
        assert (formats.small_float(numbers, exponent, mantissa) == numbers).all()
        between = np.append((numbers[1:] + numbers[:-1]) / 2 * np.float32(1.0001), np.float32(largest))
        assert (formats.small_float(between, exponent, mantissa)[:-1] == numbers[1:]).all()


def test_statistics_tell_waves_from_heavy_tails() -> None:
    waves = np.sin(np.arange(4096) / 50).astype(np.float32)
    heavy = np.random.default_rng(0).standard_t(2, 4096).astype(np.float32)
    smooth, rough = formats.statistics_of(waves), formats.statistics_of(heavy)
    assert smooth["correlation"] > 0.99 and smooth["kurtosis"] < 2
    assert abs(rough["correlation"]) < 0.1 and rough["kurtosis"] > 6
