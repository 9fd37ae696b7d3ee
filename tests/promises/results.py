"""A driver gives what the loopback gives, of the same gradients."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import hvdcompress
from tests.harness import assert_close
from tests.promises.registry import promise
from tests.promises.variants import METHODS, ROUTES, Settings
from tests.promises.watching import Watcher

SUBJECT = "Results"


@dataclass
class Expected:
    """What the loopback returns for a few steps' gradients; small enough to be sent to other ranks."""

    results: list[dict]  #: in each step, the same on every rank
    residuals: list[dict]  #: of each rank
    sent: list[dict]  #: bytes of each tensor, of each rank
    counters: list[dict]
    payloads: list[dict[str, list[bytes]]]  #: of each tensor, in order, of each rank


@dataclass
class Compared:
    """What a driver and the loopback made of the same gradients, step by step."""

    method: str
    settings: Settings
    steps: list[tuple[dict, dict]] = field(default_factory=list)  #: (driver's, loopback's) results
    residuals: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    sent: tuple[dict, dict] = ({}, {})  #: bytes of each tensor
    counters: tuple[dict, dict] = ({}, {})
    payloads: dict[str, tuple[list[bytes], list[bytes]]] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)  #: tensors whose payloads no observer sees
    booked: int = 0  #: bytes in the ledger
    given: int = 0  #: bytes of the arrays that the transport was given
    events: dict[str, int] = field(default_factory=dict)
    digests: list[list[str]] = field(default_factory=list)  #: of the results in each step, rank by rank

    @property
    def what(self) -> str:
        return f"{self.method} {self.settings}"


def expect(driver: Any, method: str, settings: Settings, steps: int, **more: Any) -> Expected:
    """The loopback's side; ``more``: shapes, op, dtype."""
    shapes, net, ranks = more.get("shapes", driver.shapes), driver.yardstick(method, settings), range(driver.world_size)
    watchers = [Watcher(rank) for rank in ranks]
    for watcher in watchers:
        net.watch(watcher)
    everyone = (driver.everyone(step, shapes, more.get("dtype", "float32")) for step in range(steps))
    results = [net.allreduce_many(given, op=more.get("op", "average"))[0] for given in everyone]
    residuals = [{name: net.residual(name, rank) for name in shapes} if driver.exact else {} for rank in ranks]
    sent = [{name: entry.sent for name, entry in net.ledger.tensors(rank).items()} for rank in ranks]
    payloads = [{name: watcher.payloads[name] for name in shapes} for watcher in watchers]
    return Expected(results, residuals, sent, [net.ledger.counters(rank) for rank in ranks], payloads)


def compare(
    driver: Any, method: str, settings: Settings, steps: int, expected: Expected | None = None, **more: Any
) -> Compared:
    """Reduce the same gradients by the driver and by the loopback; ``more``: shapes, op, dtype, order, and whether all
    that is sent is watched and counted."""
    order, watched = more.pop("order", None), more.pop("watched", False)
    expected = expected or expect(driver, method, settings, steps, **more)
    shapes = more.pop("shapes", driver.shapes)
    found, digests, watcher = Compared(method, settings), [], Watcher(driver.rank)
    with driver.counting() if watched else nullcontext() as counter:
        handle = driver.make(method, settings, shapes, **more)
        if watched:
            handle.watch(watcher)
        for step in range(steps):
            mine = driver.gradients(step, shapes)
            given = {name: mine[name].astype(more.get("dtype", "float32")) for name in order or mine}
            got = handle.reduce(given)
            found.steps.append((got, expected.results[step]))
            digests.append(hashlib.sha256(b"".join(got[name].tobytes() for name in sorted(got))).hexdigest())
    found.booked, found.given = handle.bytes_sent() + handle.bytes_inside_node(), counter.num_bytes if watched else 0
    found.events = dict(watcher.events)
    found.payloads = {name: (watcher.payloads[name], expected.payloads[driver.rank][name]) for name in shapes}
    found.unseen = handle.unseen()
    found.digests = [list(step) for step in zip(*driver.gather(digests), strict=True)]
    residuals = expected.residuals[driver.rank]
    found.residuals = {name: (handle.residual(name), residuals.get(name)) for name in shapes}
    found.sent = handle.sent(), with_overhead(expected.sent[driver.rank], handle, steps)
    found.counters = handle.counters(), expected.counters[driver.rank]
    assert handle.compressor.ledger.steps == steps, "the ledger counts steps"
    handle.close()
    return found


