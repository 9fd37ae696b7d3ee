"""QSGD: stochastic quantization in buckets (Alistarh et al. 2017, arXiv 1610.02132)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers
from tests.unit.methods.quantizers import assert_errors_average_out, assert_nothing_is_lost


def levels_around(v: np.ndarray, bits: int, bucket: int, norm: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the two values that each element may become, by the paper's definition, in float64."""
    s, low, high = 2 ** (bits - 1) - 1, np.zeros(len(v)), np.zeros(len(v))
    for start in range(0, len(v), bucket):
        part = v[start : start + bucket].astype(np.float64)
        size = math.sqrt((part**2).sum()) if norm == "l2" else np.abs(part).max()
        level = np.floor(np.abs(part) / size * s) if size else 0 * part
        low[start : start + bucket] = np.sign(part) * level / s * size
        high[start : start + bucket] = np.sign(part) * np.minimum(level + 1, s) / s * size
    return low, high


def run_one_of_two_levels(
    world_size: int = 1, n: int = 300, bits: int = 4, bucket: int = 64, norm: str = "max", steps: int = 3
) -> None:
    net = Loopback("qsgd", world_size=world_size, bits=bits, bucket=bucket, norm=norm, min_elements=1)
    for step in range(steps):
        gradients = [numbers((n,), rank, step, kind="heavy") for rank in range(world_size)]
        out = net.allreduce(gradients, "w", op="sum")[0]
        bounds = np.array([levels_around(g, bits, bucket, norm) for g in gradients])
        tolerance = 1e-5 * np.abs(bounds).max()
        assert (out >= bounds.min(1).sum(0) - tolerance).all() and (out <= bounds.max(1).sum(0) + tolerance).all()
        if world_size == 1:
            nearest = np.minimum(np.abs(out - bounds[0, 0]), np.abs(out - bounds[0, 1]))
            assert nearest.max() <= tolerance, "a value that is no level"


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("world_size,n,bits,bucket", [(1, 300, 4, 64), (1, 97, 2, 97), (3, 50, 8, 7), (2, 1, 3, 512)])
def test_each_value_becomes_one_of_the_two_levels_around(
    world_size: int, n: int, bits: int, bucket: int, norm: str
) -> None:
    run_one_of_two_levels(world_size, n, bits, bucket, norm)


def run_unbiased(steps: int = 300, world_size: int = 4, n: int = 200, **options: Any) -> None:
    """On each route, the mean over steps approaches the gradients' mean as 1/√steps, not slower."""
    net = Loopback("qsgd", world_size=world_size, min_elements=1, **options)
    gradients = [numbers((n,), rank, kind="heavy") for rank in range(world_size)]
    outs = np.array([net.allreduce(gradients, "w")[0] for _ in range(steps)], np.float64)
    error = outs.mean(0) - np.mean(gradients, axis=0, dtype=np.float64)
    expected = outs.var(0).sum() / steps  # of the mean's error energy, if there is no bias
    assert (error**2).sum() < 1.5 * expected


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("bits,norm", [(2, "l2"), (4, "max"), (8, "l2")])
def test_unbiased(bits: int, norm: str, route: str) -> None:
    run_unbiased(bits=bits, norm=norm, route=route, bucket=64)


@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_unbiased_is_declared_without_feedback_only(route: str) -> None:
    assert hvdcompress.get("qsgd", route=route).unbiased
    assert not hvdcompress.get("qsgd", route=route, feedback="plain").unbiased


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", ["normal", "heavy", "constant"])
def test_variance_is_within_the_papers_bound(bits: int, kind: Any) -> None:
    """E‖Q(v) − v‖² ≤ min(n/s², √n/s)·‖v‖² for l2 buckets of n elements, and so for a vector of many buckets."""
    bucket, s = 32, 2 ** (bits - 1) - 1
    net = Loopback("qsgd", world_size=1, bits=bits, bucket=bucket, norm="l2", min_elements=1)
    v = numbers((320,), 3, kind=kind)
    errors = [np.square(net.allreduce([v], "w")[0] - v, dtype=np.float64).sum() for _ in range(150)]
    bound = min(bucket / s**2, math.sqrt(bucket) / s) * np.square(v, dtype=np.float64).sum()
    assert np.mean(errors) <= bound


