"""``bench.formats``: its errors on data for which they are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.bench import formats
from experiments.output import gradients


def test_errors_of_formats_on_normal_data() -> None:
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    found = {name: formats.error([x], change) for _, name, change in formats.formats()}
    step = np.abs(x).max() / 127  # of a uniform code of 8 bits: the error of rounding is step/√12
    assert formats.error([x], lambda x: formats.uniform(x, 8)) == pytest.approx(step / 12**0.5, rel=0.02)
    assert found["rangefloat8"] == found["rangefloat8m4"] == pytest.approx(0.0133, abs=5e-4)
    assert found["rangefloat10"] == found["rangefloat10m6"] == pytest.approx(0.0036, abs=2e-4)
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


def test_tables_of_saved_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, waves = np.random.default_rng(0), np.sin(np.arange(4096) / 50)
    steps = [
        [{"waves": waves * (step + 1), "heavy": rng.standard_t(2, 4096), "small": waves[:10]}] for step in range(3)
    ]
    file = tmp_path / "g.safetensors"
    gradients.save(
        file, [[{name: x.astype(np.float32) for name, x in one.items()} for one in ranks] for ranks in steps]
    )
    tensors, medians = formats.measure([file], 0.15)
    of_heavy, of_waves = tensors
    assert (of_waves.name, of_waves.size) == ("waves", 4096)
    assert of_waves.correlation > 0.99 and of_waves.fft < 0.02 < 0.5 < of_waves.topk and of_waves.kurtosis < 2
    assert abs(of_heavy.correlation) < 0.1 and of_heavy.topk < of_heavy.fft and of_heavy.kurtosis > 6
    assert {row.bits for row in medians} == {*formats.BITS, 16}
    formats.main([str(file)])
    assert "| heavy | 4,096 |" in capsys.readouterr().out
