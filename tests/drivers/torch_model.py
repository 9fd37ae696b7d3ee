"""What the cases of the torch driver share: a model whose gradients are chosen, and comparisons with loopback."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from harness import heavy_tailed

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.torch import Compressor

SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (5,), "d": (1,), "e": (8, 131)}

# (method, hyper-parameters): every method, and options that change its choreography
VARIANTS = [
    ("none", {}),
    ("fp16", {}),
    ("bf16", {}),
    ("fp16", {"feedback": "plain"}),
    ("topk", {"density": 0.02}),
    ("topk", {"density": 0.5, "values": "fp16"}),
    ("randomk", {"density": 0.02}),
    ("randomk", {"density": 0.05, "values": "bf16"}),
    ("scalecom", {"density": 0.01, "beta": 0.3}),
    ("scalecom", {"density": 0.02, "select": "exact", "values": "fp16"}),
    ("scalecom", {"density": 0.02, "values": "bf16"}),
    ("gaussiank", {"density": 0.02}),
    ("gaussiank", {"density": 0.02, "refine": "paper", "values": "bf16"}),
    ("gaussiank", {"density": 0.01, "scope": "global", "min_elements": 1}),
    ("topk", {"density": 0.05, "bucket_elements": 1200, "min_elements": 1}),
    ("topk", {"density": 0.05, "warmup": {"steps": 2}, "schedule": {"density": {"steps": {4: 0.01}}}}),
    ("topk", {"density": 0.05, "values": "qsgd4"}),
    ("topk", {"density": 0.05, "feedback": "momentum"}),
    ("randomk", {"density": 0.05, "values": "rangefloat8"}),
    ("scalecom", {"density": 0.05, "values": "qsgd8"}),
    ("fft", {}),
    ("fft", {"feedback": "plain", "order": "filters", "block": 64}),
    ("qsgd", {}),
    ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
    ("terngrad", {}),
    ("terngrad", {"clip_factor": 0.0, "route": "scatter"}),
    ("terngrad", {"route": "gather"}),
    ("signsgd", {}),
    ("signsgd", {"route": "scatter"}),
    ("gtopk", {"density": 0.02}),
    ("gtopk", {"density": 0.02, "values": "fp16"}),
    ("dgc", {"density": 0.02}),
    ("dgc", {"density": 0.02, "clip_norm": 1.0, "select": "exact"}),
    ("powersgd", {}),
    ("powersgd", {"matrix_rank": 1, "values": "bf16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "feedback": "plain"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 3, "tensors": "all", "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "values": "qsgd8", "dense_values": "qsgd4"}),
]


# -- a model whose gradients we choose -------------------------------------------------------------


def parameters(prefix: str, dtype: torch.dtype = torch.float32, shapes: dict = SHAPES) -> dict[str, torch.nn.Parameter]:
    return {f"{prefix}.{name}": torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def gradients(params: dict[str, torch.nn.Parameter], step: int, rank: int) -> dict[str, np.ndarray]:
    return heavy_tailed({name: tuple(parameter.shape) for name, parameter in params.items()}, step, rank)


def backward(params: dict, grads: dict[str, np.ndarray], names: list[str] | None = None) -> None:
    """A backward pass that gives each parameter exactly these gradients, hooks firing in the order of ``names``."""
    loss = torch.zeros((), dtype=torch.float64)
    for name in names or list(params):
        loss = loss + (params[name].double() * torch.from_numpy(grads[name]).double()).sum()
    loss.backward()


def optimizer(params: dict[str, torch.nn.Parameter], comp: Compressor, **options) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=list(params.items()), compression=comp, **options)


def reduce_once(opt, params, grads, names=None) -> dict[str, np.ndarray]:
    opt.zero_grad(set_to_none=True) if hvd.size() == 1 else [setattr(p, "grad", None) for p in params.values()]
    backward(params, grads, names)
    opt.synchronize()
    return {name: p.grad.detach().float().contiguous().numpy().copy() for name, p in params.items()}


def assert_close(got: dict, want: dict, exact: bool, what: str, loose: float = 1.0) -> None:
    for name in want:
        if exact:
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{what}, {name}")
        else:  # ranks are summed in another order than loopback's
            scale = np.abs(want[name]).max() + 1e-30
            rtol, atol = 2e-6 * loose, 4e-7 * loose * scale
            np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    everyone = hvd.allgather_object({name: array.tobytes() for name, array in arrays.items()})
    for name in arrays:
        assert len({one[name] for one in everyone}) == 1, f"{what}: ranks differ in {name}"


def against_loopback(prefix: str, method: str, settings: dict, op=hvd.Average, steps: int = 6, **options) -> None:
    """Reduce by Horovod and by loopback, from the same gradients; compare results, residuals and bytes."""
    world, rank = hvd.size(), hvd.rank()
    params = parameters(prefix)
    comp = Compressor(method, params.items(), **settings)
    opt = optimizer(params, comp, op=op, **options)
    net = Loopback(method, world=world, **settings)
    names = list(params) if rank % 2 == 0 else list(params)[::-1]  # hooks fire in opposite orders
    for step in range(steps):
        everyone = [gradients(params, step, r) for r in range(world)]
        got = reduce_once(opt, params, everyone[rank], names)
        want = net.allreduce_many(everyone, op="sum" if op == hvd.Sum else "average")[rank]
        # a half-precision sum depends on the order of ranks far more than a float32 one
        exact = world == 2 or method in ("topk", "gaussiank", "bf16") and settings.get("min_elements") == 1
        if not (world > 2 and "fp16" in (method, settings.get("values"))):
            # what the order of a sum changes in its last bit, a matrix product and feedback make more of
            loose = 1.0 if hvdcompress.get(method).exact else 100.0
            assert_close(got, want, exact and not options, f"{method} {settings} step {step}", loose)
        assert_same_on_all_ranks(got, f"{method} {settings} step {step}")
    for name in params:
        if world == 2:
            want = net.residual(name, rank)
            np.testing.assert_array_equal(comp.residual(name).numpy(), want, err_msg=f"{method} {name}")
    # beyond loopback's bytes: a probe of 8 bytes for each parameter, and per step a status of 56
    extra = steps * (8 * len(params) + 56)
    assert comp.ledger.bytes_sent() == net.ledger.bytes_sent(rank) + extra, (method, settings)
