"""Give PyTorch gradients to the engine as flat vectors: views, or copies where the dtype or layout differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import hvdcompress.ops
from hvdcompress.engine.agreement import checksum, shared_slots
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Framework, Step
from hvdcompress.plan import Bucket

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TorchFramework(Framework):
    """The engine's access to the gradients of one Compressor.

    Args:
        force_torch: use PyTorch's array ops for all gradients, instead of the numpy core on the CPU and Triton on
            CUDA.
        parameters: the parameters by name.

    Attributes:
        parameters: all parameters of the model by name, in its order; also those that are not exchanged, if the driver
            knows them.
    """

    def __init__(self, force_torch: bool, parameters: Mapping[str, torch.nn.Parameter]):
        self.force_torch = force_torch
        self.parameters = parameters
        # Of this step, by bucket name: (gradient, its copy of another dtype or layout, which receives the result)
        self._copies: dict[str, list[tuple[torch.Tensor, Any]]] = {}

    def begin(self) -> None:
        """Begin a step: drop the copies of the last one."""
        self._copies.clear()

    def ops(self, like: Any) -> Any:
        """Return the array ops for a vector that :meth:`flat` or :meth:`vector` returned."""
        if isinstance(like, np.ndarray):
            return hvdcompress.ops.fast
        if like.is_cuda and not self.force_torch:
            return hvdcompress.ops.cuda
        from hvdcompress.ops.torch import ops

        return ops

    def flat(self, gradient: torch.Tensor) -> Any:
        """Return a gradient as a flat numpy array or tensor [n]; a view if the gradient is contiguous."""
        flat = gradient.detach().reshape(-1)
        return flat if self.force_torch or flat.device.type != "cpu" else flat.numpy()

    def concatenated(self, parts: Sequence[Any]) -> Any:
        """Concatenate arrays of any library and device into a new vector, as :meth:`flat` returns for a parameter."""
        device = next(iter(self.parameters.values())).device
        return self.flat(torch.cat([torch.as_tensor(part, device=device).reshape(-1) for part in parts]))

    def vector(self, step: Step, bucket: Bucket, gradient: torch.Tensor) -> Any:
        """Return a gradient as the vector for :meth:`Step.add`, which the engine overwrites with the result.

        The vector is a view if the gradient is contiguous and has the bucket's working dtype. Otherwise it is a copy,
        and :meth:`store` copies the result back. So is that of an inference tensor, which cannot be written to here.

        Args:
            step: the open step.
            bucket: the bucket of the gradient.
            gradient: the gradient; any shape and dtype.
        """
        name = bucket.spec.name
        exchange = step.exchanges.get(name)
        dtype = exchange.dtype if exchange else step.rank_state.next_step(bucket).dtype
        if gradient.dtype == DTYPES[dtype] and gradient.is_contiguous() and not gradient.is_inference():
            return self.flat(gradient)
        flat = self.flat(gradient.to(DTYPES[dtype], copy=True).contiguous())
        self._copies.setdefault(name, []).append((gradient, flat))
        return flat

    def store(self, name: str) -> None:
        """Copy the results of a bucket into the gradients, where :meth:`vector` returned a copy."""
        for gradient, flat in self._copies.get(name, ()):
            with torch.inference_mode(gradient.is_inference()):
                gradient.detach().copy_(torch.as_tensor(flat, device=gradient.device).view(gradient.shape))

    def checksums(self, local: RankState) -> dict[str, int]:
        """Return checksums of all parameters, including frozen ones, in the model's order, and of the shared state."""
        checksums = {}
        for name, parameter in self.parameters.items():
            memory = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
            checksums[f"parameter {name!r}"] = checksum(memory.cpu().numpy())
        return checksums | shared_slots(local.states.values(), to_host)


def to_host(array: Any) -> Any:
    """Return a tensor or array as a numpy array in host memory."""
    return torch.as_tensor(array, device="cpu").numpy()
