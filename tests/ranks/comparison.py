"""Compare a driver with the loopback: results, residuals, bytes and payloads for the same gradients."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tests.ranks.checks import assert_close
from tests.ranks.exchanges import EXCHANGES, Settings, num_steps
from tests.ranks.watching import Watcher


@dataclass
class Expected:
    """What the loopback returns for some steps; small enough to be sent to other ranks."""

    results: list[dict]  #: by step, equal on all ranks
    residuals: list[dict]  #: by rank
    sent: list[dict]  #: bytes of each tensor, by rank
    counters: list[dict]  #: by rank
    payloads: list[dict[str, list[bytes]]]  #: of each tensor, in order, by rank


@dataclass
class Compared:
    """What a driver and the loopback return for the same gradients: pairs (driver's, loopback's)."""

    method: str
    settings: Settings
    steps: list[tuple[dict, dict]]  #: results by step
    residuals: dict[str, tuple[Any, Any]]
    sent: tuple[dict, dict]  #: bytes of each tensor
    counters: tuple[dict, dict]
    payloads: dict[str, tuple[list[bytes], list[bytes]]]
    unseen: set[str]  #: tensors whose payloads no observer sees
    in_ledger: int  #: bytes
    given: int  #: bytes of the arrays that the transport was given
    events: dict[str, int]  #: number of each event that an observer saw
    digests: list[list[str]]  #: of the results, by rank and step

    def __str__(self) -> str:
        return f"{self.method} {self.settings}"


def expect(driver: Any, method: str, settings: Settings, steps: int, **more: Any) -> Expected:
    """Run the loopback. ``more``: shapes, op, dtype; see :func:`compare`."""
    shapes, net, ranks = more.get("shapes", driver.shapes), driver.yardstick(method, settings), range(driver.world_size)
    watchers = [Watcher(rank) for rank in ranks]
    for watcher in watchers:
        net.add_observer(watcher)
    everyone = (driver.everyone(step, shapes, more.get("dtype", "float32")) for step in range(steps))
    return Expected(
        results=[net.allreduce(given, op=more.get("op", "average"))[0] for given in everyone],
        residuals=[{name: net.residual(name, rank) for name in shapes} if driver.exact else {} for rank in ranks],
        sent=[{name: entry.sent for name, entry in net.ledger.tensors(rank).items()} for rank in ranks],
        counters=[net.ledger.counters(rank) for rank in ranks],
        payloads=[{name: watcher.payloads[name] for name in shapes} for watcher in watchers],
    )


def compare(
    driver: Any, method: str, settings: Settings, steps: int, expected: Expected | None = None, **more: Any
) -> Compared:
    """Reduce the same gradients through the driver and through the loopback.

    Args:
        driver: the driver on this rank.
        method: the method's id.
        settings: its hyper-parameters and plan keys.
        steps: number of steps.
        expected: what the loopback returns, if it was run before.
        **more: shapes, op, dtype; order of the gradients; and watched, whether all that is sent is observed.
    """
    order, watched = more.pop("order", None), more.pop("watched", False)
    expected = expected or expect(driver, method, settings, steps, **more)
    shapes = more.pop("shapes", driver.shapes)
    results, digests, watcher = [], [], Watcher(driver.rank)
    with driver.counting() if watched else nullcontext() as counter:
        handle = driver.make(method, settings, shapes, **more)
        if watched:
            handle.add_observer(watcher)
        for step in range(steps):
            mine = driver.gradients(step, shapes)
            got = handle.reduce({name: mine[name].astype(more.get("dtype", "float32")) for name in order or mine})
            results.append((got, expected.results[step]))
            digests.append(hashlib.sha256(b"".join(got[name].tobytes() for name in sorted(got))).hexdigest())
    residuals = expected.residuals[driver.rank]
    assert handle.compressor.ledger.steps == steps
    found = Compared(
        method,
        settings,
        steps=results,
        residuals={name: (handle.residual(name), residuals.get(name)) for name in shapes},
        sent=(handle.sent(), with_overhead(expected.sent[driver.rank], handle, steps)),
        counters=(handle.counters(), expected.counters[driver.rank]),
        payloads={name: (watcher.payloads[name], expected.payloads[driver.rank][name]) for name in shapes},
        unseen=handle.unseen(),
        in_ledger=handle.bytes_sent() + handle.bytes_inside_node(),
        given=counter.num_bytes if watched else 0,
        events=dict(watcher.events),
        digests=driver.gather(digests),
    )
    handle.close()
    return found


def with_overhead(sent: dict[str, int], handle: Any, steps: int) -> dict[str, int]:
    """Return the loopback's bytes of each tensor, and what the driver sends in addition."""
    total = Counter(sent) + Counter(handle.overhead(steps))
    return {name: num_bytes for name, num_bytes in total.items() if num_bytes}


def assert_equal_results(driver: Any, found: Compared) -> None:
    """Check that results are the loopback's, as exactly as sums of so many ranks can be."""
    tolerance = driver.tolerance(found.method, found.settings)
    for step, (got, want) in enumerate(found.steps if tolerance else ()):
        assert_close(got, want, tolerance, f"{found}, step {step}")


def assert_equals_loopback(driver: Any, method: str, settings: Settings, steps: int, **more: Any) -> Compared:
    """Check that results and bytes are the loopback's, and results equal on all ranks; see :func:`compare`."""
    found = compare(driver, method, settings, steps, **more)
    assert_equal_results(driver, found)
    assert found.sent[0] == found.sent[1], (str(found), found.sent)
    assert all(digests == found.digests[0] for digests in found.digests), f"{found}: ranks differ"
    return found


_compared: dict[Any, list[Compared]] = {}


def all_exchanges(driver: Any) -> list[Compared]:
    """Compare every kind of exchange. Done once per launch: several tests ask for it.

    Each rank runs the loopback for some of them.
    """
    key = driver.name, driver.world_size, driver.num_nodes, driver.rank
    if key not in _compared:
        numbered = [(number, *one, num_steps(one[1])) for number, one in enumerate(EXCHANGES)]
        mine = numbered[driver.rank :: driver.world_size]
        expected = {n: expect(driver, method, settings, steps) for n, method, settings, steps in mine}
        for others in driver.gather(expected):
            expected.update(others)
        _compared[key] = [
            compare(driver, method, settings, steps, expected[n], watched=True)
            for n, method, settings, steps in numbered
        ]
    return _compared[key]
