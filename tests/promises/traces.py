"""What a driver sends and returns is, to the byte, what was recorded: the engine may be rebuilt, and nothing changes.

``tests/golden/traces.json`` has the traces of two ranks, made by ``python -m tests.make_traces``. Where a trace has to
change, the commit says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import hvdcompress
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.optimizers import SGD
from tests import ROOT
from tests.harness import Skip
from tests.promises.registry import promise
from tests.promises.variants import METHODS, Settings

SUBJECT = "Traces"
FILE = ROOT / "tests" / "golden" / "traces.json"
RECORD = "HVDCOMPRESS_TRACES"  #: a variable: the folder into which traces are written, instead of compared
STEPS, TRIGGERED, BAD = 7, 1, 3
SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
LARGE = {"a": (1100, 1000), "c": (8, 131), "e": (5,)}  #: more than are taken in at once
TF_SHAPES = {**SHAPES, "b": (3, 5, 7, 16)}  # a convolution lies as height, width, in, out

Trace = list[str]
Scenario = tuple[str, Settings, str]


def scenarios(driver: Any) -> dict[str, Scenario]:
    """By name: a method, settings and a dtype."""
    found: dict[str, Scenario] = {method: (method, settings, "float32") for method, settings in METHODS.items()}
    for method in ("topk", "scalecom", "powersgd", "qsgd"):
        found |= {
            f"{method} in bfloat16": (method, METHODS[method], "bfloat16"),
            f"{method} in float16": (method, METHODS[method], "float16"),
            f"{method} by itself": (method, {**METHODS[method], "bucket_elements": 0}, "float32"),
            f"{method} in buckets": (method, {**METHODS[method], "bucket_elements": 2000}, "float32"),
        }
    found |= {
        f"topk, {momentum}": ("topk", {"density": 0.05, "optimizer_momentum": momentum}, "float32")
        for momentum in ("keep", "cancel")
    }
    found |= {f"{method}, large": (method, METHODS[method], "float32") for method in ("topk", "scalecom", "powersgd")}
    found["topk, clipped"] = ("topk", {"density": 0.05, "clip_norm": 0.1}, "float32")
    leaves_out = [" in buckets", "clipped"] if driver.by_tensor else []
    leaves_out += [] if driver.grouping else [" by itself"]  # there, tensors never are in buckets by default
    leaves_out += [" in bfloat16"] if driver.name in ("loopback", "mpi") else []
    return {name: one for name, one in found.items() if not any(words in name for words in leaves_out)}


class Recorder:
    """An observer that hashes what one rank sends."""

    def __init__(self, rank: int, tensors: Any):
        self.rank, self.tensors = rank, tuple(tensors)
        self.sends: dict[str, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()

    def sent(self, rank: int, name: str, what: Sent) -> None:
        """Note it. Of the ranks' status and the like only the kind, as it has the plan's text."""
        if rank != self.rank:
            return
        with self._lock:
            if name.split("+")[0] not in self.tensors:
                self.sends[name].append(what.collective)
            else:
                seen = None if what.payload is None else _host(what.payload)
                content = () if seen is None else (str(seen.dtype), _hash(seen))
                self.sends[name].append((what.collective, what.num_bytes, *content))

    def __getattr__(self, event: str) -> Any:
        if event not in ("begun", "encoded", "completed", "waited", "decoded", "committed"):
            raise AttributeError(event)
        return lambda *_, **__: None

    def take(self) -> str:
        """Return the number of sends since the last call, and a hash of them, whatever their order.

        Under Horovod a result may come before the probe that goes with the same tensor.
        """
        with self._lock:
            found = [(name, sorted(sends, key=repr)) for name, sends in sorted(self.sends.items())]
            self.sends.clear()
        return f"{sum(len(sends) for _, sends in found)}:{digest(found)}"


def trace(driver: Any, method: str, settings: Settings, dtype: str, shapes: Any) -> Trace:
    """Run some steps, with momentum to adapt, a trigger, a NaN, and a step that is taken back."""
    handle = driver.make(method, settings, shapes, dtype=dtype)
    handle.use(SGD(momentum=0.9))
    recorder = Recorder(driver.rank, shapes)
    handle.watch(recorder)
    driver.meet()
    steps = []
    for step in range(STEPS):
        given = driver.gradients(step, shapes)
        if step == TRIGGERED and driver.rank == 0:
            handle.trigger()
        if step == BAD and driver.rank == driver.world_size - 1:
            for array in given.values():
                array.flat[-1] = np.nan
        results = handle.reduce(given)
        driver.meet()
        exact = hvdcompress.get(method).exact  # others have matrix products, which processors round differently
        steps.append(f"{recorder.take() if exact else '-'} {digest(sorted(results.items())) if exact else '-'}")
    state = handle.state()
    kept = {name: sorted(slots.items()) for name, slots in sorted(state["state"].items())} if exact else sorted(shapes)
    sent = {name: number for name, number in handle.sent().items() if name in shapes or "+" in name}
    steps.append(f"{digest(kept, sorted(state['steps'].items()), state['restarts'])} {digest(sorted(sent.items()))}")
    return steps


@promise(ranks=2, seconds=200)
def traces_are_those_that_were_recorded(driver: Any) -> None:
    """Of every method: each collective's tensor, kind, dtype, length and content, the results, what is kept, and the
    ledger; with tensors together and by themselves, in other dtypes, with a trigger, a NaN and adapted momentum."""
    if driver.world_size != 2:
        raise Skip("recorded of two ranks")
    shapes = TF_SHAPES if driver.name == "tensorflow" else SHAPES
    found = {name: trace(driver, *one, LARGE if "large" in name else shapes) for name, one in scenarios(driver).items()}
    record_or_compare(driver.name, driver.rank, found)


def record_or_compare(name: str, rank: int, found: dict[str, Trace]) -> None:
    """Compare a rank's traces with those that were recorded, or record them.

    Raises:
        AssertionError: one differs; it says which, and where.
    """
    if folder := os.environ.get(RECORD):
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[name][rank]
    assert found.keys() == recorded.keys(), "make them with: python -m tests.make_traces"
    for scenario, lines in found.items():
        for step, (ours, theirs) in enumerate(zip(lines, recorded[scenario], strict=True)):
            where = f"step {step}, sends and results" if step < len(lines) - 1 else "the end, what is kept"
            assert ours == theirs, f"{name}, {scenario}, {where}: {ours}, recorded {theirs}"


def _host(array: Any) -> np.ndarray[Any, Any]:
    if hasattr(array, "cpu"):
        array = array.detach().cpu()
        array = array.view(array.new_empty(0).short().dtype) if str(array.dtype) == "torch.bfloat16" else array
    return np.asarray(array)


def _hash(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind == "f" and np.isnan(array).any():  # NaN has many bits
        array = np.where(np.isnan(array), np.float32(12345.0), array)
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]


def digest(*facts: Any) -> str:
    """Return a hash of numbers, texts, arrays, and what consists of them."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray) or hasattr(value, "detach"):
            return _hash(_host(value))
        if isinstance(value, dict):
            return sorted((key, plain(one)) for key, one in value.items())
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(repr(plain(facts)).encode()).hexdigest()[:12]
