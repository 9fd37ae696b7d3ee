"""The ledger, the observers, the summary and the warnings tell what happens."""

from __future__ import annotations

from collections import defaultdict

import pytest

from hvdcompress.engine.exchange import TILE
from hvdcompress.engine.state import SEEN
from tests.ranks.checks import logged
from tests.ranks.watching import Watcher


@pytest.mark.also("three ranks", "two levels", "gloo", "one rank")
def test_bytes_of_scalecom_do_not_grow_with_the_ranks(driver):
    settings = {"density": 0.01, **({"bucket_elements": 0} if driver.nodes else {})}  # else buckets have other tensors
    handle, two = driver.make("scalecom", settings, driver.shapes), driver.yardstick("scalecom", settings, world_size=2)
    for step in range(4):
        handle.reduce(driver.gradients(step, driver.shapes))
        two.allreduce([driver.gradients(step, driver.shapes, rank=rank) for rank in range(2)])
    sent, overhead = handle.sent(), handle.overhead(4)
    own = {name: count - overhead.get(name, 0) for name, count in sent.items() if count != overhead.get(name, 0)}
    of_node = {name: count for each in driver.of_node(own) for name, count in each.items()}
    assert of_node == {name: entry.sent for name, entry in two.ledger.tensors(0).items()}


@pytest.mark.excepted("loopback", "the gradients of a node are summed first", kind="two levels")
@pytest.mark.excepted("torch", "the gradients of a node are summed first", kind="two levels")
@pytest.mark.excepted("ddp", "the gradients of a node are summed first", kind="two levels")
@pytest.mark.excepted("mpi", "the gradients of a node are summed first", kind="two levels")
def test_large_gradients_are_read_as_they_arrive(driver):
    """On the host, gradients are read whenever a million elements have arrived, not when the last has."""
    shapes = {name: (TILE // 2, 1 + number % 2) for number, name in enumerate("vwxyz")}
    handle, watcher = driver.make("topk", {"density": 0.05}, shapes), Watcher(driver.rank)
    handle.add_observer(watcher)
    for step in range(2):
        watcher.events.clear()
        handle.reduce(driver.gradients(step, shapes))
    # what is encoded: the selection of each bucket, and gradients, each alone or several together
    buckets = 1 if driver.grouping else len(shapes)
    passes = {"torch": 3, "ddp": 1, "mpi": 1}.get(driver.name, len(shapes)) if driver.on_host else 0
    assert watcher.events["begun"] == buckets, dict(watcher.events)
    assert watcher.events["encoded"] >= buckets + passes and bool(passes) == driver.on_host, dict(watcher.events)
    handle.close()


class Rounds(Watcher):
    """An observer that keeps the rounds of one rank."""

    def __init__(self, rank):
        super().__init__(rank)
        self.rounds = defaultdict(list)

    def completed(self, rank, name, what):
        if rank == self.rank:
            assert what.num_bytes > 0 and what.seconds >= 0
            self.rounds[name].append(f"{what.method} {what.round} {what.collective}")


class Writer(dict):
    """A writer as TensorBoard's."""

    def add_scalar(self, tag, value, step):
        self[tag] = value, step


@pytest.mark.also("two levels")
def test_summary_openmetrics_and_log_to_have_the_numbers_of_the_ledger(driver):
    """``summary()`` fits into 80 columns and names every method; observers see each round."""
    settings = {"density": 0.05, "rules": [{"match": {"name": "c"}, "method": "powersgd"}]}
    handle, watcher = driver.make("scalecom", settings, driver.shapes), Rounds(driver.rank)
    handle.add_observer(watcher)
    for step in range(3):
        handle.reduce(driver.gradients(step, driver.shapes))
    table, text, writer = "\n".join(driver.of_node(handle.summary())), handle.openmetrics(job="x"), Writer()
    assert all(len(line) <= 80 for line in table.splitlines()), table
    assert "scalecom density=0.05" in table and "powersgd" in table, table
    assert text.endswith("# EOF\n")
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    sent = sum(float(value) for name, _, value in samples if name.startswith("hvdcompress_sent_bytes_total{"))
    assert sent == handle.bytes_sent() > 0 and all(f'rank="{driver.rank}"' in name for name, *_ in samples)
    handle.log_to(writer, 7)
    assert writer["hvdcompress/sent_bytes"] == (handle.bytes_sent(), 7), writer
    rounds = {name: each for one in driver.of_node(dict(watcher.rounds)) for name, each in one.items()}
    first = rounds.get("a") or rounds["a+1"]  # it may travel with "b"
    assert first == ["scalecom 0 Broadcast", "scalecom 1 AllReduce"] * 3, rounds
    assert rounds["c"] == ["powersgd 0 AllReduce", "powersgd 1 AllReduce"] * 3, rounds
    handle.close()


@pytest.mark.excepted("loopback", "one process does the work of all ranks")
@pytest.mark.excepted("tensorflow", "each gradient has a graph of its own: it does not see where a step ends")
def test_summary_says_where_the_time_of_a_step_goes(driver):
    """From the fifth step on: computing, codec and waiting, the bytes sent, and their time on a link."""
    handle = driver.make("topk", {"density": 0.1}, driver.shapes)
    for step in range(8):
        assert ("step takes" in handle.summary()) == (step >= 5)
        handle.reduce(driver.gradients(step, driver.shapes))
    table = handle.compressor.summary(link_gbits=1)
    assert all(len(line) <= 80 for line in table.splitlines()), table
    for words in ("computing", "blocked", "codec", "waiting", "at 1 Gbit/s", "uncompressed steps"):
        assert words in table, table
    time = handle.compressor.ledger.mean_step()
    assert 0 < time.blocked <= time.whole and 0 < time.on_wire < time.dense, time
    assert 0 < time.codec < time.whole and 0 <= time.waiting < time.whole, time
    handle.close()


def test_rule_that_matches_no_tensor_is_logged_once_on_rank_0(driver):
    """At the latest after ten steps, with the names of the tensors; a rule that matches is not."""
    shapes = {"a": (37, 41), "e": (5,)}
    rules = [{"match": {"name": f"a*{driver.name}"}, "method": "none"}, {"match": {"name": "a"}, "method": "fp16"}]
    with logged() as lines:
        handle = driver.make("topk", {"rules": rules}, shapes)
        for step in range(SEEN + 1):
            handle.reduce(driver.gradients(step, shapes))
        driver.meet()
    found = [line for line in lines if "applies to no tensor" in line]
    assert len(found) == (driver.rank == 0 or driver.shared), lines
    for line in found:
        assert f"a*{driver.name}" in line and "'e'" in line, line
