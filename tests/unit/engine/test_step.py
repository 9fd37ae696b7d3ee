"""One step on every rank, over transports with and without names: agreement, errors, undoing, triggers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.agreement import PeerError, SharedConfig
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.exchange import Exchange, ExchangeError
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Agree, Step
from hvdcompress.engine.transport import Group
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.methods.qsgd import QSGD
from hvdcompress.methods.topk import TopK
from hvdcompress.ops import fast
from hvdcompress.plan import IN_ORDER, plan_of
from hvdcompress.testing import numbers
from tests.unit.engine.threads import Medium, ThreadTransport, run

SHAPES = {"a": (40, 50), "b": (9,), "c": (300,), "d": (17, 3)}
WORLD = 3
CONFIG = SharedConfig({"method": "x"}, {"a": "float32"})
AGREE = {True: Agree.FIRST_AND_LAST, False: Agree.BEFORE_WAITING}


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    return {name: numbers(shape, number, rank, step) for number, (name, shape) in enumerate(SHAPES.items())}


class Driver:
    """A driver in a few lines: what a new transport needs beyond :class:`Step`."""

    def __init__(self, transport: ThreadTransport, method: str, **settings: Any):
        self.plan = plan_of(method, **settings)
        self.local = RankState(self.plan, transport.rank, transport.world_size)
        self.collectives = Collectives(transport, self.local.observers)

    def reduce(
        self,
        given: dict[str, np.ndarray],
        config: SharedConfig = CONFIG,
        error: Exception | None = None,
        scale: float = 1.0,
    ) -> dict[str, np.ndarray]:
        agree = AGREE[self.collectives.ordered]
        step = Step(self.local, self.collectives, config, agree)
        step.loss_scale = scale
        step.factor = 1.0 / self.local.world_size
        step.error = error
        outs = {name: np.empty_like(g) for name, g in given.items()}
        try:
            if agree is Agree.FIRST_AND_LAST:
                step.send_status()
            if not error:
                for bucket in self.plan.buckets(TensorSpec(name, g.shape) for name, g in given.items()):
                    members = [given[m.name].ravel() for m in bucket.members]
                    step.add(bucket, range(len(members)), members, [outs[m.name].reshape(-1) for m in bucket.members])
            if agree is Agree.BEFORE_WAITING:
                step.send_status()
            step.finish()
        except BaseException:
            step.abandon()
            raise
        return outs


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("method", ["none", "fp16", "topk", "scalecom", "gtopk", "qsgd", "powersgd"])
def test_any_transport_gives_loopbacks_results_and_bytes(method: str, ordered: bool) -> None:
    settings = {"min_elements": 100}
    net = Loopback(method, WORLD, **settings)
    want = [net.allreduce_many([gradients(step, rank) for rank in range(WORLD)]) for step in range(3)]

    def program(transport: ThreadTransport) -> Any:
        driver = Driver(transport, method, **settings)
        return [driver.reduce(gradients(step, transport.rank)) for step in range(3)], driver.local

    found, _ = run(WORLD, ordered, program)
    for rank, (outs, local) in enumerate(found):
        for step in range(3):
            for name in SHAPES:
                np.testing.assert_array_equal(outs[step][name], want[step][rank][name], err_msg=f"{name}, {step}")
        for name, entry in net.ledger.tensors(rank).items():
            assert local.ledger.tensors()[name] == entry


def lengths_asked(method: str, **settings: Any) -> list[int]:
    """How often, in each of four steps, ranks tell each other how long their payloads are."""

    def program(transport: ThreadTransport) -> Any:
        driver, asked = Driver(transport, method, min_elements=100, **settings), [0]
        for step in range(4):
            driver.reduce(gradients(step, transport.rank))
            entry = driver.local.ledger.tensors().get("lengths")
            asked.append(entry.collectives if entry else 0)
        return np.diff(asked).tolist()

    found, _ = run(WORLD, True, program)
    assert found == [found[0]] * WORLD
    return found[0]


@pytest.mark.parametrize("method", ["qsgd", "signsgd", "dgc", "fft"])
def test_lengths_that_are_fixed_are_told_once(method: str) -> None:
    first, *later = lengths_asked(method)
    assert first and not any(later)


def test_lengths_that_may_differ_are_told_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "variable_length", True)
    first, *later = lengths_asked("topk")
    assert first and later == [first] * 3


def test_a_phase_that_comes_again_may_have_other_lengths() -> None:
    settings = {"dense_steps": 2, "compressed_steps": 2, "tensors": "all", "slice_elements": 8, "min_rate": 1.0}
    rng = np.random.default_rng(0)
    alike = np.float32(rng.normal(size=(64, 1)) * rng.normal(size=8)).ravel()  # slices in one direction
    unlike = np.float32(rng.normal(size=512))

    def program(transport: ThreadTransport) -> Any:
        driver, asked, sizes = Driver(transport, "gradiveq", min_elements=100, values="qsgd8", **settings), [0], [0]
        for step in range(8):
            driver.reduce({"w": (alike if step < 4 else unlike) * (1 + transport.rank)})
            entries = driver.local.ledger.tensors()
            asked.append(entries["lengths"].collectives if "lengths" in entries else 0)
            sizes.append(entries["w"].sent)
        return np.diff(asked).tolist(), np.diff(sizes).tolist()

    found, _ = run(2, True, program)
    assert found[0] == found[1]
    asked, sizes = found[0]
    assert asked == [0, 0, 1, 0, 0, 0, 1, 0]
    assert sizes[2] == sizes[3] < sizes[6] == sizes[7]


@pytest.mark.parametrize(
    "how,ranks", [("released", 2), ("loaded", 2), ("loaded", 1), ("regrouped", 2), ("regrouped", 1)]
)
def test_lengths_are_told_again_where_a_state_is_replaced(how: str, ranks: int) -> None:
    """By all ranks, also where one alone does so: the others would send payloads where it sends lengths."""

    def program(transport: ThreadTransport) -> Any:
        driver, asked = Driver(transport, "qsgd", min_elements=100), [0]
        for step in range(4):
            if step != 2 or transport.rank >= ranks:
                pass
            elif how == "loaded":
                driver.local.load_state_dict(driver.local.state_dict())
            elif how == "released":
                driver.local.release()
            else:
                (bucket,), other = driver.plan.buckets([TensorSpec("w", (512,))]), TensorSpec("v", (9,))
                joined = TensorSpec("v+1", (521,))
                driver.local.regroup([replace(bucket, spec=joined, members=(other, *bucket.members))])
            driver.reduce({"w": np.float32(np.arange(512)) * (1 + transport.rank)})
            asked.append(driver.local.ledger.tensors()["lengths"].collectives)
        return np.diff(asked).tolist()

    found, _ = run(2, True, program)
    assert found == [[1, 0, 1, 0]] * 2


@pytest.mark.parametrize("differs", ["rank", "step"])
def test_a_length_that_is_fixed_but_differs_is_every_ranks_error(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = QSGD.encode

    def longer(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        extra = ctx.rank if differs == "rank" else ctx.step
        return np.concatenate([encode(self, x, state, ctx, work), np.zeros(4 * extra, np.uint8)])

    monkeypatch.setattr(QSGD, "encode", longer)

    def program(transport: ThreadTransport) -> Any:
        driver = Driver(transport, "qsgd", route="gather")
        for step in range(2):
            driver.reduce(gradients(step, transport.rank))

    found, _ = run(WORLD, True, program)
    for error in found:
        assert isinstance(error, PeerError | ExchangeError), error
        assert "fixed-length all-gather" in str(error) and "method qsgd" in str(error)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_infinity_on_one_rank_undoes_the_step_and_a_trigger_waits(ordered: bool) -> None:
    settings = {"dense_steps": 2, "compressed_steps": 4, "tensors": "all", "min_elements": 100}

    def program(transport: ThreadTransport) -> Any:
        driver, triggers = Driver(transport, "gradiveq", **settings), []
        for step in range(4):
            given = gradients(step, transport.rank)
            if step == 2:
                driver.local.trigger_requested = transport.rank == 1
                given["c"][5] = np.inf if transport.rank == 2 else given["c"][5]
            before = driver.local.state_dict()
            outs = driver.reduce(given)
            if step == 2:
                assert all(np.isnan(out).all() for out in outs.values())
                after = driver.local.state_dict()
                assert before["steps"] == after["steps"] and driver.local.trigger_requested
            triggers.append(driver.local.states["a"].triggers)
        return triggers

    found, _ = run(WORLD, ordered, program)
    assert found == [[0, 0, 0, 1]] * WORLD


@pytest.mark.parametrize("ordered", [True, False])
def test_one_ranks_error_is_everyones_and_the_next_step_is_good(ordered: bool) -> None:
    def program(transport: ThreadTransport) -> Any:
        driver, control = Driver(transport, "topk", min_elements=100), Driver(transport, "topk", min_elements=100)
        messages = []
        for step in range(3):
            error = ValueError("a wrong input") if transport.rank == 1 else None
            try:
                driver.reduce(gradients(9, transport.rank), error=error)
            except PeerError as failure:
                messages.append(str(failure))
            got, want = driver.reduce(gradients(step, transport.rank)), control.reduce(gradients(step, transport.rank))
            assert all((got[name] == want[name]).all() for name in SHAPES)
        return messages

    if not ordered:
        pytest.skip("by name, what other ranks have started stays behind: the drivers end their Compressor")
    found, _ = run(WORLD, ordered, program)
    assert found == [["a gradient exchange failed, so every rank stops. rank 1: a wrong input"] * 3] * WORLD


@pytest.mark.parametrize("ordered", [True, False])
def test_what_ranks_disagree_on_is_named(ordered: bool) -> None:
    def told(**changes: Any) -> set[str]:
        def program(transport: ThreadTransport) -> Any:
            odd = transport.rank == 2
            config = SharedConfig({"method": "x"}, {"a": "float16" if odd and "dtype" in changes else "float32"})
            driver = Driver(transport, "topk", min_elements=100)
            if "step" in changes:
                driver.reduce(gradients(0, transport.rank))
                state, _ = driver.local.find("c")
                driver.local.swap({"c": replace(state, step=state.step + odd)})
            error = ValueError("a payload of another plan") if odd and "error" in changes else None
            scale = 2.0 if odd and "scale" in changes else 1.0
            config = SharedConfig({}, {}) if odd and "unknown" in changes else config
            return driver.reduce(gradients(1, transport.rank), config, error, scale)

        found, _ = run(WORLD, ordered, program)
        assert all(isinstance(one, PeerError) for one in found), found
        return {str(one) for one in found}

    assert told(dtype=True) == {
        "ranks disagree: tensor 'a' is 'float32' on rank 0 and 'float16' on rank 2; give every rank the same plan and "
        "the same model"
    }
    assert told(dtype=True, error=True) == told(dtype=True), "what explains the failure comes first"
    (words,) = told(unknown=True, error=True)
    assert "rank 2: a payload of another plan" in words, "a rank that does not know its config yet is not compared"
    (words,) = told(scale=True)
    assert "loss scale: it is 1.0 on one and 2.0 on another" in words
    (words,) = told(step=True)
    assert "ranks disagree on the step" in words


def test_state_loaded_before_a_tensor_comes_is_found_when_it_comes() -> None:
    plan = plan_of("topk", min_elements=1, density=0.1)
    saved = []

    def program(transport: ThreadTransport) -> Any:
        driver = Driver(transport, "topk", min_elements=1, density=0.1)
        for step in range(2):
            driver.reduce(gradients(step, transport.rank))
        return driver.local.state_dict()

    saved, _ = run(2, True, program)
    fresh = RankState(plan, 0, 2)
    fresh.load_state_dict(saved[0])
    assert fresh.state_dict()["steps"] == saved[0]["steps"], "what waits is saved again, too"
    for name, shape in SHAPES.items():
        (bucket,) = plan.buckets([TensorSpec(name, shape)])
        g = gradients(2, 0)[name].ravel()
        exchange = Exchange(Setup(fresh, Group(0, 2), bucket, g, fast))
        assert exchange.setup.ctx.step == 2
        np.testing.assert_array_equal(exchange.setup.state.slots["residual"], saved[0]["state"][name]["residual"])
        exchange.abandon()


# -- errors of one rank -----------------------------------------------------------------------------------


def alone(agree: Agree | None = None) -> tuple[Step, Any]:
    """A step of a rank by itself, and the bucket of two tensors."""
    plan = plan_of("topk", min_elements=1, density=0.5, bucket_elements=1000)
    (bucket,) = plan.buckets([TensorSpec("a", (4,)), TensorSpec("b", (6,))], IN_ORDER)
    local = RankState(plan, 0, 1)
    transport = ThreadTransport(0, Medium(1, agree is Agree.FIRST_AND_LAST))
    return Step(local, Collectives(transport, local.observers), CONFIG, agree), bucket


def test_an_error_waits_for_the_ranks_agreement_and_the_first_one_counts() -> None:
    step, _ = alone()
    with step.defer_errors:
        raise ValueError("first")
    with step.defer_errors:
        raise TypeError("second")
    assert str(step.error) == "first"
    with pytest.raises(KeyboardInterrupt), step.defer_errors:  # it ends the program, and is no error of the step
        raise KeyboardInterrupt
    waiting = step.defer_errors
    del step
    with pytest.raises(ValueError, match="nobody is there"), waiting:
        raise ValueError("nobody is there")


@pytest.mark.parametrize("agree", Agree)
def test_a_gradient_that_never_comes_is_named(agree: Agree) -> None:
    step, bucket = alone(agree)
    step.factor = 1.0
    if agree is Agree.FIRST_AND_LAST:
        step.send_status()
    step.add(bucket, [1], [np.ones(6, np.float32)])
    if agree is Agree.BEFORE_WAITING:
        step.send_status()  # the others are told
        assert "no gradient of 'a'" in str(step.error)
    with pytest.raises((RuntimeError, PeerError), match="no gradient of 'a'"):
        step.finish()


def test_missing_gradients_are_filled_with_zeros() -> None:
    step, bucket = alone(Agree.BEFORE_WAITING)
    step.factor, ones = 1.0, np.ones(6, np.float32)
    step.add(bucket, [1], [ones])
    step.fill_missing()
    step.send_status()
    step.finish()
    assert ones.sum() == 3 and step.local.steps() == {"a": 1, "b": 1}
    assert not step.local.residual("a").any() and step.local.residual("b").sum() == 3  # type: ignore[union-attr]


def test_a_factor_that_was_not_set_is_said() -> None:
    step, bucket = alone(Agree.FIRST_AND_LAST)
    step.send_status()
    step.add(bucket, [0, 1], [np.ones(4, np.float32), np.ones(6, np.float32)])
    with pytest.raises(RuntimeError, match=r"step.factor"):
        step.finish()


def test_tensors_of_one_bucket_are_saved_at_one_step() -> None:
    step, bucket = alone(Agree.BEFORE_WAITING)
    step.factor = 1.0
    step.add(bucket, [0, 1], [np.ones(4, np.float32), np.ones(6, np.float32)])
    step.send_status()
    step.finish()
    saved = step.local.state_dict()
    saved["steps"]["b"] = 7
    with pytest.raises(ValueError, match="at different steps"):
        step.local.load_state_dict(saved, [bucket])
