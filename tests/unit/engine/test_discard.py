"""Steps that are taken back, and steps in a pause: what is kept is as if they had not been."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD
from hvdcompress.registry import classes

SHAPES = {"a": (40, 50), "b": (30,), "c": (8, 4, 3, 3), "d": (5000,)}
METHODS = sorted(classes())


def gradients(step: int, names: tuple[str, ...] = tuple(SHAPES), world_size: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(step)
    return [{n: rng.normal(size=SHAPES[n]).astype(np.float32) for n in names} for _ in range(world_size)]


def made(method: str, **settings: Any) -> Loopback:
    return Loopback(method, 2, optimizer=SGD(momentum=0.9), **{"min_elements": 20, **settings})


def states(network: Loopback) -> list[Any]:
    return [rank.state_dict() for rank in network.ranks]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def same_results(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return all(np.array_equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.mark.parametrize("together", [0, 100_000], ids=["apart", "together"])
@pytest.mark.parametrize("method", METHODS)
def test_a_discarded_step_leaves_no_trace(method: str, together: int) -> None:
    """Of 30 steps, as stamps are renewed every 27, each fourth is done twice; and the first one."""
    trained, twin = made(method, bucket_elements=together), made(method, bucket_elements=together)
    for step in range(30):
        if step % 4 == 0:
            before = states(trained)
            trained.allreduce_many(gradients(1000 + step))
            trained.discard()
            assert not step or equal(states(trained), before)
        assert same_results(trained.allreduce_many(gradients(step)), twin.allreduce_many(gradients(step))), step
    assert equal(states(trained), states(twin))


@pytest.mark.parametrize("method", METHODS)
def test_steps_in_a_pause_are_exact_and_leave_no_trace(method: str) -> None:
    trained, twin = made(method), made(method)
    for step in range(12):
        if step in (0, 3, 7):
            before, given = states(trained), gradients(1000 + step)
            with trained.paused():
                results = trained.allreduce_many(given)
                assert all(np.allclose(results[0][n], (given[0][n] + given[1][n]) / 2, atol=1e-6) for n in SHAPES)
            assert not step or equal(states(trained), before)
        assert same_results(trained.allreduce_many(gradients(step)), twin.allreduce_many(gradients(step))), step
    assert equal(states(trained), states(twin))


@pytest.mark.parametrize("settings", [{"warmup": {"steps": 3}}, {"schedule": {"density": {"steps": {0: 0.3, 3: 0.1}}}}])
def test_stages_of_a_program_are_passed_once(settings: dict[str, Any]) -> None:
    trained, twin = made("topk", **settings), made("topk", **settings)
    for step in range(6):
        trained.allreduce_many(gradients(100 + step))
        trained.discard()
        with trained.paused():
            trained.allreduce_many(gradients(200 + step))
        assert same_results(trained.allreduce_many(gradients(step)), twin.allreduce_many(gradients(step)))
    assert equal(states(trained), states(twin))


def test_a_trigger_outlives_the_step_that_is_taken_back() -> None:
    trained, twin = made("gradiveq"), made("gradiveq")
    for step in range(8):
        for network in (trained, twin) if step == 5 else ():
            network.trigger()
        trained.allreduce_many(gradients(step)), twin.allreduce_many(gradients(step))
        if step == 5:
            trained.discard()
            assert all(state.triggers == 1 for rank in trained.ranks for state in rank.states.values())


def test_only_the_tensors_of_the_last_step_go_back() -> None:
    trained = made("topk")
    trained.allreduce_many(gradients(0))
    before = states(trained)
    trained.allreduce_many(gradients(1, ("a",)))
    trained.allreduce_many(gradients(2, ("d",)))
    kept = trained.residual("a", 0)
    trained.discard()
    assert np.array_equal(trained.residual("a", 0), kept)
    assert np.array_equal(trained.residual("d", 0).ravel(), before[0]["state"]["d"]["residual"])


def test_what_can_be_taken_back() -> None:
    network = made("topk")
    with pytest.raises(RuntimeError, match="no step to discard"):
        network.discard()
    network.allreduce_many(gradients(0))
    network.discard()
    with pytest.raises(RuntimeError, match="no step to discard"):
        network.discard()
    network.allreduce_many(gradients(0))
    before = states(network)
    bad = gradients(1)
    bad[1]["a"][3, 3] = np.nan
    network.allreduce_many(bad)
    network.discard()  # it has changed nothing
    assert equal(states(network), before)
    network.allreduce_many(gradients(1))
    network.ranks[0].load_state_dict(before[0])
    with pytest.raises(RuntimeError, match="no step to discard"):
        network.ranks[0].discard()


def test_a_discarded_gradient_does_not_come_back() -> None:
    """The case of a generative adversarial network: what is thrown away is not sent later, by error feedback."""
    network = Loopback("topk", 2, density=0.01, min_elements=0)
    for _ in range(20):
        network.allreduce([np.ones(1000, np.float32)] * 2, "w")
        network.discard()
    assert not network.residual("w", 0).any()


def test_gradients_in_a_pause_are_not_clipped() -> None:
    network = Loopback("topk", 2, density=0.5, min_elements=1, clip_norm=1.0)
    network.allreduce([np.ones(100, np.float32)] * 2, "w")
    norm = network.gradient_norm()
    with network.paused():
        assert np.array_equal(network.allreduce([np.ones(100, np.float32)] * 2, "w")[0], np.ones(100))
    assert network.gradient_norm() == norm


def test_momentum_of_updates_in_a_pause_decays() -> None:
    """An optimizer that uses gradients of a pause multiplies its buffer: what is taken back afterwards is less."""
    torch = pytest.importorskip("torch")
    from hvdcompress._torch.optimizers import TorchReader

    def trained(pauses: bool, momentum: str) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(2000))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        network = Loopback("topk", 1, density=1.0, min_elements=0, optimizer_momentum=momentum)
        network.ranks[0].optimizer = TorchReader(optimizer, {"w": [parameter]})
        for step in range(6):
            if step in (2, 4) and pauses:
                with network.paused():
                    (zero,) = network.allreduce([np.zeros(2000, np.float32)], "w")
                assert not zero.any(), "in a pause gradients are as they are"
                parameter.grad = torch.as_tensor(zero)
                optimizer.step()
            (given,) = network.allreduce([gradients(step, ("d",))[0]["d"][:2000]], "w")
            parameter.grad = torch.as_tensor(given)
            optimizer.step()
        return optimizer.state[parameter]["momentum_buffer"], gradients(5, ("d",))[0]["d"][:2000] / (1 - 0.9)

    for pauses in (False, True):
        buffer, last = trained(pauses, "cancel")
        assert np.allclose(buffer.numpy(), last, rtol=1e-3, atol=1e-3), "it contains the last gradient alone"


def test_the_pause_is_a_setting_that_ranks_compare() -> None:
    from hvdcompress.engine.agreement import SharedConfig
    from hvdcompress.engine.step import Step

    network = made("topk")
    running = Step(network.ranks[0], None, SharedConfig({}, {}))  # type: ignore[arg-type]
    with network.paused():
        paused = Step(network.ranks[0], None, SharedConfig({}, {}))  # type: ignore[arg-type]
    assert running.status().state != paused.status().state and paused.config.plan == {"paused": True}


def test_the_plan_is_as_it_was() -> None:
    network = made("topk")
    with network.paused():
        network.allreduce_many(gradients(0))
    assert network.plan == hvdcompress.load({"method": "topk", "min_elements": 20})
