"""Shared by the tests of the PyTorch driver: gradients that we choose, and comparisons with the loopback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdcompress.horovod.torch import Compressor
from hvdcompress.loopback import Loopback
from tests.ranks.checks import assert_close, heavy_tailed, summed
from tests.ranks.drivers.torch import backward
from tests.ranks.torch_ranks import assert_same_on_all_ranks

SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (5,), "d": (1,), "e": (8, 131)}

Parameters = dict[str, torch.nn.Parameter]


def parameters(prefix: str, shapes: Mapping = SHAPES) -> Parameters:
    """Return parameters of these shapes; their names begin with ``prefix``."""
    return {f"{prefix}.{name}": torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def gradients(params: Parameters, step: int, rank: int | None = None) -> dict[str, np.ndarray]:
    """Return the gradients of a rank, by default of this one."""
    shapes = {name: tuple(parameter.shape) for name, parameter in params.items()}
    return heavy_tailed(shapes, step, hvd.rank() if rank is None else rank)


def optimizer(params: Parameters, comp: Compressor, **options: Any) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=list(params.items()), compression=comp, **options)


def reduce_once(opts: Any, params: Parameters, grads: Mapping, names: list[str] | None = None) -> dict[str, np.ndarray]:
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
    params: Parameters,
    method: str = "topk",
    unused: Callable[[int, int], Sequence[str]] = lambda step, rank: (),
    tolerance: tuple[float, float] | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Compressor:
    """Check that Horovod and the loopback reduce the same gradients to the same numbers, in three steps.

    Args:
        params: the parameters; gradients of the frozen ones are not reduced.
        method: a method's id.
        unused: the names of the parameters without a gradient, by step and rank.
        tolerance: by default that of a sum.
        options: options of the stock optimizer.
        **settings: hyper-parameters and plan keys.
    """
    comp = Compressor(method, params.items(), **settings)
    opt = optimizer(params, comp, **(options or {}))
    net = Loopback(method, world_size=hvd.size(), **settings)
    trained = {name: parameter for name, parameter in params.items() if parameter.requires_grad}
    for step in range(3):
        everyone = [gradients(trained, step, rank) for rank in range(hvd.size())]
        for rank, grads in enumerate(everyone):
            for name in unused(step, rank):
                grads[name][...] = 0
        names = [name for name in trained if name not in unused(step, hvd.rank())]
        got = reduce_once(opt, params, everyone[hvd.rank()], names)
        assert_close(got, net.allreduce_many(everyone)[0], tolerance or summed(hvd.size()), f"{method}, step {step}")
        assert_same_on_all_ranks(got, f"{method}, step {step}")
    return comp
