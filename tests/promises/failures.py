"""A rank that fails is an error on every rank, and a hang on none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdcompress.plan import plan_of
from tests.harness import assert_close
from tests.promises.numbers import assert_same_state
from tests.promises.registry import promise
from tests.promises.variants import Settings

SUBJECT = "Failures"
FAULT = "a fault made by the test"
#: method, settings, and in which round of collectives it can fail last
VARIETY: tuple[tuple[str, Settings, int], ...] = (
    ("topk", {"density": 0.05}, 1),
    ("scalecom", {"density": 0.05}, 2),
    ("gtopk", {"density": 0.05}, 2),
    ("oktopk", {"density": 0.05}, 2),
    ("qsgd", {"route": "scatter"}, 2),
    ("fp16", {}, 1),
    ("terngrad", {}, 2),
)


class Faulty:
    """A plan whose method can be made to fail for tensor "c": on some of the ranks that exchange it, after so many
    collectives."""

    def __init__(self, method: str, settings: Settings):
        # no buckets: it is one tensor that fails
        self.plan, self.ranks, self.rounds = plan_of(method, **{"bucket_elements": 0, **settings}), (), 0
        original = self.plan.program.main.exchange

        def exchange(x: Any, state: Any, ctx: Any, work: Any) -> Any:
            steps, result = original(x, state, ctx, work), None
            fails = ctx.spec.name == "c" and ctx.rank in self.ranks
            for _ in range(self.rounds if fails else 99):
                try:
                    result = yield steps.send(result)
                except StopIteration as stop:
                    return stop.value
            raise FloatingPointError(FAULT)

        object.__setattr__(self.plan.program.main, "exchange", exchange)

    @contextmanager
    def failing(self, ranks: tuple[int, ...], rounds: int) -> Iterator[None]:
        """Inside, it fails."""
        self.ranks, self.rounds = ranks, rounds
        try:
            yield
        finally:
            self.ranks = ()


def _some_ranks(driver: Any) -> list[tuple[int, ...]]:
    last = driver.num_exchanging - 1
    found = {(last,), (0, driver.num_exchanging // 2), tuple(range(driver.num_exchanging))}
    return sorted({tuple(sorted(set(ranks))) for ranks in found})


def _fail(driver: Any, method: str, settings: Settings, rounds: int, ranks: tuple[int, ...], good: int = 1) -> str:
    """``good`` steps, a step that fails, and then another or the error again; the message."""
    faulty = Faulty(method, driver.placed(settings))
    handle = driver.make(faulty.plan, {}, driver.shapes)
    control = driver.make(method, {"bucket_elements": 0, **settings}, driver.shapes)
    for step in range(good):
        handle.reduce(driver.gradients(step, driver.shapes))
        control.reduce(driver.gradients(step, driver.shapes))
    kept = ["c"] if driver.by_tensor else list(driver.shapes)
    before = {name: handle.residual(name) for name in kept} if good else {}
    words, given = ["'c'", "rank"], driver.gradients(good, driver.shapes)
    with faulty.failing(ranks, rounds):
        message = driver.must_raise(driver.error, words, lambda: handle.reduce(given), same=False)
    for name, residual in before.items():
        np.testing.assert_array_equal(handle.residual(name), residual, err_msg=f"{method}: kept as before the step")
    if driver.recovers:
        if good:
            assert_same_state(handle.state(), control.state(), f"{method}: as before the step")
        want, got = control.reduce(given), handle.reduce(given)
        assert_close(got, want, (0.0, 0.0), f"{method} after a failure in round {rounds} on ranks {ranks}")
        assert_same_state(handle.state(), control.state(), f"{method}: after the step")
    else:
        driver.must_raise(
            driver.error, ["exchange failed", "every rank stops"], lambda: handle.reduce(given), same=False
        )
    handle.close()
    control.close()
    return message


@promise()
def a_failure_in_the_first_round_is_every_ranks(driver: Any) -> None:
    """A method that fails on some ranks before its first collective is an error on every rank, which names tensor and
    rank; the tensor's state is as before the step."""
    for method, settings, _ in VARIETY[:3] if driver.expensive else VARIETY:
        for ranks in _some_ranks(driver):
            _fail(driver, method, settings, 0, ranks)
    _fail(driver, "topk", {"density": 0.05}, 0, (driver.num_exchanging - 1,), good=0)  # in the very first step


