"""Adapted and cancelled momentum in the loopback, compared with the equations of ``parts/momentum.py``.

``tests/unit/drivers/test_torch_optimizers.py`` compares the optimizers of PyTorch, and ``tests/ranks`` the drivers.
"""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.parts.momentum import MAX_WAIT, adapts, average, corrected_average, heavy_ball, shares


def expected_share(wait: int, momentum: float, spread: float) -> float:
    """Return the share of an element that was sent ``wait`` steps ago, by the module's formula."""
    w = min(wait * spread, 1.0 / (1.0 - momentum))
    return max(0.0, 1.0 - (1.0 - momentum**w) / (w * (1.0 - momentum)))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("settings", [{"bucket_elements": 1000}, {"bucket_elements": 0}], ids=["joined", "apart"])
def test_momentum_is_adapted_to_how_long_elements_waited(settings: dict[str, int], nesterov: bool) -> None:
    random = np.random.default_rng(0)
    size, momentum, names = 400, 0.9, "ab"
    net = Loopback("topk", world_size=3, density=0.05, min_elements=1, **settings)
    arrived = {name: np.zeros(size, int) for name in names}
    buffers = {name: np.zeros(size, np.float32) for name in names}
    plain = {name: np.zeros(size) for name in names}  # of the gradients that keep their momentum
    scales = np.geomspace(0.05, 1.0, size)
    for step in range(1, 26):
        given = [{name: (random.standard_normal(size) * scales).astype(np.float32) for name in names} for _ in range(3)]
        reduced = net.allreduce(given)[0]
        with net.adapted(buffers, reduced, momentum=momentum, nesterov=nesterov):
            for name, buffer in buffers.items():
                buffer[...] = momentum * buffer + reduced[name]
            moved = {name: reduced[name] + momentum * v if nesterov else v.copy() for name, v in buffers.items()}
        for name in names:
            s = reduced[name].astype(np.float64)
            counted = reduced.values() if settings["bucket_elements"] else [reduced[name]]
            sent = 3 * round(0.05 * size) * len(counted)
            spread = max(1.0, round(8 * 3 * sum(np.count_nonzero(each) for each in counted) / sent) / 8)
            share = np.array([expected_share(wait, momentum, spread) for wait in step - arrived[name]])
            arrived[name][s != 0] = step
            kept = (1.0 - share) * s
            plain[name] = momentum * plain[name] + kept
            want = (kept + momentum * plain[name] if nesterov else plain[name]) + share * s / (1.0 - momentum)
            np.testing.assert_allclose(moved[name], want, rtol=1e-4, atol=1e-5, err_msg=f"step {step}, {name}")
            np.testing.assert_allclose(buffers[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=f"step {step}, {name}")


def test_a_gradient_has_the_same_weight_at_once_as_over_all_steps() -> None:
    """The equation of every kind of optimizer, for methods with and without momentum of their own."""
    for moment in (
        *(heavy_ball(0.9, rate, nesterov) for rate in (1.0, 0.4, -0.01) for nesterov in (False, True)),
        *(average(0.8, nesterov) for nesterov in (False, True)),
        corrected_average(0.9, 1 - 0.9**3),
    ):
        total = moment.direct + moment.buffered * moment.rate / (1.0 - moment.decay)
        assert moment.at_once or total == pytest.approx(moment.weight)
        for own in (0.0, 0.6):
            options = {"feedback": "momentum", "momentum": own} if own else {}
            before, after = moment.changes(hvdcompress.get_method("topk", **options))
            in_buffer = moment.decay * before + moment.rate
            assert after == pytest.approx(in_buffer)
            assert moment.direct + moment.buffered * in_buffer == pytest.approx((1.0 - own) * moment.weight)


@pytest.mark.parametrize("id", ["powersgd", "signsgd"])
def test_methods_that_send_all_elements_have_one_share(id: str) -> None:
    method = hvdcompress.get_method(id)
    net = Loopback(method, world_size=2, min_elements=1)
    net.allreduce([np.ones((8, 8), np.float32)] * 2, name="w")
    (late,) = net.ranks[0].late.values()
    assert late.part(0) == (None, None)
    ones = np.ones(64, np.float32)
    assert late.values(ones, None, None, heavy_ball(0.9))[1] == pytest.approx(shares(0.9)[method.delay])
    assert late.values(ones, None, None, corrected_average(0.9, 0.5))[1] == 1.0


@pytest.mark.parametrize(
    "id,options,expected",
    [
        ("powersgd", {}, True),
        ("topk", {"optimizer_momentum": "keep"}, False),
        ("fft", {"feedback": "plain"}, False),  # it sends nearly all elements
        ("qsgd", {"feedback": "plain"}, False),
        ("qsgd", {"feedback": "plain", "optimizer_momentum": "cancel"}, True),
    ],
)
def test_methods_whose_momentum_is_adapted(id: str, options: dict, expected: bool) -> None:
    assert adapts(hvdcompress.get_method(id, **options)) == expected


def test_long_waits_do_not_wrap_around() -> None:
    """Stamps of steps repeat after 256: an element that has waited longer is still one that has waited long."""
    net = Loopback("topk", world_size=1, density=0.5, min_elements=1)
    for step in range(1, 400):
        net.allreduce([np.array([1.0, 0.0], np.float32)], name="w")  # the second element never arrives
        state = net.ranks[0].states["w"]
        assert min(step, MAX_WAIT) <= (state.step - state.arrived.astype(int))[1] % 256 < 128


def test_nothing_is_late_after_steps_that_are_undone_paused_or_not_finite() -> None:
    given = [np.ones(20, np.float32)] * 2
    net = Loopback("topk", world_size=2, density=0.5, min_elements=1)
    for spoil in ("discard", "pause", "nan"):
        net.allreduce(given, name="w")
        assert net.ranks[0].late
        if spoil == "discard":
            net.discard()
        elif spoil == "pause":
            with net.paused():
                net.allreduce(given, name="w")
        else:
            net.allreduce([given[0], given[1] * np.nan], name="w")
        assert not net.ranks[0].late, spoil


def test_a_step_that_fails_changes_no_buffer_and_wrong_buffers_are_refused() -> None:
    net = Loopback("topk", world_size=2, density=0.5, min_elements=1, optimizer_momentum="cancel")
    gradient = net.allreduce([np.arange(20, dtype=np.float32)] * 2, name="w")[0]
    buffer = np.ones(20, np.float32)
    with pytest.raises(KeyboardInterrupt), net.adapted({"w": buffer}, {"w": gradient}, momentum=0.9):
        raise KeyboardInterrupt
    np.testing.assert_allclose(buffer, 1.0, rtol=1e-5)
    for gradients, words in (({}, "no gradient"), ({"w": gradient[:7]}, "20 elements")):
        with pytest.raises(ValueError, match=words), net.adapted({"w": buffer}, gradients, momentum=0.9):
            pass
