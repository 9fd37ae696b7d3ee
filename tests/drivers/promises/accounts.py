"""The ledger and the observer tell what is really sent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from promises.registry import promise
from promises.variants import METHODS, VARIANTS

SUBJECT = "Accounts"


@promise()
def the_ledger_counts_what_is_given(door: Any) -> None:
    """The ledger's bytes are those of the arrays that the transport is given, by us or by the stock optimizer."""
    for method, settings in METHODS.items() if door.expensive else VARIANTS:
        with door.counting() as counter:
            handle = door.make(method, settings, door.shapes)
            for step in range(3):
                handle.reduce(door.gradients(step, door.shapes))
        assert handle.bytes_sent() == counter.num_bytes > 0, (method, settings, handle.bytes_sent(), counter.num_bytes)
        handle.close()


@promise()
def scalecoms_bytes_do_not_grow_with_the_ranks(door: Any) -> None:
    """ScaleCom sends as many bytes for each tensor as it does among two ranks."""
    settings = {"density": 0.01}
    handle, two = door.make("scalecom", settings, door.shapes), door.yardstick("scalecom", settings, world=2)
    for step in range(4):
        handle.reduce(door.gradients(step, door.shapes))
        two.allreduce_many([door.gradients(step, door.shapes, rank=rank) for rank in range(2)])
    sent, overhead = handle.sent(), handle.overhead(4)
    own = {name: sent[name] - overhead.get(name, 0) for name in two.ledger.tensors(0)}
    assert own == {name: entry.sent for name, entry in two.ledger.tensors(0).items()}


class Watcher:
    """An observer that keeps what one rank sends."""

    def __init__(self, rank: int):
        self.rank, self.payloads, self.num_bytes = rank, defaultdict(list), 0
        self.events: dict[str, int] = defaultdict(int)

    def sent(self, rank: int, name: str, verb: str, payload: Any, num_bytes: int, *rest: Any, **more: Any) -> None:
        if rank == self.rank:
            # of a broadcast by another rank there is nothing to see but how much it is
            seen = bytes(num_bytes) if payload is None else np.asarray(payload).tobytes()
            self.payloads[name].append(seen)
            self.num_bytes += num_bytes

    def __getattr__(self, event: str) -> Any:
        if event not in ("begun", "encoded", "answered", "waited", "decoded", "committed"):
            raise AttributeError(event)

        def note(rank: int, *rest: Any, **more: Any) -> None:
            self.events[event] += rank == self.rank

        return note


def carries(got: list[bytes], want: list[bytes], probe: int) -> bool:
    """Whether ``got`` is ``want`` in order; a payload may have a probe of so many bytes behind it, and probes may go
    alone."""
    if not got:
        return not want
    first, rest = got[0], got[1:]
    whole = want and (first == want[0] or probe and first[:-probe] == want[0])  # an empty one may be a probe alone
    return bool(whole and carries(rest, want[1:], probe)) or len(first) == probe and carries(rest, want, probe)


@promise()
def payloads_are_the_loopbacks(door: Any) -> None:
    """What an observer sees of each tensor is the loopback's payloads, in order: to the byte of two ranks, in number
    and length of more."""
    for method, settings in METHODS.items() if door.expensive else VARIANTS:
        handle, net = door.make(method, settings, door.shapes), door.yardstick(method, settings)
        watcher = Watcher(door.rank)
        handle.watch(watcher)
        for step in range(5):
            everyone = door.everyone(step, door.shapes)
            handle.reduce(everyone[door.rank])
            net.allreduce_many(everyone)
        for name in door.shapes:
            want, got = [], watcher.payloads[name]
            for one in (one for one in net.log if one.name == name):
                mine = one.root is None or one.root == door.rank  # else it gives zeros to a sum
                sent = one.sent[door.rank if one.root is None else 0] if mine else bytes(one.num_bytes[door.rank])
                want.append(sent)
            if not door.exact_with(method):
                got, want = ([bytes(len(payload)) for payload in payloads] for payloads in (got, want))
            assert all(door.gather(carries(got, want, door.probe))), f"{method} {settings}, {name}"
        assert watcher.events["begun"] and watcher.events["committed"], dict(watcher.events)


@promise()
def gradients_are_taken_in_as_they_come(door: Any) -> None:
    """On the host each gradient makes its one pass over memory when it comes, also where tensors are joined, and not
    when the last has come."""
    shapes = {name: (64, 65 + number) for number, name in enumerate("vwxyz")}
    handle, watcher = door.make("topk", {"density": 0.05}, shapes), Watcher(door.rank)
    handle.watch(watcher)
    for step in range(4):
        watcher.events.clear()
        handle.reduce(door.gradients(step, shapes))
    # what is encoded: each gradient as it comes, and each bucket's selection
    buckets, each = 1 if door.grouping else len(shapes), len(shapes) if door.on_host else 0
    assert watcher.events["encoded"] == each + buckets == each + watcher.events["begun"], dict(watcher.events)
    handle.close()


@promise()
def what_one_sees_is_the_ledgers(door: Any) -> None:
    """``summary()`` fits into 80 columns and names every method; ``openmetrics()`` and ``log_to(writer)`` have the
    ledger's numbers; observers are told of each round, with its method, its verb and its bytes."""
    settings = {"density": 0.05, "rules": [{"match": {"name": "c"}, "method": "powersgd"}]}
    handle, watcher = door.make("scalecom", settings, door.shapes), Answers(door.rank)
    handle.watch(watcher)
    for step in range(3):
        handle.reduce(door.gradients(step, door.shapes))
    table, text, logged = handle.summary(), handle.openmetrics(job="x"), Logged()
    assert all(len(line) <= 80 for line in table.splitlines()), table
    assert "scalecom density=0.05" in table and "powersgd" in table, table
    assert text.endswith("# EOF\n")
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    sent = sum(float(value) for name, _, value in samples if name.startswith("hvdcompress_sent_bytes_total{"))
    assert sent == handle.bytes_sent() > 0 and all(f'rank="{door.rank}"' in name for name, *_ in samples)
    handle.log_to(logged, 7)
    assert logged["hvdcompress/sent_bytes"] == (handle.bytes_sent(), 7), logged
    first = watcher.verbs["a"] or watcher.verbs["a+1"]  # it may travel with "b"
    assert first == ["scalecom 0 Broadcast", "scalecom 1 AllReduce"] * 3, watcher.verbs
    assert watcher.verbs["c"] == ["powersgd 0 AllReduce", "powersgd 1 AllReduce"] * 3, watcher.verbs
    handle.close()


class Answers(Watcher):
    """An observer that keeps one rank's rounds."""

    def __init__(self, rank: int):
        super().__init__(rank)
        self.verbs: dict[str, list[str]] = defaultdict(list)

    def answered(self, rank: int, name: str, method: str, number: int, verb: str, num_bytes: int, seconds: float):
        if rank == self.rank:
            assert num_bytes > 0 and seconds >= 0
            self.verbs[name].append(f"{method} {number} {verb}")


class Logged(dict):
    """A writer of TensorBoard's, as far as we ask for one."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self[tag] = value, step