def with_overhead(sent: dict[str, int], handle: Any, steps: int) -> dict[str, int]:
    """The loopback's bytes of each tensor, and what the driver sends besides them."""
    total = Counter(sent) + Counter(handle.overhead(steps))
    return {name: num_bytes for name, num_bytes in total.items() if num_bytes}


def assert_results(driver: Any, found: Compared) -> None:
    """The driver's results are the loopback's, as exactly as sums of so many ranks can be."""
    tolerance = driver.tolerance(found.method, found.settings)
    for step, (got, want) in enumerate(found.steps if tolerance else ()):
        assert_close(got, want, tolerance, f"{found.what}, step {step}")


def assert_all(driver: Any, found: Compared) -> None:
    """Results, bytes and ranks' agreement of one comparison."""
    assert_results(driver, found)
    assert found.sent[0] == found.sent[1], (found.what, found.sent)
    assert all(len(set(step)) == 1 for step in found.digests), f"{found.what}: ranks differ"


def _steps(settings: Settings) -> int:
    """Enough to go through all phases."""
    return 6 if {"warmup", "dense_steps", "schedule"} & settings.keys() else 4


_compared: dict[Any, list[Compared]] = {}


def all_variants(driver: Any) -> list[Compared]:
    """Every variant compared; done once, as several promises ask for it. Each rank runs the loopback for some."""
    key = driver.name, driver.world_size, driver.rank
    if key not in _compared:
        variants = [(number, *one, _steps(one[1])) for number, one in enumerate(driver.variants())]
        mine = variants[driver.rank :: driver.world_size]
        expected = {number: expect(driver, method, settings, steps) for number, method, settings, steps in mine}
        for others in driver.gather(expected):
            expected.update(others)
        _compared[key] = [
            compare(driver, m, settings, steps, expected[number], watched=True)
            for number, m, settings, steps in variants
        ]
    return _compared[key]


@promise()
def every_method_is_tried(driver: Any) -> None:
    """Every method is tried, and every option that changes which collectives it asks for."""
    assert set(METHODS) == set(hvdcompress.available()) == {method for method, _ in driver.variants()}
    assert all(one in driver.variants() for one in ROUTES)


@promise(seconds=240)
def results_are_the_loopbacks(driver: Any) -> None:
    """Results are the loopback's: to the bit of two ranks, to rounding of more."""
    for found in all_variants(driver):
        assert_results(driver, found)


@promise()
def residuals_are_the_loopbacks(driver: Any) -> None:
    """Residuals are the loopback's, to the bit of two ranks."""
    for found in (found for found in all_variants(driver) if driver.exact_with(found.method)):
        for name, (got, want) in found.residuals.items():
            np.testing.assert_array_equal(got, want, err_msg=f"{found.what}, {name}")


@promise()
def bytes_are_the_loopbacks(driver: Any) -> None:
    """The ledger's bytes are the loopback's, tensor by tensor, but for the probes and statuses that drivers list."""
    for found in all_variants(driver):
        assert found.sent[0] == found.sent[1], (found.what, found.sent)
        assert found.counters[0] == found.counters[1] or not driver.exact_with(found.method), found.what


@promise()
def ranks_get_the_same_bits(driver: Any) -> None:
    """All ranks get the same numbers, to the bit, whatever their number and the order of their gradients."""
    for found in all_variants(driver):
        for step, digests in enumerate(found.digests):
            assert len(set(digests)) == 1, f"{found.what}, step {step}: ranks differ"


@promise()
def sums_are_the_loopbacks(driver: Any) -> None:
    """A sum over ranks, where an average is not wanted."""
    for method in ("none", "topk", "scalecom", "fp16") if driver.expensive else METHODS:
        assert_all(driver, compare(driver, method, METHODS[method], steps=3, op="sum"))


