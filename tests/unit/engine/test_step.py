"""One step on every rank, over transports that match collectives by order or by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.agreement import PeerError, SharedConfig
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.levels import network_over
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Step
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.methods.qsgd import QSGD
from hvdcompress.methods.topk import TopK
from hvdcompress.plan import IN_ORDER, plan_of
from tests.unit.engine.helpers import SHAPES, gradients, train
from tests.unit.engine.threads import Medium, ThreadTransport, run

WORLD = 3
CONFIG = SharedConfig({"method": "x"}, {"a": "float32"})


class Driver:
    """A minimal driver: what a new transport needs beyond :class:`Step`."""

    def __init__(self, transport: ThreadTransport, method: str, **settings: Any):
        self.plan = plan_of(method, min_elements=100, **settings)
        self.rank_state = RankState(self.plan, transport.rank, transport.world_size)
        self.network = network_over(transport, self.rank_state.observers)

    def reduce(
        self, given: dict[str, np.ndarray], config: SharedConfig = CONFIG, error: Exception | None = None
    ) -> dict[str, np.ndarray]:
        ordered = self.network["world"].ordered
        step = Step(self.rank_state, self.network, config)
        step.factor = 1.0 / self.rank_state.world_size
        step.error = error
        outs = {name: np.empty_like(g) for name, g in given.items()}
        if ordered:
            step.send_status()
        for bucket in self.plan.buckets(TensorSpec(name, g.shape) for name, g in given.items()) if not error else ():
            members = [given[m.name].ravel() for m in bucket.members]
            step.add(bucket, range(len(members)), members, [outs[m.name].reshape(-1) for m in bucket.members])
        if not ordered:
            step.send_status()
        step.finish()
        return outs

    def num_length_exchanges(self) -> int:
        """Return how often the ranks have exchanged the lengths of their payloads."""
        entry = self.rank_state.ledger.tensors().get("lengths")
        return entry.collectives if entry else 0


@pytest.mark.parametrize("ordered", [True, False])
def test_inf_on_one_rank_undoes_the_step_and_a_trigger_waits(ordered: bool) -> None:
    settings = {"dense_steps": 2, "compressed_steps": 4, "tensors": "all"}

    def program(transport: ThreadTransport) -> Any:
        driver, triggers = Driver(transport, "gradiveq", **settings), []
        for step in range(4):
            given = gradients(SHAPES, step, WORLD)[transport.rank]
            if step == 2:
                driver.rank_state.trigger_requested = transport.rank == 1
                given["c"].flat[5] = np.inf if transport.rank == 2 else 0.0
            before = driver.rank_state.state_dict()["steps"]
            outs = driver.reduce(given)
            if step == 2:
                assert all(np.isnan(out).all() for out in outs.values())
                assert driver.rank_state.state_dict()["steps"] == before
            triggers.append(driver.rank_state.states["a"].triggers)
        return triggers

    found, _ = run(WORLD, ordered, program)
    assert found == [[0, 0, 0, 1]] * WORLD


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("method", ["none", "topk", "scalecom", "gtopk", "qsgd", "powersgd"])
def test_any_transport_gives_the_results_and_bytes_of_the_loopback(method: str, ordered: bool) -> None:
    net = Loopback(method, WORLD, min_elements=100)
    want = train(net, range(3))

    def program(transport: ThreadTransport) -> Any:
        driver = Driver(transport, method)
        results = [driver.reduce(gradients(SHAPES, step, WORLD)[transport.rank]) for step in range(3)]
        return results, driver.rank_state.ledger.tensors()

    found, _ = run(WORLD, ordered, program)
    for rank, (results, entries) in enumerate(found):
        np.testing.assert_equal(results, want)
        for name, entry in net.ledger.tensors(rank).items():
            assert entries[name] == entry


# -- lengths of payloads, which ordered transports need before an all-gather --------------------------------------


def length_exchanges(method: str, steps: int = 4, world_size: int = 2, **settings: Any) -> list[int]:
    """Return how often the ranks exchange the lengths of their payloads, in each step."""

    def program(transport: ThreadTransport) -> Any:
        driver = Driver(transport, method, **settings)
        counts = [0]
        for step in range(steps):
            driver.reduce(gradients(SHAPES, step, world_size)[transport.rank])
            counts.append(driver.num_length_exchanges())
        return np.diff(counts).tolist()

    found, _ = run(world_size, True, program)
    assert found == [found[0]] * world_size
    return found[0]


@pytest.mark.parametrize("method", ["qsgd", "dgc"])
def test_fixed_lengths_are_exchanged_once(method: str) -> None:
    first, *later = length_exchanges(method)
    assert first and not any(later)


def test_variable_lengths_are_exchanged_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopK, "variable_length", True)
    first, *later = length_exchanges("topk")
    assert first and later == [first] * 3


def test_lengths_are_exchanged_again_in_each_compressed_phase() -> None:
    settings = {"dense_steps": 2, "compressed_steps": 2, "tensors": "all", "values": "qsgd8"}
    found = length_exchanges("gradiveq", steps=8, **settings)
    assert [bool(count) for count in found] == [False, False, True, False, False, False, True, False]


@pytest.mark.parametrize("how,num_ranks", [("loaded", 2), ("loaded", 1), ("regrouped", 2), ("regrouped", 1)])
def test_all_ranks_exchange_lengths_again_when_one_replaces_its_state(how: str, num_ranks: int) -> None:
    """Otherwise the other ranks would send payloads where this rank sends lengths."""

    def program(transport: ThreadTransport) -> Any:
        driver, counts = Driver(transport, "qsgd"), [0]
        for step in range(4):
            replaces = step == 2 and transport.rank < num_ranks
            if replaces and how == "loaded":
                driver.rank_state.load_state_dict(driver.rank_state.state_dict())
            elif replaces:
                (bucket,), other = driver.plan.buckets([TensorSpec("w", (512,))]), TensorSpec("v", (9,))
                joined = TensorSpec("v+1", (521,))
                driver.rank_state.regroup([replace(bucket, spec=joined, members=(other, *bucket.members))])
            driver.reduce({"w": np.float32(np.arange(512)) * (1 + transport.rank)})
            counts.append(driver.num_length_exchanges())
        return np.diff(counts).tolist()

    found, _ = run(2, True, program)
    assert found == [[1, 0, 1, 0]] * 2


@pytest.mark.parametrize("differs", ["rank", "step"])
def test_a_fixed_length_that_differs_is_an_error_on_every_rank(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = QSGD.encode

    def longer(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        return np.concatenate([encode(self, x, state, ctx, work), np.zeros(4 * getattr(ctx, differs), np.uint8)])

    monkeypatch.setattr(QSGD, "encode", longer)

    def program(transport: ThreadTransport) -> Any:
        driver = Driver(transport, "qsgd", route="gather")
        for step in range(2):
            driver.reduce(gradients(SHAPES, step, WORLD)[transport.rank])

    found, _ = run(WORLD, True, program)
    for error in found:
        assert isinstance(error, PeerError | ExchangeError), error
        assert "fixed-length all-gather" in str(error) and "method qsgd" in str(error)


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "config,error,words",
    [
        (SharedConfig({"method": "x"}, {"a": "float16"}), None, "tensor 'a' is 'float32' on rank 0 and 'float16' on"),
        (SharedConfig({"method": "x"}, {"a": "float16"}), ValueError("no"), "tensor 'a' is 'float32' on rank 0 and"),
        (SharedConfig({}, {}), ValueError("no"), "every rank stops. rank 2: no"),  # it does not know its config yet
    ],
)
def test_all_ranks_raise_one_message_that_names_the_cause(
    config: SharedConfig, error: Exception | None, words: str, ordered: bool
) -> None:
    """A different configuration explains the failure, so it is reported before the failure itself."""

    def program(transport: ThreadTransport) -> Any:
        driver, given = Driver(transport, "topk"), gradients(SHAPES, 0, WORLD)[transport.rank]
        return driver.reduce(given, config, error) if transport.rank == 2 else driver.reduce(given)

    found, _ = run(WORLD, ordered, program)
    assert all(isinstance(one, PeerError) for one in found), found
    assert len({str(one) for one in found}) == 1 and words in str(found[0])


def step_of_one_rank(ordered: bool = False) -> tuple[Step, Any]:
    """Return a step of a single rank, and a bucket of two tensors."""
    plan = plan_of("topk", min_elements=1, density=0.5, bucket_elements=1000)
    (bucket,) = plan.buckets([TensorSpec("a", (4,)), TensorSpec("b", (6,))], IN_ORDER)
    local = RankState(plan, 0, 1)
    transport = ThreadTransport(0, Medium(1, ordered))
    step = Step(local, network_over(transport, local.observers), CONFIG)
    if ordered:
        step.send_status()
    return step, bucket


def test_the_first_deferred_error_is_kept() -> None:
    step, _ = step_of_one_rank()
    for error in (ValueError("first"), TypeError("second")):
        with step.defer_errors():
            raise error
    assert str(step.error) == "first"
    with pytest.raises(KeyboardInterrupt), step.defer_errors():  # it ends the program, and is not an error of the step
        raise KeyboardInterrupt


@pytest.mark.parametrize("ordered", [True, False])
def test_a_missing_gradient_is_named(ordered: bool) -> None:
    step, bucket = step_of_one_rank(ordered)
    step.factor = 1.0
    step.add(bucket, [1], [np.ones(6, np.float32)])
    if not ordered:
        step.send_status()  # tells the other ranks
        assert "no gradient of 'a'" in str(step.error)
    with pytest.raises((RuntimeError, PeerError), match="no gradient of 'a'"):
        step.finish()


def test_a_factor_that_was_not_set_is_an_error() -> None:
    step, bucket = step_of_one_rank(ordered=True)
    step.add(bucket, [0, 1], [np.ones(4, np.float32), np.ones(6, np.float32)])
    with pytest.raises(RuntimeError, match=r"step.factor"):
        step.finish()
