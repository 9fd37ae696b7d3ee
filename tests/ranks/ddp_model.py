"""Shared by the tests of DDP: backward passes with given gradients, and comparisons with the loopback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.loopback import Loopback
from tests.ranks.checks import assert_close, assert_same_on_all_ranks, summed
from tests.ranks.drivers.base import Arrays, Shapes
from tests.ranks.drivers.ddp import DdpDriver

SHAPES = DdpDriver.shapes


def backward(model: DistributedDataParallel, gradients: Arrays) -> Arrays:
    """Run a backward pass with these gradients.

    Returns:
        the reduced gradients of the parameters that have one; complex numbers as pairs.
    """
    model.zero_grad()
    model(gradients).backward()
    found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    return {name: (torch.view_as_real(g) if g.is_complex() else g).numpy().copy() for name, g in found.items()}


def assert_equals_loopback(
    driver: DdpDriver,
    model: DistributedDataParallel,
    method: str = "topk",
    shapes: Shapes = SHAPES,
    dtypes: Mapping = {},
    tolerances: Mapping = {},
    **settings: Any,
) -> ddp.Compressor:
    """Check that DDP and the loopback reduce the same gradients to the same numbers, in three steps.

    Args:
        driver: the driver on this rank.
        model: a model that takes gradients of these shapes.
        method: a method's id.
        shapes: shapes by name.
        dtypes: dtypes other than float32, by name.
        tolerances: tolerances that are larger than a sum's, by name.
        **settings: hyper-parameters and plan keys.
    """
    compressor = ddp.attach(model, method, **settings)
    net = Loopback(method, world_size=driver.world_size, **settings)
    for step in range(3):
        everyone = [
            {name: array.astype(dtypes.get(name, np.float32)) for name, array in one.items()}
            for one in driver.everyone(step, shapes)
        ]
        got, want = backward(model, everyone[driver.rank]), net.allreduce(everyone)[driver.rank]
        assert got.keys() == want.keys()
        for name, array in want.items():
            tolerance = tolerances.get(name, summed(driver.world_size))
            assert_close({name: got[name]}, {name: array}, tolerance, f"{method}, step {step}")
        assert_same_on_all_ranks(got, driver.gather, method)
    compressor.close()
    return compressor


def wrapped(net: torch.nn.Module, by_hook: bool = False) -> tuple[DistributedDataParallel, ddp.Compressor]:
    """Wrap a net and compress it with top-k: with ``ddp.attach``, or with the hook that a trainer registers itself."""
    if not by_hook:
        model = DistributedDataParallel(net)
        return model, ddp.attach(model, "topk", density=0.05)
    compressor, hook = ddp.hook(net, "topk", density=0.05)
    model = DistributedDataParallel(net)
    model.register_comm_hook(compressor, hook)
    return model, compressor
