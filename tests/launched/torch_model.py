"""What the cases of the torch driver share: a model whose gradients are chosen, and comparisons with loopback."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from hvdcompress.horovod.torch import Compressor
from hvdcompress.loopback import Loopback
from tests import harness
from tests.harness import REORDERED, assert_close, heavy_tailed
from tests.promises.drivers.torch import backward

SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (5,), "d": (1,), "e": (8, 131)}

# -- a model whose gradients we choose -------------------------------------------------------------


def parameters(prefix: str, dtype: torch.dtype = torch.float32, shapes: dict = SHAPES) -> dict[str, torch.nn.Parameter]:
    return {f"{prefix}.{name}": torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def gradients(params: dict[str, torch.nn.Parameter], step: int, rank: int) -> dict[str, np.ndarray]:
    return heavy_tailed({name: tuple(parameter.shape) for name, parameter in params.items()}, step, rank)


def optimizer(params: dict[str, torch.nn.Parameter], comp: Compressor, **options) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=list(params.items()), compression=comp, **options)


def reduce_once(opt, params, grads, names=None) -> dict[str, np.ndarray]:
    for parameter in params.values():
        parameter.grad = None
    backward(params, grads, names)
    opt.synchronize()
    return {name: p.grad.detach().float().contiguous().numpy().copy() for name, p in params.items()}


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    harness.assert_same_on_all_ranks(arrays, hvd.allgather_object, what)


def against_loopback(prefix: str, method: str, steps: int, **options) -> None:
    """Reduce by Horovod and by loopback, from the same gradients, with options of the stock optimizer."""
    params = parameters(prefix)
    opt = optimizer(params, Compressor(method, params.items()), **options)
    net = Loopback(method, world_size=hvd.size())
    for step in range(steps):
        everyone = [gradients(params, step, rank) for rank in range(hvd.size())]
        got = reduce_once(opt, params, everyone[hvd.rank()])
        assert_close(got, net.allreduce_many(everyone)[0], REORDERED, f"{method} step {step}")
        assert_same_on_all_ranks(got, f"{method} step {step}")
