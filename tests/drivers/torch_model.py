"""What the cases of the torch driver share: a model whose gradients are chosen, and comparisons with loopback."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from doors.torch import backward
from harness import heavy_tailed

from hvdcompress.loopback import Loopback
from hvdcompress.torch import Compressor

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


def assert_close(got: dict, want: dict, exact: bool, what: str) -> None:
    for name in want:
        if exact:
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{what}, {name}")
        else:  # ranks are summed in another order than loopback's
            scale = np.abs(want[name]).max() + 1e-30
            np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=4e-7 * scale, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    everyone = hvd.allgather_object({name: array.tobytes() for name, array in arrays.items()})
    for name in arrays:
        assert len({one[name] for one in everyone}) == 1, f"{what}: ranks differ in {name}"


def against_loopback(prefix: str, method: str, steps: int, **options) -> None:
    """Reduce by Horovod and by loopback, from the same gradients, with options of the stock optimizer."""
    params = parameters(prefix)
    opt = optimizer(params, Compressor(method, params.items()), **options)
    net = Loopback(method, world=hvd.size())
    for step in range(steps):
        everyone = [gradients(params, step, rank) for rank in range(hvd.size())]
        got = reduce_once(opt, params, everyone[hvd.rank()])
        assert_close(got, net.allreduce_many(everyone)[0], False, f"{method} step {step}")
        assert_same_on_all_ranks(got, f"{method} step {step}")
