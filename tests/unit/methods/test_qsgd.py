"""QSGD: stochastic quantization in buckets (Alistarh et al. 2017, arXiv 1610.02132)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers
from tests.unit.methods.comparing import assert_errors_average_out, assert_unbiased


def levels_around(v: np.ndarray, bits: int, bucket: int, norm: str) -> np.ndarray:
    """Return the two values [2, n] that each element may become, by the paper's definition, in float64."""
    s = 2 ** (bits - 1) - 1
    found = np.zeros((2, len(v)))
    for start in range(0, len(v), bucket):
        part = v[start : start + bucket].astype(np.float64)
        size = math.sqrt((part**2).sum()) if norm == "l2" else np.abs(part).max()
        level = np.floor(np.abs(part) / size * s)
        found[:, start : start + bucket] = np.sign(part) * np.array([level, np.minimum(level + 1, s)]) / s * size
    return found


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("n,bits,bucket", [(300, 4, 64), (97, 2, 97), (50, 8, 7), (1, 3, 512)])
def test_each_value_becomes_one_of_the_two_levels_around_it(n: int, bits: int, bucket: int, norm: str) -> None:
    net = Loopback("qsgd", world_size=1, bits=bits, bucket=bucket, norm=norm, min_elements=1)
    for step in range(3):
        g = numbers((n,), step, kind="heavy")
        levels = levels_around(g, bits, bucket, norm)
        distances = np.abs(net.allreduce([g], "w")[0] - levels)
        assert distances.min(axis=0).max() <= 1e-5 * np.abs(levels).max()


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("bits,norm", [(2, "l2"), (4, "max")])
def test_unbiased(bits: int, norm: str, route: str) -> None:
    net = Loopback("qsgd", world_size=4, bits=bits, norm=norm, route=route, bucket=64, min_elements=1)
    gradients = [numbers((200,), rank, kind="heavy") for rank in range(4)]
    assert_unbiased(net, gradients, np.mean(gradients, axis=0, dtype=np.float64), steps=120)


@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_unbiased_is_declared_without_feedback_only(route: str) -> None:
    assert hvdcompress.get_method("qsgd", route=route).unbiased
    assert not hvdcompress.get_method("qsgd", route=route, feedback="plain").unbiased


def test_errors_of_ranks_average_out() -> None:
    assert_errors_average_out("qsgd", bits=3)


def test_random_numbers_differ_between_steps_and_tensors() -> None:
    net = Loopback("qsgd", world_size=1, bits=2, min_elements=1)
    g = numbers((100,), 5)
    outs = [net.allreduce([g], name)[0] for name in ("v", "w", "w")]
    assert not np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[1], outs[2])


def test_scatter_adds_the_error_of_a_second_quantization() -> None:
    """The sum is quantized with a norm of at most the sum of norms: p times the variance of one rank's error."""
    gradients = [numbers((2048,), rank) for rank in range(4)]
    errors = {}
    for route in ("gather", "scatter"):
        net = Loopback("qsgd", min_elements=1, world_size=4, bits=8, route=route)
        errors[route] = np.square(net.allreduce(gradients, "w")[0] - np.mean(gradients, axis=0)).sum()
    assert errors["gather"] < errors["scatter"] < 3 * 4 * errors["gather"]


@pytest.mark.parametrize("bucket,settles", [(32, True), (512, False)])
def test_residual_is_bounded_if_levels_are_close_enough(bucket: int, settles: bool) -> None:
    """With √bucket < s = 7 feedback is stable; otherwise an l2 bucket's variance may exceed its energy."""
    net = Loopback("qsgd", world_size=1, bits=4, norm="l2", bucket=bucket, feedback="plain", min_elements=1)
    size = []
    for step in range(41):
        net.allreduce([numbers((1024,), 0, step)], "w")
        size.append(float(np.linalg.norm(net.residual("w", 0))))
    assert (size[40] < 1.3 * size[20]) == settles


@pytest.mark.parametrize(
    "options,words",
    [
        ({"bits": 1}, "greater than or equal to 2"),
        ({"bits": 9}, "less than or equal to 8"),
        ({"bits": True}, "not a boolean"),
        ({"bucket": 0}, "greater than or equal to 1"),
        ({"norm": "l1"}, "'max' or 'l2'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvdcompress.get_method("qsgd", **options)
