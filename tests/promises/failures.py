"""A rank that fails is an error on every rank, and a hang on none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from harness import assert_close

from hvdcompress.plan import plan_of
from promises.numbers import assert_same_state
from promises.registry import promise
from promises.variants import Settings

SUBJECT = "Failures"
FAULT = "a fault made by the test"
#: method, settings, and in which round of collectives it can fail last
VARIETY: tuple[tuple[str, Settings, int], ...] = (
    ("topk", {"density": 0.05}, 1),
    ("scalecom", {"density": 0.05}, 2),
    ("gtopk", {"density": 0.05}, 2),
    ("qsgd", {"route": "scatter"}, 2),
    ("fp16", {}, 1),
    ("terngrad", {}, 2),
)


class Faulty:
    """A plan whose method can be made to fail for tensor "c": on some ranks, after so many collectives."""

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


def _some_ranks(door: Any) -> list[tuple[int, ...]]:
    last = door.world - 1
    found = {(last,), (0, door.world // 2), tuple(range(door.world))}
    return sorted({tuple(sorted(set(ranks))) for ranks in found})


def _fail(door: Any, method: str, settings: Settings, rounds: int, ranks: tuple[int, ...], good: int = 1) -> str:
    """``good`` steps, a step that fails, and then another or the error again; the message."""
    faulty = Faulty(method, settings)
    handle = door.make(faulty.plan, {}, door.shapes)
    control = door.make(method, {"bucket_elements": 0, **settings}, door.shapes)
    for step in range(good):
        handle.reduce(door.gradients(step, door.shapes))
        control.reduce(door.gradients(step, door.shapes))
    kept = ["c"] if door.by_tensor else list(door.shapes)
    before = {name: handle.residual(name) for name in kept} if good else {}
    words, given = ["'c'", "rank"], door.gradients(good, door.shapes)
    with faulty.failing(ranks, rounds):
        message = door.must_raise(door.error, words, lambda: handle.reduce(given), same=False)
    for name, residual in before.items():
        np.testing.assert_array_equal(handle.residual(name), residual, err_msg=f"{method}: kept as before the step")
    if door.recovers:
        if good:
            assert_same_state(handle.state(), control.state(), f"{method}: as before the step")
        want, got = control.reduce(given), handle.reduce(given)
        assert_close(got, want, (0.0, 0.0), f"{method} after a failure in round {rounds} on ranks {ranks}")
        assert_same_state(handle.state(), control.state(), f"{method}: after the step")
    else:
        door.must_raise(door.error, ["exchange failed", "every rank stops"], lambda: handle.reduce(given), same=False)
    handle.close()
    control.close()
    return message


@promise()
def a_failure_in_the_first_round_is_every_ranks(door: Any) -> None:
    """A method that fails on some ranks before its first collective is an error on every rank, which names tensor and
    rank; the tensor's state is as before the step."""
    for method, settings, _ in VARIETY[:3] if door.expensive else VARIETY:
        for ranks in _some_ranks(door):
            _fail(door, method, settings, 0, ranks)
    _fail(door, "topk", {"density": 0.05}, 0, (door.world - 1,), good=0)  # in the very first step


@promise()
def a_failure_undoes_the_whole_step(door: Any) -> None:
    """A method that fails undoes the whole step: the state of every other tensor is as before it, too."""
    for ranks in _some_ranks(door):
        _fail(door, "topk", {"density": 0.05}, 0, ranks, good=2)


@promise(ranks=2)
def a_failure_in_a_later_round_is_every_ranks(door: Any) -> None:
    """A method that fails on some ranks when some of its collectives are done: the same error on every rank."""
    for method, settings, last in VARIETY:
        for rounds in range(1, min(last, door.world) + 1):
            for ranks in _some_ranks(door):
                _fail(door, method, settings, rounds, ranks)


@promise()
def the_message_is_one_and_names_the_cause(door: Any) -> None:
    """All ranks raise one message, which has the cause, the tensor, the method, the round and the rank."""
    faulty = Faulty("scalecom", {"density": 0.05})
    handle, rank = door.make(faulty.plan, {}, door.shapes), door.world - 1
    words = [FAULT, f"tensor 'c' (method scalecom, round 0, rank {rank})"]
    with faulty.failing((rank,), 0):
        door.must_raise(door.error, words, lambda: handle.reduce(door.gradients(0, door.shapes)))


@promise()
def after_an_error_it_goes_on_or_says_so(door: Any) -> None:
    """After an error a Compressor goes on, or says at once on every rank that it cannot; a new one goes on anyhow."""
    _fail(door, "topk", {"density": 0.05}, 0, (0,))
    handle, net = door.make("topk", {"density": 0.05}, door.shapes), door.yardstick("topk", {"density": 0.05})
    for step in range(2):
        everyone = door.everyone(step, door.shapes)
        got, want = handle.reduce(everyone[door.rank]), net.allreduce_many(everyone)[door.rank]
        assert_close(got, want, door.tolerance("topk", {}), f"a new one, step {step}")


@promise(seconds=40)
def a_bad_loss_scale_at_a_later_step(door: Any) -> None:
    """A loss scale that is no positive finite number, on one rank, after good steps: an error on every rank, and all
    keep the step before."""
    now = {"scale": 1.0}
    for bad in (0.0, float("nan")):
        now["scale"] = 1.0
        handle = door.make("topk", {"density": 0.05}, door.shapes, loss_scale=lambda: now["scale"])
        for step in range(3):
            handle.reduce(door.gradients(step, door.shapes))
        kept = {name: handle.residual(name) for name in door.shapes}
        if door.rank == door.world - 1 or door.shared:
            now["scale"] = bad
        given = door.gradients(3, door.shapes)
        door.must_raise(
            Exception, [] if door.expensive else ["loss_scale"], lambda h=handle, g=given: h.reduce(g), False
        )
        for name, residual in kept.items():
            np.testing.assert_array_equal(handle.residual(name), residual)


@promise(seconds=40)
def a_wrong_input_at_a_later_step(door: Any) -> None:
    """An array of the wrong kind, on one rank, after good steps: an error on every rank, all keep the step before, and
    the next step is as good as any."""
    handle, control = (door.make("topk", {"density": 0.05}, door.shapes) for _ in range(2))
    for step in range(20):  # often: who is ahead of whom is chance
        given = door.gradients(step, door.shapes)
        assert_close(handle.reduce(given), control.reduce(given), (0.0, 0.0), f"step {step}")
        wrong = dict(given)
        if door.rank == step % door.world:
            wrong["b"] = np.arange(12)
        door.must_raise(Exception, ["int64", "'b'"], lambda w=wrong: handle.reduce(w), same=False)
        assert_same_state(handle.state(), control.state(), f"after the error in step {step}")
