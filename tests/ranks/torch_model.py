"""Shared by the tests of Horovod for PyTorch: steps with given gradients, and comparisons with the loopback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvdcompress.horovod.torch import Compressor
from hvdcompress.loopback import Loopback
from tests.ranks.drivers.base import Arrays, Shapes
from tests.ranks.drivers.torch import TorchDriver, backward
from tests.ranks.reduced import assert_reduced

SHAPES = TorchDriver.shapes

Parameters = dict[str, torch.nn.Parameter]

_numbers = itertools.count()


def parameters(shapes: Shapes = SHAPES) -> Parameters:
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def optimizer(params: Parameters, comp: Compressor, **options: Any) -> torch.optim.Optimizer:
    """Return a stock optimizer. Its names are used only once: a step that fails leaves collectives of its names."""
    number = next(_numbers)
    named = [(f"test{number}.{name}", parameter) for name, parameter in params.items()]
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=named, compression=comp, **options)


def reduce_once(opts: Any, params: Parameters, grads: Mapping, names: list[str] | None = None) -> Arrays:
    """Return the gradients that an optimizer or several have reduced.

    ``names``: of the parameters to which the backward pass gives gradients, in order.
    """
    for parameter in params.values():
        parameter.grad = None
    backward(params, grads, names)
    for opt in opts if isinstance(opts, list) else [opts]:
        opt.synchronize()
    return {name: p.grad.numpy().copy() for name, p in params.items() if p.grad is not None}


def assert_equals_loopback(
    driver: TorchDriver,
    params: Parameters,
    method: str = "topk",
    unused: Callable[[int, int], Sequence[str]] = lambda step, rank: (),
    tolerance: tuple[float, float] | None = None,
    options: Mapping[str, Any] = {},
    **settings: Any,
) -> Compressor:
    """Check that Horovod and the loopback reduce the same gradients to the same numbers, in three steps.

    Args:
        driver: the driver on this rank.
        params: the parameters; gradients of the frozen ones are not reduced.
        method: a method's id.
        unused: the names of the parameters without a gradient, by step and rank.
        tolerance: by default that of a sum.
        options: options of the stock optimizer.
        **settings: hyper-parameters and plan keys.
    """
    comp = Compressor(method, params.items(), **settings)
    opt = optimizer(params, comp, **options)
    net = Loopback(method, world_size=driver.world_size, **settings)
    shapes = {name: tuple(parameter.shape) for name, parameter in params.items() if parameter.requires_grad}
    for step in range(3):
        everyone = driver.everyone(step, shapes)
        for rank, grads in enumerate(everyone):
            for name in unused(step, rank):
                grads[name][...] = 0
        names = [name for name in shapes if name not in unused(step, driver.rank)]
        got = reduce_once(opt, params, everyone[driver.rank], names)
        assert_reduced(driver, got, net, everyone, f"{method}, step {step}", tolerance)
    return comp
