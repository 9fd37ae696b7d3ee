"""A rank that fails is an error on every rank, and no rank hangs."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from hvdcompress.plan import plan_of
from tests.ranks.checks import assert_close, assert_same_state

FAULT = "a fault made by the test"
#: method, settings, and the last round of collectives in which it can fail
FAILING = (
    ("topk", {"density": 0.05}, 1),
    ("scalecom", {"density": 0.05}, 2),
    ("qsgd", {"route": "scatter"}, 2),
    ("gtopk", {"density": 0.05}, 2),
    ("oktopk", {"density": 0.05}, 2),
    ("terngrad", {}, 2),
)


class Faulty:
    """A plan whose method can fail for tensor "c", on some ranks, after some collectives."""

    def __init__(self, method, settings):
        # no buckets: one tensor fails
        self.plan, self.ranks, self.rounds = plan_of(method, **{"bucket_elements": 0, **settings}), (), 0
        original = self.plan.program.main.exchange

        def exchange(x, state, ctx, work):
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
    def failing(self, ranks, rounds):
        """Context manager in which the method fails."""
        self.ranks, self.rounds = ranks, rounds
        try:
            yield
        finally:
            self.ranks = ()


def some_ranks(driver):
    """Return the last rank alone, and all ranks."""
    everyone = tuple(range(driver.num_exchanging))
    return sorted({everyone[-1:], everyone})


def check_failure(driver, method, settings, rounds, ranks, good=1):
    """Do ``good`` steps, a step that fails, and another one, which succeeds or fails again on every rank."""
    faulty = Faulty(method, driver.placed(settings))
    handle = driver.make(faulty.plan, {}, driver.shapes)
    control = driver.make(method, {"bucket_elements": 0, **settings}, driver.shapes)
    for step in range(good):
        for one in (handle, control):
            one.reduce(driver.gradients(step, driver.shapes))
    kept = ["c"] if driver.by_tensor else list(driver.shapes)
    before = {name: handle.residual(name) for name in kept} if good else {}
    given = driver.gradients(good, driver.shapes)
    with faulty.failing(ranks, rounds):
        driver.must_raise(driver.error, ["'c'", "rank"], lambda: handle.reduce(given), same=False)
    for name, residual in before.items():
        np.testing.assert_array_equal(handle.residual(name), residual, err_msg=f"{method}, {name} after the failure")
    if driver.recovers:
        if good:
            assert_same_state(handle.state(), control.state(), f"{method}, after the failure")
        want, got = control.reduce(given), handle.reduce(given)
        assert_close(got, want, (0.0, 0.0), f"{method}, after a failure in round {rounds} on ranks {ranks}")
        assert_same_state(handle.state(), control.state(), f"{method}, after the next step")
    else:
        words = ["exchange failed", "every rank stops"]
        driver.must_raise(driver.error, words, lambda: handle.reduce(given), same=False)
    handle.close()
    control.close()


@pytest.mark.also("three ranks", "gloo", "one rank")
def test_failure_in_the_first_round_is_an_error_on_every_rank(driver):
    """It names tensor and rank, and the tensor's state is as before the step."""
    for method, settings, _ in FAILING[: 1 if driver.expensive else 3]:
        for ranks in some_ranks(driver):
            check_failure(driver, method, settings, 0, ranks)
    check_failure(driver, "topk", {"density": 0.05}, 0, (driver.num_exchanging - 1,), good=0)  # in the very first step


@pytest.mark.excepted("tensorflow", "each gradient has a graph of its own: only that tensor is undone")
def test_failure_undoes_the_whole_step(driver):
    check_failure(driver, "topk", {"density": 0.05}, 0, (0,), good=2)


@pytest.mark.excepted(
    "torch", "ranks agree once in a step: a rank that fails later raises alone, and Horovod ends the rest"
)
@pytest.mark.excepted(
    "tensorflow", "the error flag goes with the first collective: the rank raises alone, and ends the rest"
)
@pytest.mark.parametrize("method,settings,last", FAILING, ids=[method for method, *_ in FAILING])
def test_failure_in_a_later_round_is_an_error_on_every_rank(driver, method, settings, last):
    for rounds in range(1, min(last, driver.num_exchanging) + 1):
        for ranks in some_ranks(driver):
            check_failure(driver, method, settings, rounds, ranks)


@pytest.mark.excepted(
    "tensorflow", "what ranks tell each other fits into a probe: the others name the rank that failed"
)
def test_all_ranks_raise_one_message_that_names_the_cause(driver):
    """The cause, the tensor, the method, the round and the rank."""
    faulty = Faulty("scalecom", driver.placed({"density": 0.05}))
    handle, rank = driver.make(faulty.plan, {}, driver.shapes), driver.num_exchanging - 1
    words = [FAULT, "tensor 'c' (method scalecom, round 0, rank ", f"node {rank})" if driver.nodes else f"rank {rank})"]
    with faulty.failing((rank,), 0):
        driver.must_raise(driver.error, words, lambda: handle.reduce(driver.gradients(0, driver.shapes)))


def test_new_compressor_works_after_an_error(driver):
    check_failure(driver, "topk", {"density": 0.05}, 0, (0,))
    handle, net = driver.make("topk", {"density": 0.05}, driver.shapes), driver.yardstick("topk", {"density": 0.05})
    for step in range(2):
        everyone = driver.everyone(step, driver.shapes)
        got, want = handle.reduce(everyone[driver.rank]), net.allreduce(everyone)[driver.rank]
        assert_close(got, want, driver.tolerance("topk", {}), f"step {step}")


@pytest.mark.timeout(40)
@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_loss_scale_that_is_not_positive_and_finite_is_refused(driver, bad):
    """On one rank, after good steps: an error on every rank, and all keep the state."""
    now = {"scale": 1.0}
    handle = driver.make("topk", {"density": 0.05}, driver.shapes, loss_scale=lambda: now["scale"])
    for step in range(2):
        handle.reduce(driver.gradients(step, driver.shapes))
    kept = {name: handle.residual(name) for name in driver.shapes}
    if driver.rank == driver.world_size - 1 or driver.shared:
        now["scale"] = bad
    given, words = driver.gradients(3, driver.shapes), [] if driver.expensive else ["loss_scale"]
    driver.must_raise(Exception, words, lambda: handle.reduce(given), same=False)
    for name, residual in kept.items():
        np.testing.assert_array_equal(handle.residual(name), residual)


@pytest.mark.timeout(40)
@pytest.mark.excepted("torch", "gradients have the dtypes of parameters")
@pytest.mark.excepted("ddp", "gradients have the dtypes of parameters")
@pytest.mark.excepted("tensorflow", "gradients have the dtypes of variables")
def test_array_of_integers_on_one_rank_is_refused(driver):
    """An error on every rank; all keep the state, and the next step succeeds."""
    handle, control = (driver.make("topk", {"density": 0.05}, driver.shapes) for _ in range(2))
    for step in range(20):  # many, since it is chance which rank is ahead
        given = driver.gradients(step, driver.shapes)
        assert_close(handle.reduce(given), control.reduce(given), (0.0, 0.0), f"step {step}")
        wrong = dict(given)
        if driver.rank == step % driver.world_size:
            wrong["b"] = np.arange(12)
        driver.must_raise(Exception, ["int64", "'b'"], lambda w=wrong: handle.reduce(w), same=False)
        assert_same_state(handle.state(), control.state(), f"after the error in step {step}")