@promise()
def rules_and_seeds_hold(driver: Any) -> None:
    """A plan's rules give tensors methods of their own, and its seed changes what is random."""
    rules = [{"match": {"name": "a"}, "method": "none"}, {"match": {"ndim": 2}, "density": 0.05}]
    for method in ("topk", "scalecom", "gaussiank"):
        found = compare(driver, method, {"density": 0.1, "rules": rules}, steps=3)
        assert_all(driver, found)
        kept = driver.of_node({name: bool(residual.any()) for name, (residual, _) in found.residuals.items()})
        assert not any(each["a"] for each in kept) and any(each["c"] for each in kept)
    for seed in (0, 3):
        assert_all(driver, compare(driver, "randomk", {"density": 0.1, "seed": seed}, steps=2))


@promise()
def buckets_join_small_tensors(driver: Any) -> None:
    """Tensors are joined into buckets, which are exchanged in one go."""
    for elements in (1200, 10**6):
        for method in ("topk", "scalecom", "gaussiank"):
            settings = {"density": 0.05, "bucket_elements": elements, "min_elements": 1, "seed": 3}
            assert_all(driver, compare(driver, method, settings, steps=4))


@promise()
def automatic_buckets_change_nothing(driver: Any) -> None:
    """If a driver puts tensors into one bucket by itself, each tensor's result and residual are those it has alone."""
    for method, given in METHODS.items() if not driver.expensive else (("topk", {}), ("qsgd", {}), ("powersgd", {})):
        settings = {**given, "min_elements": 1}
        tolerance = driver.tolerance(method, settings)
        handle, alone = (
            driver.make(method, settings, driver.shapes),
            driver.yardstick(method, {**settings, "bucket_elements": 0}),
        )
        for step in range(4):
            everyone = driver.everyone(step, driver.shapes)
            got, want = handle.reduce(everyone[driver.rank]), alone.allreduce_many(everyone)[driver.rank]
            if tolerance:
                assert_close(got, want, tolerance, f"{method}, step {step}")
        for name in driver.shapes if driver.exact_with(method) else ():
            np.testing.assert_array_equal(handle.residual(name), alone.residual(name, driver.rank), err_msg=name)


@promise()
def one_threshold_for_all_tensors(driver: Any) -> None:
    """``scope: global`` selects among the elements of all tensors together."""
    assert_all(driver, compare(driver, "gaussiank", {"density": 0.01, "scope": "global", "min_elements": 1}, steps=4))


@promise()
def many_tensors_in_any_order(driver: Any) -> None:
    """Many gradients that come in another order on every rank meet their own."""
    shapes = {f"w{number:02d}": (40, 41 + number) for number in range(12 if driver.expensive else 40)}
    order = list(np.random.default_rng(driver.rank).permutation(list(shapes)))
    assert_all(driver, compare(driver, "scalecom", {"density": 0.02}, 3, shapes=shapes, order=order))


@promise()
def compressors_keep_apart(driver: Any) -> None:
    """Two Compressors of one program, whose tensors have the same names, know nothing of each other."""
    settings = {"density": 0.1}
    handles = [driver.make("topk", settings, driver.shapes) for _ in range(2)]
    nets = [driver.yardstick("topk", settings) for _ in range(2)]
    for step in range(3):
        for number, (handle, net) in enumerate(zip(handles, nets, strict=True)):
            everyone = driver.everyone(step + 10 * number, driver.shapes)
            want = net.allreduce_many(everyone)[driver.rank]
            assert_close(
                handle.reduce(everyone[driver.rank]), want, driver.tolerance("topk", settings), f"{number} {step}"
            )


@promise()
def residuals_can_be_read(driver: Any) -> None:
    """``residual()`` gives a copy in the tensor's shape, zeros where none is kept; ``describe()`` tells of methods."""
    handle = driver.make("topk", {"density": 0.1}, driver.shapes)
    handle.reduce(driver.gradients(0, driver.shapes))
    for name, shape in driver.shapes.items():
        residual = handle.residual(name)
        assert residual.shape == shape and sum(driver.of_node(bool(residual.any()))) == (name in "abc"), name
        residual[...] = 99
        assert not (handle.residual(name) == 99).any(), "a copy"
    assert "topk" in handle.describe()
    driver.must_raise(KeyError, ["stranger"], lambda: handle.residual("stranger"))