@promise()
def a_failure_undoes_the_whole_step(driver: Any) -> None:
    """A method that fails undoes the whole step: the state of every other tensor is as before it, too."""
    for ranks in _some_ranks(driver):
        _fail(driver, "topk", {"density": 0.05}, 0, ranks, good=2)


@promise(ranks=2)
def a_failure_in_a_later_round_is_every_ranks(driver: Any) -> None:
    """A method that fails on some ranks when some of its collectives are done: the same error on every rank."""
    for method, settings, last in VARIETY:
        for rounds in range(1, min(last, driver.num_exchanging) + 1):
            for ranks in _some_ranks(driver):
                _fail(driver, method, settings, rounds, ranks)


@promise()
def the_message_is_one_and_names_the_cause(driver: Any) -> None:
    """All ranks raise one message, which has the cause, the tensor, the method, the round and the rank."""
    faulty = Faulty("scalecom", driver.placed({"density": 0.05}))
    handle, rank = driver.make(faulty.plan, {}, driver.shapes), driver.num_exchanging - 1
    words = [FAULT, "tensor 'c' (method scalecom, round 0, rank ", f"node {rank})" if driver.nodes else f"rank {rank})"]
    with faulty.failing((rank,), 0):
        driver.must_raise(driver.error, words, lambda: handle.reduce(driver.gradients(0, driver.shapes)))


@promise()
def after_an_error_it_goes_on_or_says_so(driver: Any) -> None:
    """After an error a Compressor goes on, or says at once on every rank that it cannot; a new one goes on anyhow."""
    _fail(driver, "topk", {"density": 0.05}, 0, (0,))
    handle, net = driver.make("topk", {"density": 0.05}, driver.shapes), driver.yardstick("topk", {"density": 0.05})
    for step in range(2):
        everyone = driver.everyone(step, driver.shapes)
        got, want = handle.reduce(everyone[driver.rank]), net.allreduce_many(everyone)[driver.rank]
        assert_close(got, want, driver.tolerance("topk", {}), f"a new one, step {step}")


@promise(seconds=40)
def a_bad_loss_scale_at_a_later_step(driver: Any) -> None:
    """A loss scale that is no positive finite number, on one rank, after good steps: an error on every rank, and all
    keep the step before."""
    now = {"scale": 1.0}
    for bad in (0.0, float("nan")):
        now["scale"] = 1.0
        handle = driver.make("topk", {"density": 0.05}, driver.shapes, loss_scale=lambda: now["scale"])
        for step in range(3):
            handle.reduce(driver.gradients(step, driver.shapes))
        kept = {name: handle.residual(name) for name in driver.shapes}
        if driver.rank == driver.world_size - 1 or driver.shared:
            now["scale"] = bad
        given = driver.gradients(3, driver.shapes)
        driver.must_raise(
            Exception, [] if driver.expensive else ["loss_scale"], lambda h=handle, g=given: h.reduce(g), False
        )
        for name, residual in kept.items():
            np.testing.assert_array_equal(handle.residual(name), residual)


@promise(seconds=40)
def a_wrong_input_at_a_later_step(driver: Any) -> None:
    """An array of the wrong kind, on one rank, after good steps: an error on every rank, all keep the step before, and
    the next step is as good as any."""
    handle, control = (driver.make("topk", {"density": 0.05}, driver.shapes) for _ in range(2))
    for step in range(20):  # often: who is ahead of whom is chance
        given = driver.gradients(step, driver.shapes)
        assert_close(handle.reduce(given), control.reduce(given), (0.0, 0.0), f"step {step}")
        wrong = dict(given)
        if driver.rank == step % driver.world_size:
            wrong["b"] = np.arange(12)
        driver.must_raise(Exception, ["int64", "'b'"], lambda w=wrong: handle.reduce(w), same=False)
        assert_same_state(handle.state(), control.state(), f"after the error in step {step}")
