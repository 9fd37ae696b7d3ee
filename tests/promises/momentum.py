"""The optimizer's momentum is cancelled for gradients that error feedback delays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress import get
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.optimizers import SGD
from hvdcompress.parts.momentum import adapts
from tests.harness import assert_close
from tests.promises.registry import promise

SUBJECT = "Momentum"
BAD, SAVED, RESHARDED, STEPS = 3, 5, 7, 9  #: steps
#: a method for each form in which the optimizer's buffer is kept: sums of sparse vectors, one sparse vector, matrices
#: of low rank, dense vectors; one with a momentum of its own; one that is dense first and last
KINDS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.05},
    "scalecom": {"density": 0.05},
    "powersgd": {},
    "signsgd": {},
    "dgc": {"density": 0.05},
}


@promise()
def the_optimizers_momentum_is_cancelled(driver: Any) -> None:
    """With SGD's momentum known and `optimizer_momentum: cancel`, what its buffer contains after each step is the
    reduced gradient at the effective learning rate, without momentum: while the momentum is changed by a schedule, over
    a step that is undone, and in new Compressors that go on from files, of as many ranks and of more. The loopback
    gives the same. Tensors that are sent uncompressed keep their momentum."""
    some = ("topk", "powersgd") if driver.expensive else tuple(KINDS)
    for method, settings in ((id, KINDS[id]) for id in some):
        _check(driver, method, {**settings, "min_elements": 100, "optimizer_momentum": "cancel"})


@promise()
def the_optimizers_momentum_is_adapted(driver: Any) -> None:
    """By default, SGD's momentum is adapted to how long gradients have waited: what is handed over is what the loopback
    hands over, under the same changes of the momentum, undone steps and new Compressors.
    `tests/unit/parts/test_momentum.py` compares the loopback with the formula."""
    for method in ("topk",) if driver.expensive else ("topk", "powersgd"):
        _check(driver, method, {**KINDS[method], "min_elements": 100})


@promise()
def momentum_is_taken_back_when_compression_ends(driver: Any) -> None:
    """When a tensor is sent uncompressed again, its momentum starts with the gradients from then on."""
    shared = {"density": 0.05, "min_elements": 100}
    plain = driver.yardstick("topk", {**shared, "optimizer_momentum": "keep"})
    settings = {**shared, "schedule": {"optimizer_momentum": {"steps": {0: "cancel", 3: "keep"}}}}
    handle = driver.make("topk", settings, driver.shapes)
    handle.use(SGD(0.9))
    buffer, natural_momentum = np.zeros(driver.shapes["a"]), np.zeros(driver.shapes["a"])
    for step in range(6):
        given = driver.everyone(step, driver.shapes)
        got = handle.reduce(given[driver.rank])["a"]
        reduced = plain.allreduce_many(given)[0]["a"].astype(np.float64)
        buffer = 0.9 * buffer + got
        natural_momentum = 10.0 * reduced if step < 3 else reduced if step == 3 else 0.9 * natural_momentum + reduced
        assert_close({"a": buffer}, {"a": natural_momentum}, (1e-4, 1e-4), f"step {step}")


def _check(driver: Any, method: str, settings: dict[str, Any]) -> None:
    sgd = SGD(0.9)

    def make() -> Any:
        handle = driver.make(method, settings, driver.shapes)
        handle.use(sgd)
        return handle

    handle, net = make(), driver.yardstick(method, settings)
    plain = driver.yardstick(method, {**settings, "optimizer_momentum": "keep"})
    for rank in net.ranks:
        rank.optimizer = sgd.read
    buffers = {name: np.zeros(shape) for name, shape in driver.shapes.items()}
    tolerance = driver.tolerance(method, settings)
    for step in range(STEPS):
        sgd.momentum = 0.9 if step % 3 else 0.75
        given = driver.everyone(step, driver.shapes)
        if step == BAD:  # all of them, as some drivers undo each by itself
            given[-1] = {name: np.full_like(array, np.nan) for name, array in given[-1].items()}
        if step == SAVED:
            handle.save(driver.folder / f"momentum-{method}")
            driver.meet()
            handle = make()
            handle.load(driver.folder / f"momentum-{method}")
        if step == RESHARDED:
            more = reshard(net.saved(), driver.world_size + 1)
            for saved in more if driver.rank == 0 else ():
                checkpoint.save(saved, driver.folder / f"more-{method}")
            driver.meet()
            handle = make()
            handle.load(driver.folder / f"more-{method}")
            for other in (net, plain):
                again = driver.reshard(reshard(other.saved(), driver.world_size + 1))
                other.restore(again, driver.specs(driver.shapes))
        got, want = handle.reduce(given[driver.rank]), net.allreduce_many(given)[0]
        reduced = plain.allreduce_many(given)[0]
        if step == BAD:
            continue
        if tolerance:
            assert_close(got, want, tolerance, f"{method}, step {step}")
        own = get("dgc").momentum if method == "dgc" else 0.0
        buckets = net.plan.buckets(driver.specs(driver.shapes))
        whether = {member.name: adapts(bucket.program.main) for bucket in buckets for member in bucket.members}
        if "optimizer_momentum" not in settings:
            assert step == 0 or any(not np.array_equal(want[name], reduced[name]) for name in whether)
            continue
        for name, cancelled in whether.items():
            buffers[name] = sgd.momentum * buffers[name] + want[name]
            gain = (1.0 - own) / (1.0 - sgd.momentum)
            expected = reduced[name] * gain if cancelled else want[name]
            seen = buffers[name] if cancelled else reduced[name]
            pair = ({name: array.astype(np.float64)} for array in (seen, expected))
            assert_close(*pair, (1e-4, 1e-5), f"{method}, buffer, step {step}")
