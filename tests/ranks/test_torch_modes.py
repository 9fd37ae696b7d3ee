"""Modes of PyTorch that a program sets, in which it calls a Compressor or LocalSteps, do not change the training."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from hvdcompress.local_steps import LocalSteps
from tests.ranks.checks import FOLDER

pytestmark = pytest.mark.drivers("torch", "ddp")


@contextmanager
def setting(change, value, before):
    change(value)
    yield
    change(before)


MODES = {
    "inference": torch.inference_mode,
    "device": partial(torch.device, "meta"),
    "dtype": partial(setting, torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": partial(setting, torch.use_deterministic_algorithms, True, False),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", ["inference", "device", "dtype", "deterministic", "autocast"])
def test_state_is_saved_and_loaded_in_any_mode(driver, mode):
    settings, shapes, folder = {"density": 0.1, "min_elements": 1}, {"w": (30, 40), "b": (40,)}, FOLDER / f"mode-{mode}"
    handle, plain = (driver.make("topk", settings, shapes) for _ in range(2))
    for step in range(3):
        given = driver.gradients(step, shapes)
        got, want = handle.reduce(given), plain.reduce(given)
        assert all((got[name] == want[name]).all() for name in shapes)
        with MODES[mode]():
            assert all(torch.equal(*(each.compressor.residual(name) for each in (handle, plain))) for name in shapes)
            handle.compressor.load_state_dict(handle.compressor.state_dict())
            handle.compressor.save(folder)
        driver.meet()
        with MODES[mode]():
            handle.compressor.load(folder)
        driver.meet()


@pytest.mark.parametrize("mode", ["inference", "device", "dtype"])
@pytest.mark.parametrize("call", ["init", "step", "synchronize", "load"])
def test_local_steps_are_taken_in_any_mode(driver, mode, call):
    results = []
    for one in (MODES[mode], lambda: torch.enable_grad()):
        mode_of = lambda name, one=one: one() if name == call else torch.enable_grad()  # noqa: E731
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 40)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with mode_of("init"):
            local = LocalSteps(model, sgd, every=2, method="topk", density=0.1, min_elements=1)
        for step in range(6):
            model(torch.full((2, 20), step + driver.rank + 1.0)).square().mean().backward()
            sgd.step()
            with mode_of("step"):
                local.step()
            with mode_of("synchronize"):
                if step == 2:
                    local.synchronize()
        local.save(FOLDER / f"local-{mode}-{call}")
        driver.meet()
        with mode_of("load"):
            local.load(FOLDER / f"local-{mode}-{call}")
        local.synchronize()
        local.close()
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("ops", ["auto", "torch"])
def test_inference_tensors_are_averaged(driver, ops):
    if driver.name == "ddp":
        from hvdcompress.ddp import Compressor
    else:
        from hvdcompress.horovod.torch import Compressor
    compressor = Compressor("topk", [("w", torch.nn.Parameter(torch.zeros(30, 40)))], density=1.0, backend=ops)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            tensor = torch.full((30, 40), driver.rank + 1.0)
            compressor.allreduce({"w": tensor}, out={"w": tensor})
        assert (tensor == (driver.world_size + 1) / 2).all()


def compressor_of(driver, parameters, **settings):
    """Return a Compressor that belongs to no optimizer and to no model."""
    if driver.name == "ddp":
        from hvdcompress.ddp import Compressor
    else:
        from hvdcompress.horovod.torch import Compressor
    return Compressor("topk", parameters, density=1.0, min_elements=1, **settings)


def test_allreduce_returns_new_tensors_or_those_of_out(driver):
    parameters = {name: torch.nn.Parameter(torch.zeros(3, 4)) for name in "ab"}
    total = driver.world_size * (driver.world_size + 1) / 2
    with compressor_of(driver, parameters) as compressor:
        given = {name: torch.full((3, 4), driver.rank + 1.0) for name in "ab"}
        averages = compressor.allreduce(given)
        assert all((each == driver.rank + 1.0).all() for each in given.values())
        assert all((averages[name] == total / driver.world_size).all() for name in "ab")
        out = {name: torch.empty(3, 4) for name in "ab"}
        assert compressor.allreduce(given, op="sum", out=out)["a"] is out["a"]
        assert all((out[name] == total).all() for name in "ab")
        wrong = {"a": torch.empty(3, 4), "b": torch.empty(4) if driver.rank else torch.empty(3, 4)}
        driver.must_raise(Exception, ["out['b']"], lambda: compressor.allreduce(given, out=wrong), same=False)
    with compressor_of(driver, {"w": torch.nn.Parameter(torch.zeros(5))}) as one:
        assert (one.allreduce(torch.full((5,), driver.rank + 1.0), name="w", op="sum") == total).all()
        driver.must_raise(TypeError, ["name"], lambda: one.allreduce(torch.zeros(5)))
