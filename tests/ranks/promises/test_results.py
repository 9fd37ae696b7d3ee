"""A driver returns what the loopback returns for the same gradients."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks.checks import assert_close
from tests.ranks.comparison import all_exchanges, assert_equal_results, assert_equals_loopback
from tests.ranks.exchanges import METHODS
from tests.ranks.watching import carries


@pytest.mark.also("one rank", "three ranks")
def test_results_equal_the_loopback(driver):
    """To the bit with two ranks, to rounding with more."""
    for found in all_exchanges(driver):
        assert_equal_results(driver, found)


@pytest.mark.also("three ranks")
def test_all_ranks_get_the_same_bits(driver):
    for found in all_exchanges(driver):
        assert all(digests == found.digests[0] for digests in found.digests), found


def test_residuals_equal_the_loopback(driver):
    for found in all_exchanges(driver):
        for name, (got, want) in found.residuals.items() if driver.exact_with(found.method) else ():
            np.testing.assert_array_equal(got, want, err_msg=f"{found}, {name}")


@pytest.mark.also("three ranks")
def test_ledger_counts_the_bytes_and_events_of_the_loopback(driver):
    """Tensor by tensor, but for the probes and statuses that the driver lists."""
    for found in all_exchanges(driver):
        assert found.sent[0] == found.sent[1], str(found)
        assert found.counters[0] == found.counters[1] or not driver.exact_with(found.method), str(found)


@pytest.mark.excepted("loopback", "collectives are counted by node, not by rank", kind="two levels")
def test_ledger_counts_the_bytes_that_the_transport_is_given(driver):
    for found in all_exchanges(driver):
        assert found.in_ledger == found.given > 0, str(found)


def test_payloads_equal_the_loopback(driver):
    """As an observer sees them, in order: to the byte with two ranks, in number and length with more."""
    for found in all_exchanges(driver):
        for name, (got, want) in found.payloads.items():
            if name in found.unseen or not driver.exact_with(found.method):
                got, want = ([bytes(len(payload)) for payload in payloads] for payloads in (got, want))
            assert carries(got, want, driver.probe), f"{found}, {name}"
        assert found.events["begun"] and found.events["committed"], str(found)


@pytest.mark.also("one rank", "three ranks", "two levels", "gloo")
@pytest.mark.excepted("ddp", "DDP averages, and does nothing else")
@pytest.mark.parametrize("method", ["none", "topk", "scalecom", "fp16", "qsgd"])
def test_sum_in_place_of_the_average(driver, method):
    assert_equals_loopback(driver, method, METHODS.get(method, {}), steps=2, op="sum")


def test_rules_and_seed(driver):
    """A plan's rules give tensors methods of their own, and its seed changes what is random."""
    rules = [{"match": {"name": "a"}, "method": "none"}, {"match": {"ndim": 2}, "density": 0.05}]
    found = assert_equals_loopback(driver, "scalecom", {"density": 0.1, "rules": rules}, steps=3)
    kept = driver.of_node({name: bool(residual.any()) for name, (residual, _) in found.residuals.items()})
    assert not any(each["a"] for each in kept) and any(each["c"] for each in kept)
    for seed in (0, 3):
        assert_equals_loopback(driver, "randomk", {"density": 0.1, "seed": seed}, steps=2)


@pytest.mark.excepted(
    "tensorflow", "each gradient has a graph of its own", refused=["bucket_elements", "gradient has a graph of its own"]
)
@pytest.mark.parametrize("method", ["topk", "scalecom", "gaussiank"])
@pytest.mark.parametrize("elements", [1200, 10**6])
def test_buckets_of_small_tensors(driver, method, elements):
    settings = {"density": 0.05, "bucket_elements": elements, "min_elements": 1, "seed": 3}
    assert_equals_loopback(driver, method, settings, steps=3)


def test_automatic_buckets_change_no_result(driver):
    """If a driver puts tensors into one bucket by itself, each tensor's result and residual are those it has alone."""
    for method, given in driver.some(METHODS):
        settings = {**given, "min_elements": 1}
        tolerance = driver.tolerance(method, settings)
        handle = driver.make(method, settings, driver.shapes)
        alone = driver.yardstick(method, {**settings, "bucket_elements": 0})
        for step in range(3):
            everyone = driver.everyone(step, driver.shapes)
            got, want = handle.reduce(everyone[driver.rank]), alone.allreduce(everyone)[driver.rank]
            if tolerance:
                assert_close(got, want, tolerance, f"{method}, step {step}")
        for name in driver.shapes if driver.exact_with(method) else ():
            np.testing.assert_array_equal(handle.residual(name), alone.residual(name, driver.rank), err_msg=name)


@pytest.mark.excepted("tensorflow", "each gradient has a graph of its own", refused=["scope: global", "scope: tensor"])
def test_one_threshold_for_all_tensors(driver):
    settings = {"density": 0.01, "scope": "global", "min_elements": 1}
    assert_equals_loopback(driver, "gaussiank", settings, steps=3)


@pytest.mark.also("one rank", "three ranks")
def test_many_tensors_in_another_order_on_each_rank(driver):
    shapes = {f"w{number:02d}": (40, 41 + number) for number in range(12 if driver.expensive else 40)}
    order = list(np.random.default_rng(driver.rank).permutation(list(shapes)))
    assert_equals_loopback(driver, "scalecom", {"density": 0.02}, 3, shapes=shapes, order=order)


def test_two_compressors_with_equal_names_are_independent(driver):
    settings = {"density": 0.1}
    handles = [driver.make("topk", settings, driver.shapes) for _ in range(2)]
    nets = [driver.yardstick("topk", settings) for _ in range(2)]
    for step in range(2):
        for number, (handle, net) in enumerate(zip(handles, nets, strict=True)):
            everyone = driver.everyone(step + 10 * number, driver.shapes)
            want = net.allreduce(everyone)[driver.rank]
            got = handle.reduce(everyone[driver.rank])
            assert_close(got, want, driver.tolerance("topk", settings), f"Compressor {number}, step {step}")


def test_residual_returns_a_copy_in_the_shape_of_the_tensor(driver):
    """Zeros for tensors that are sent uncompressed."""
    handle = driver.make("topk", {"density": 0.1}, driver.shapes)
    handle.reduce(driver.gradients(0, driver.shapes))
    for name, shape in driver.shapes.items():
        residual = handle.residual(name)
        assert residual.shape == shape and sum(driver.of_node(bool(residual.any()))) == (name in "abc"), name
        residual[...] = 99
        assert not (handle.residual(name) == 99).any()
    assert "topk" in handle.describe()
    driver.must_raise(KeyError, ["stranger"], lambda: handle.residual("stranger"))