def test_errors_of_ranks_average_out() -> None:
    assert_errors_average_out("qsgd", bits=3)


def test_each_step_and_tensor_draws_anew() -> None:
    net = Loopback("qsgd", world_size=1, bits=2, min_elements=1)
    g = numbers((100,), 5)
    outs = [net.allreduce([g], name)[0] for name in ("v", "w", "w")]
    assert not np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[1], outs[2])


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("n,bits,bucket", [(1000, 4, 512), (1009, 2, 512), (4096, 8, 100), (5, 3, 2)])
def test_bytes_by_the_formula(n: int, bits: int, bucket: int, route: str) -> None:
    def coded(count: int) -> int:
        return 4 * math.ceil(count / bucket) + math.ceil(count * bits / 8)

    for world_size in (1, 2, 5):
        net = Trial(hvdcompress.get("qsgd", bits=bits, bucket=bucket, route=route), world_size)
        net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
        expected = 24 + coded(n) if route == "gather" else (world_size + 1) * coded(math.ceil(n / world_size))
        assert net.ledger.bytes_sent(0) == expected == sum(len(c.sent[0]) for c in net.log)


def test_scatter_costs_the_same_for_any_number_of_workers() -> None:
    """Up to the rounding of shards, about two payloads are on the wire; with gather there are p − 1."""
    n, carried = 64 * 512, {"gather": {}, "scatter": {}}
    for route, found in carried.items():
        for world_size in (4, 16, 64):
            net = Loopback("qsgd", min_elements=1, world_size=world_size, route=route)
            net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
            found[world_size] = net.ledger.bytes_on_wire(0)
    payload = 4 * n // 512 + n // 2
    for world_size, num_bytes in carried["scatter"].items():
        assert num_bytes == 2 * (world_size - 1) * payload // world_size
        assert carried["gather"][world_size] == (world_size - 1) * (payload + 24)


def test_routes_give_the_same_up_to_the_second_rounding() -> None:
    world_size, n = 4, 2048
    gradients = [numbers((n,), rank) for rank in range(world_size)]
    mean, errors = np.mean(gradients, axis=0), {}
    for route in ("gather", "scatter"):
        net = Loopback("qsgd", min_elements=1, world_size=world_size, bits=8, route=route)
        errors[route] = np.square(net.allreduce(gradients, "w")[0] - mean).sum()
    # the sum is quantized with a norm of at most the sum of norms: p times the variance of one, of p in all
    assert errors["gather"] < errors["scatter"] < 3 * world_size * errors["gather"]


def test_one_worker_by_scatter_quantizes_twice_and_is_the_same_everywhere() -> None:
    g = numbers((100,), 6)
    for world_size in (1, 3):
        outs = Loopback("qsgd", world_size=world_size, route="scatter", min_elements=1).allreduce([g] * world_size, "w")
        assert all(out.tobytes() == outs[0].tobytes() for out in outs)
        assert np.abs(outs[0] - g).max() <= 2 * np.abs(g).max() / 7 * 1.001


@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_nothing_is_lost_with_feedback(route: str) -> None:
    """Scatter assigns each rounding error to one rank."""
    assert_nothing_is_lost("qsgd", 3e-5, bits=4, bucket=32, route=route, feedback="plain")


@pytest.mark.parametrize("bucket,settles", [(32, True), (512, False)])
def test_residual_settles_where_levels_are_close_enough(bucket: int, settles: bool) -> None:
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
def test_wrong_hyperparameters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvdcompress.get("qsgd", **options)
