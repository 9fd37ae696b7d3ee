"""The ledger and the observer tell what is really sent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hvdcompress.engine.intake import TILE
from hvdcompress.engine.state import SEEN
from hvdcompress.engine.telemetry.observer import Completed
from tests.harness import logged
from tests.promises.registry import promise
from tests.promises.results import all_variants
from tests.promises.watching import Watcher, carries

SUBJECT = "Accounts"


@promise()
def the_ledger_counts_what_is_given(driver: Any) -> None:
    """The ledger's bytes are those of the arrays that the transport is given, by us or by the stock optimizer."""
    for found in all_variants(driver):
        assert found.booked == found.given > 0, (found.what, found.booked, found.given)


@promise()
def scalecoms_bytes_do_not_grow_with_the_ranks(driver: Any) -> None:
    """ScaleCom sends as many bytes for each tensor as it does among two ranks."""
    settings = {"density": 0.01, **({"bucket_elements": 0} if driver.nodes else {})}  # else buckets have other tensors
    handle, two = driver.make("scalecom", settings, driver.shapes), driver.yardstick("scalecom", settings, world_size=2)
    for step in range(4):
        handle.reduce(driver.gradients(step, driver.shapes))
        two.allreduce_many([driver.gradients(step, driver.shapes, rank=rank) for rank in range(2)])
    sent, overhead = handle.sent(), handle.overhead(4)
    own = {name: count - overhead.get(name, 0) for name, count in sent.items()}
    own = {name: count for name, count in own.items() if count}
    of_node = {name: count for each in driver.of_node(own) for name, count in each.items()}
    assert of_node == {name: entry.sent for name, entry in two.ledger.tensors(0).items()}


@promise()
def payloads_are_the_loopbacks(driver: Any) -> None:
    """What an observer sees of each tensor is the loopback's payloads, in order: to the byte of two ranks, in number
    and length of more."""
    for found in all_variants(driver):
        for name, (got, want) in found.payloads.items():
            if name in found.unseen or not driver.exact_with(found.method):
                got, want = ([bytes(len(payload)) for payload in payloads] for payloads in (got, want))
            assert carries(got, want, driver.probe), f"{found.what}, {name}"
        assert found.events["begun"] and found.events["committed"], found.events


@promise()
def gradients_are_taken_in_as_they_come(driver: Any) -> None:
    """On the host gradients make their one pass over memory when a million elements have come, also where tensors are
    joined, and not when the last has come."""
    shapes = {name: (TILE // 2, 1 + number % 2) for number, name in enumerate("vwxyz")}
    handle, watcher = driver.make("topk", {"density": 0.05}, shapes), Watcher(driver.rank)
    handle.watch(watcher)
    for step in range(2):
        watcher.events.clear()
        handle.reduce(driver.gradients(step, shapes))
    # what is encoded: each bucket's selection, and gradients: each by itself, or those that came until they were enough
    buckets = 1 if driver.grouping else len(shapes)
    passes = {"torch": 3, "ddp": 1, "mpi": 1}.get(driver.name, len(shapes)) if driver.on_host else 0
    assert watcher.events["begun"] == buckets, dict(watcher.events)
    assert watcher.events["encoded"] >= buckets + passes and bool(passes) == driver.on_host, dict(watcher.events)
    handle.close()


@promise()
def what_one_sees_is_the_ledgers(driver: Any) -> None:
    """``summary()`` fits into 80 columns and names every method; ``openmetrics()`` and ``log_to(writer)`` have the
    ledger's numbers; observers are told of each round, with its method, its collective and its bytes."""
    settings = {"density": 0.05, "rules": [{"match": {"name": "c"}, "method": "powersgd"}]}
    handle, watcher = driver.make("scalecom", settings, driver.shapes), Answers(driver.rank)
    handle.watch(watcher)
    for step in range(3):
        handle.reduce(driver.gradients(step, driver.shapes))
    table, text, logged = handle.summary(), handle.openmetrics(job="x"), Logged()
    assert all(len(line) <= 80 for line in table.splitlines()), table
    assert "scalecom density=0.05" in table and "powersgd" in table, table
    assert text.endswith("# EOF\n")
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    sent = sum(float(value) for name, _, value in samples if name.startswith("hvdcompress_sent_bytes_total{"))
    assert sent == handle.bytes_sent() > 0 and all(f'rank="{driver.rank}"' in name for name, *_ in samples)
    handle.log_to(logged, 7)
    assert logged["hvdcompress/sent_bytes"] == (handle.bytes_sent(), 7), logged
    rounds = {name: each for one in driver.of_node(dict(watcher.collectives)) for name, each in one.items()}
    first = rounds.get("a") or rounds["a+1"]  # it may travel with "b"
    assert first == ["scalecom 0 Broadcast", "scalecom 1 AllReduce"] * 3, rounds
    assert rounds["c"] == ["powersgd 0 AllReduce", "powersgd 1 AllReduce"] * 3, rounds
    handle.close()


@promise(ranks=2)
def summary_says_what_a_step_takes(driver: Any) -> None:
    """From the fifth step on, ``summary()`` says how much of a step is computing, codec and waiting, how many bytes it
    sends, how long a link of a given speed takes for these, and which part matters."""
    handle = driver.make("topk", {"density": 0.1}, driver.shapes)
    for step in range(8):
        assert ("step takes" in handle.summary()) == (step >= 5)
        handle.reduce(driver.gradients(step, driver.shapes))
    table = handle.compressor.summary(link_gbits=1)
    assert all(len(line) <= 80 for line in table.splitlines()), table
    for words in ("computing", "blocked", "codec", "waiting", "at 1 Gbit/s", "uncompressed steps"):
        assert words in table, table
    time = handle.compressor.local.times.mean()
    assert 0 < time.blocked <= time.whole and 0 < time.on_wire < time.dense, time
    assert 0 < time.codec < time.whole and 0 <= time.waiting < time.whole, time
    handle.close()


class Answers(Watcher):
    """An observer that keeps one rank's rounds."""

    def __init__(self, rank: int):
        super().__init__(rank)
        self.collectives: dict[str, list[str]] = defaultdict(list)

    def completed(self, rank: int, name: str, what: Completed) -> None:
        if rank == self.rank:
            assert what.num_bytes > 0 and what.seconds >= 0
            self.collectives[name].append(f"{what.method} {what.round} {what.collective}")


class Logged(dict):
    """A writer of TensorBoard's, as far as we ask for one."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self[tag] = value, step


@promise()
def a_rule_that_applies_to_no_tensor_is_said(driver: Any) -> None:
    """Once, on rank 0, at the latest after ten steps, with names that there are; a rule that applies is not."""
    shapes = {"a": (37, 41), "e": (5,)}
    rules = [{"match": {"name": f"a*{driver.name}"}, "method": "none"}, {"match": {"name": "a"}, "method": "fp16"}]
    with logged() as said:
        handle = driver.make("topk", {"rules": rules}, shapes)
        for step in range(SEEN + 1):
            handle.reduce(driver.gradients(step, shapes))
        driver.meet()
    found = [line for line in said if "applies to no tensor" in line]
    assert len(found) == (driver.rank == 0 or driver.shared), said
    for line in found:
        assert f"a*{driver.name}" in line and "'e'" in line, line
