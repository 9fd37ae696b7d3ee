"""The loopback sends and returns, to the byte, what was recorded: a rebuilt engine changes nothing.

``tests/golden/traces.json`` has the traces of two ranks, made by ``python -m tests.unit.drivers.test_traces``. Where a
trace has to change, the commit says why. Drivers are compared with the loopback in ``tests/ranks/promises``.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.plan import plan_of
from hvdcompress.testing import Trial
from tests import ROOT
from tests.ranks.checks import heavy_tailed

FILE = ROOT / "tests" / "golden" / "traces.json"
STEPS, TRIGGERED, BAD = 7, 1, 3
SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
LARGE = {"a": (1100, 1000), "c": (8, 131), "e": (5,)}  #: more than is read at once
#: settings under which a few steps go through all that a method does
SETTINGS: dict[str, dict[str, Any]] = {
    **{method: {"density": 0.02} for method in ("randomk", "gaussiank", "gtopk", "oktopk", "dgc")},
    "topk": {"density": 0.05, "warmup": {"steps": 2}},
    "scalecom": {"density": 0.01, "beta": 0.3},
    "redsync": {"density": 0.02, "interval": 2},
    "arctopk": {"density": 0.05, "row": 16},
    "gradiveq": {"dense_steps": 2, "compressed_steps": 3},
}


def scenarios() -> dict[str, tuple[str, dict[str, Any], str]]:
    """Return method, settings and dtype by name."""
    found = {method: (method, SETTINGS.get(method, {}), "float32") for method in hvdcompress.available()}
    for method in ("topk", "scalecom", "powersgd", "qsgd"):
        settings = SETTINGS.get(method, {})
        found[f"{method} in float16"] = (method, settings, "float16")
        found[f"{method} in buckets"] = (method, {**settings, "bucket_elements": 2000}, "float32")
        if method != "qsgd":
            found[f"{method}, large"] = (method, settings, "float32")
    for name, more in (("keep", {"optimizer_momentum": "keep"}), ("cancel", {"optimizer_momentum": "cancel"})):
        found[f"topk, {name}"] = ("topk", {"density": 0.05, **more}, "float32")
    return found


class Recorder:
    """An observer that hashes what one rank sends."""

    def __init__(self, rank: int):
        self.rank = rank
        self.sends: dict[str, list[Any]] = defaultdict(list)

    def sent(self, rank: int, name: str, what: Any) -> None:
        if rank == self.rank:
            content = () if what.payload is None else (str(what.payload.dtype), digest(what.payload))
            self.sends[name].append((what.collective, what.num_bytes, *content))

    def __getattr__(self, event: str) -> Any:
        if event not in ("begun", "encoded", "completed", "waited", "decoded", "committed"):
            raise AttributeError(event)
        return lambda *_, **__: None

    def take(self) -> str:
        """Return the number of sends since the last call, and their hash."""
        found = digest(sorted(self.sends.items()))
        count = sum(map(len, self.sends.values()))
        self.sends.clear()
        return f"{count}:{found}"


def trace(method: str, settings: dict[str, Any], dtype: str, shapes: Any) -> list[list[str]]:
    """Run some steps with a trigger and NaN; return the lines of each rank."""
    net = Trial(plan_of(method, **settings), 2)
    recorders = [Recorder(rank) for rank in range(2)]
    for recorder in recorders:
        net.add_observer(recorder)
    exact = hvdcompress.get_method(method).exact  # others have matrix products, which processors round differently
    lines: list[list[str]] = [[], []]
    for step in range(STEPS):
        given = [heavy_tailed(shapes, step, rank) for rank in range(2)]
        if step == TRIGGERED:
            net.trigger()
        if step == BAD:
            for array in given[1].values():
                array.flat[-1] = np.nan
        results = net.allreduce([{name: array.astype(dtype) for name, array in one.items()} for one in given])
        for rank, recorder in enumerate(recorders):
            taken = recorder.take()
            lines[rank].append(f"{taken} {digest(sorted(results[rank].items()))}" if exact else "-")
    for rank, state in enumerate(net.saved()):
        kept = {name: sorted(slots.items()) for name, slots in sorted(state["state"].items())} if exact else None
        sent = {name: entry.sent for name, entry in net.ledger.tensors(rank).items()}
        lines[rank].append(digest(kept, sorted(state["steps"].items()), state["restarts"], sorted(sent.items())))
    return lines


def digest(*facts: Any) -> str:
    """Return a hash of numbers, texts, arrays, and containers of these."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind == "f":
                value = np.where(np.isnan(value), value.dtype.type(12345.0), value)  # NaN has many bits
            return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        if isinstance(value, dict):
            return sorted((key, plain(one)) for key, one in value.items())
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(repr(plain(facts)).encode()).hexdigest()[:12]


def shapes_of(scenario: str) -> dict[str, tuple[int, ...]]:
    return LARGE if "large" in scenario else SHAPES


@pytest.mark.parametrize("scenario", scenarios())
def test_trace_is_the_recorded_one(scenario: str) -> None:
    """Of every method: the tensor, kind, dtype, length and content of each collective, results, state and ledger."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[scenario]
    assert trace(*scenarios()[scenario], shapes_of(scenario)) == recorded


if __name__ == "__main__":
    traces = {name: trace(*one, shapes_of(name)) for name, one in scenarios().items()}
    FILE.write_text(json.dumps(traces, indent=0, sort_keys=True) + "\n", encoding="utf-8")
