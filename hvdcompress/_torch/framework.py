"""PyTorch's gradients as the engine's vectors, and back: views where possible, copies of dtype and layout elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import hvdcompress.ops
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.safety import verify
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Framework, Step
from hvdcompress.plan import Bucket

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TorchFramework(Framework):
    """The engine's view of one Compressor's gradients.

    Args:
        force_torch: use the array ops of PyTorch for all gradients, instead of the numpy core on the CPU and Triton on
            CUDA.
        parameters: returns all parameters, by name, in the order of the model.
    """

    def __init__(self, force_torch: bool, parameters: Callable[[], Mapping[str, torch.Tensor]]):
        self.force_torch = force_torch
        self._parameters = parameters
        # of the step under way, by bucket: gradients whose results are in another array, of another dtype or layout
        self._copies: dict[str, list[tuple[torch.Tensor, Any]]] = {}

    def begin(self) -> None:
        """Forget the copies of the last step."""
        self._copies.clear()

    def ops(self, like: Any) -> Any:
        """Return the array ops for a vector that :meth:`flat` or :meth:`vector` returned."""
        if isinstance(like, np.ndarray):
            return hvdcompress.ops.fast
        if like.is_cuda and not self.force_torch:
            return hvdcompress.ops.cuda
        import hvdcompress.ops.torch as torch_ops

        return torch_ops

    def flat(self, gradient: torch.Tensor) -> Any:
        """Return a gradient as a vector of the library that computes with it; a view where it is contiguous."""
        flat = gradient.detach().reshape(-1)
        return flat if self.force_torch or flat.device.type != "cpu" else flat.numpy()

    def vector(self, step: Step, bucket: Bucket, gradient: torch.Tensor) -> Any:
        """Return a gradient as the vector that :meth:`Step.add` takes; the result is written over it.

        It is a view where the gradient is contiguous and of the working dtype. Elsewhere it is a copy, and
        :meth:`store` brings the result back.
        """
        name = bucket.spec.name
        known = step.exchanges.get(name)
        dtype = known.setup.dtype if known else step.local.next_step(bucket).dtype
        if gradient.dtype == DTYPES[dtype] and gradient.is_contiguous():
            return self.flat(gradient)
        flat = self.flat(gradient.to(DTYPES[dtype]).contiguous())
        self._copies.setdefault(name, []).append((gradient, flat))
        return flat

    def store(self, exchange: Exchange) -> None:
        """Bring the results of an exchange into the gradients' memory, where they are not there already."""
        for gradient, flat in self._copies.get(exchange.name, ()):
            gradient.detach().copy_(torch.as_tensor(flat).view(gradient.shape))

    def checksums(self, local: RankState) -> dict[str, int]:
        """Return those of all parameters, frozen ones too, in the model's order, and of the shared state."""
        found = {}
        for name, parameter in self._parameters().items():
            memory = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
            found[f"parameter {name!r}"] = verify.checksum(memory.cpu().numpy())
        return found | local.checksums(to_host)


def to_host(array: Any) -> Any:
    """Return an array of any library as one of numpy, in host memory."""
    return torch.as_tensor(array).cpu().numpy()
