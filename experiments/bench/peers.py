"""What a method's time is held against: the same work by other libraries, and the bare operations that it is made of.

Each takes a rank's gradient [n], as the method does. What other packages do is written here after what they published,
in a few lines of PyTorch: the arithmetic of a step without network, hooks and buckets. What needs PyTorch is left out
where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.bench.devices import Cpu, Device
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.parts import select

__all__ = ["Peer", "peers_of"]


@dataclass(frozen=True)
class Peer:
    """Something that a method is held against.

    Attributes:
        name: what it is.
        call: does it to a gradient.
        at_most: how many times as long the method may take; None where nothing is demanded.
    """

    name: str
    call: Callable[[Array], Any]
    at_most: float | None = None


def peers_of(method: Method, spec: TensorSpec, world_size: int, device: Device) -> list[Peer]:
    """The peers of a method, for a tensor of two dimensions on a device; none for most methods."""
    make = MAKERS.get(method.id)
    return make(method, spec, world_size, device) if make else []


def _torch(device: Device) -> Any:
    """PyTorch, with one thread on the processor; None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    if isinstance(device, Cpu):
        torch.set_num_threads(1)
    return torch


def _on_tensors(torch: Any, call: Callable[[Any], Any]) -> Callable[[Array], Any]:
    """A function of tensors as one of the device's arrays, which share their memory."""
    return lambda x: call(torch.from_numpy(x) if isinstance(x, np.ndarray) else x)


def _topk(method: Any, spec: TensorSpec, world_size: int, device: Device) -> list[Peer]:
    n, torch = spec.size, _torch(device)
    k = select.num_kept(method.density, n)
    found = []
    if torch:
        found += [
            Peer("top-k as GRACE publishes it", _on_tensors(torch, grace_topk(torch, k, world_size))),
            Peer("torch.topk of |x|", _on_tensors(torch, lambda x: torch.topk(x.abs(), k, sorted=False))),
        ]
    if isinstance(device, Cpu):
        residual, out = device.empty(n), device.empty(n)
        found += [
            Peer("numpy.argpartition of |x|", lambda x: np.argpartition(np.abs(x), n - k)[n - k :]),
            Peer("numpy.argsort of |x|, stable", lambda x: np.argsort(np.abs(x), kind="stable")[n - k :]),
            Peer("numpy.add(x, residual, out)", lambda x: np.add(x, residual, out=out)),
        ]
    return found


def grace_topk(torch: Any, k: int, world_size: int) -> Callable[[Any], Any]:
    """Top-k with a residual memory, as in Xu et al., "GRACE: A Compressed Communication Framework for Distributed
    Machine Learning", ICDCS 2021, §4: compensate, compress, update the memory; then decompress what every rank sent,
    and add it up. Each of the ranks is taken to have sent the same.
    """  # noqa: D205
    residual = 0.0

    def dense(like: Any, index: Any, values: Any) -> Any:
        return torch.zeros_like(like).scatter_(0, index, values)

    def step(gradient: Any) -> Any:
        nonlocal residual
        x = gradient + residual
        index = torch.topk(x.abs(), k, sorted=False).indices
        values = torch.gather(x, 0, index)
        residual = x - dense(x, index, values)
        return sum(dense(x, index, values) for _ in range(world_size)) / world_size

    return step


def _halves(name: str) -> Callable[[Any, TensorSpec, int, Device], list[Peer]]:
    """Rounding to 16 bits and back, by PyTorch's conversions to a dtype of that name."""

    def make(method: Any, spec: TensorSpec, world_size: int, device: Device) -> list[Peer]:
        if not (torch := _torch(device)):
            return []
        dtype = getattr(torch, name)
        return [
            Peer(f"x.to(torch.{name})", _on_tensors(torch, lambda x: x.to(dtype))),
            Peer("the same, and back to float32", _on_tensors(torch, lambda x: x.to(dtype).to(torch.float32))),
        ]

    return make


def _fft(method: Any, spec: TensorSpec, world_size: int, device: Device) -> list[Peer]:
    block = method.block_length(spec.size)
    whole, found = spec.size // block * block, []
    if isinstance(device, Cpu):
        import scipy.fft

        def there_and_back(x: Any) -> Any:
            return scipy.fft.irfft(scipy.fft.rfft(x[:whole].reshape(-1, block)), block)

        found += [Peer("scipy.fft: rfft and irfft", there_and_back, 1.5)]
    if torch := _torch(device):
        fft = torch.fft
        call = _on_tensors(torch, lambda x: fft.irfft(fft.rfft(x[:whole].view(-1, block)), block))
        found += [Peer("torch.fft: rfft and irfft", call, None if found else 1.5)]
    return found


def _powersgd(method: Any, spec: TensorSpec, world_size: int, device: Device) -> list[Peer]:
    (rows, columns), rank, torch = method.matrix(spec), method.matrix_rank, _torch(device)
    random = np.random.default_rng(0)
    p, q = (device.array(random.standard_normal((rank, extent), np.float32)) for extent in (rows, columns))
    left, right, total = device.empty(rank * rows), device.empty(rank * columns), device.empty(spec.size)
    xp = np if isinstance(device, Cpu) else torch

    def products(x: Any) -> None:
        matrix = x.reshape(rows, columns)
        xp.matmul(q, matrix.T, out=left.reshape(rank, rows))
        xp.matmul(p, matrix, out=right.reshape(rank, columns))
        xp.matmul(p.T, q, out=total.reshape(rows, columns))

    found = [Peer(f"its three products, by {xp.__name__}", products, 1.3)]
    if torch:
        first = torch.as_tensor(q).T
        step = ddp_powersgd(torch, (rows, columns), first)
        found += [Peer("PowerSGD's arithmetic in DDP's hook", _on_tensors(torch, step))]
    return found


def ddp_powersgd(torch: Any, shape: tuple[int, int], q: Any) -> Callable[[Any], Any]:
    """A matrix's part in PyTorch's powerSGD_hook.py with error feedback and warm start: what it computes.

    Args:
        torch: the module.
        shape: rows and columns.
        q: the first right factor [columns × r].
    """
    error: Any = 0.0

    def step(gradient: Any) -> Any:
        nonlocal q, error
        x = gradient.view(shape) + error
        p = torch.linalg.qr(x @ q).Q
        q = x.t() @ p
        total = p @ q.t()
        error = x - total
        return total

    return step


Maker = Callable[[Any, TensorSpec, int, Device], list[Peer]]
MAKERS: dict[str, Maker] = {
    "topk": _topk,
    "fp16": _halves("float16"),
    "bf16": _halves("bfloat16"),
    "fft": _fft,
    "powersgd": _powersgd,
}
