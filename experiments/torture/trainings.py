"""One small training under each driver: parameters with chosen gradients, a Compressor, and the driver's own optimizer.

A framework is imported where its training is made.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["SHAPES", "Training", "gradients", "of"]

Arrays = dict[str, np.ndarray[Any, Any]]
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Shapes = {"w": (48, 64), "b": (64,), "v": (32, 48)}
RATE = 0.1  #: the learning rate


def gradients(seed: int, rank: int, step: int, parameters: Arrays) -> Arrays:
    """A rank's gradients: towards a target of its own, with noise. Parameters that differ are seen in what follows."""
    rng = np.random.default_rng([seed, rank, step])
    return {
        name: (0.1 * (array - rank) + rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in sorted(parameters.items())
    }


class Training(ABC):
    """A training on this rank. Making one joins the ranks; :meth:`begin` makes parameters and Compressor."""

    rank: int
    world_size: int
    compressor: Any
    lost: tuple[type[Exception], ...] = ()  #: errors after which no step can succeed, as a peer is gone
    by_tensor = False  #: a NaN undoes its tensor's exchange alone, and the others' results are to be used

    @abstractmethod
    def begin(self, shapes: Shapes, method: str, settings: dict[str, Any]) -> None:
        """Make parameters, all 0, in this order, and a Compressor."""

    @abstractmethod
    def reduce(self, given: Arrays) -> Arrays:
        """Average this rank's gradients with the others'."""

    @abstractmethod
    def update(self, reduced: Arrays) -> None:
        """Let the optimizer take a step; ``reduced``: what :meth:`reduce` returned, less what is not finite."""

    @abstractmethod
    def parameters(self) -> Arrays:
        """Copies of the parameters."""

    def optimizer_class(self) -> type:
        """The class whose ``step`` is the optimizer's."""
        import torch

        return torch.optim.SGD


class Mpi(Training):
    """Numpy arrays, and an optimizer in one line."""

    def __init__(self) -> None:
        import hvdcompress.mpi  # before mpi4py, whose environment it sets

        from mpi4py import MPI  # isort: skip

        self.module, self.rank, self.world_size = hvdcompress.mpi, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def begin(self, shapes: Shapes, method: str, settings: dict[str, Any]) -> None:
        """As :class:`Training` says."""
        self.arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.compressor = self.module.Compressor(method, **settings)

    def reduce(self, given: Arrays) -> Arrays:
        """As :class:`Training` says."""
        return self.compressor.allreduce_many({name: given[name] for name in self.arrays})

    def update(self, reduced: Arrays) -> None:
        """As :class:`Training` says."""
        self.step(reduced)

    def step(self, reduced: Arrays) -> None:
        """The optimizer."""
        for name, array in self.arrays.items():
            array -= np.float32(RATE) * reduced[name]

    def parameters(self) -> Arrays:
        """As :class:`Training` says."""
        return {name: array.copy() for name, array in self.arrays.items()}

    def optimizer_class(self) -> type:
        """As :class:`Training` says."""
        return Mpi


class _Torch(Training):
    """What the two drivers of PyTorch have in common."""

    def _module(self, shapes: Shapes) -> Any:
        import torch

        torch.set_num_threads(1)

        class Net(torch.nn.Module):
            """A loss whose derivatives are what it is called with."""

            def __init__(self) -> None:
                super().__init__()
                for name, shape in shapes.items():
                    self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

            def forward(self, given: Arrays) -> Any:
                pairs = ((one, torch.from_numpy(given[name])) for name, one in self.named_parameters())
                return sum((one * gradient).sum() for one, gradient in pairs)

        self.net = Net()
        return self.net

    def _gradients(self) -> Arrays:
        return {name: one.grad.numpy().copy() for name, one in self.net.named_parameters()}

    def parameters(self) -> Arrays:
        """As :class:`Training` says."""
        return {name: one.detach().numpy().copy() for name, one in self.net.named_parameters()}


class Ddp(_Torch):
    """PyTorch's DistributedDataParallel."""

    def __init__(self) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        from hvdcompress import ddp

        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.lost = (ddp.PeerLost,)

    def begin(self, shapes: Shapes, method: str, settings: dict[str, Any]) -> None:
        """As :class:`Training` says."""
        import torch

        from hvdcompress import ddp

        self.model = torch.nn.parallel.DistributedDataParallel(self._module(shapes), bucket_cap_mb=0.01)
        self.compressor = ddp.attach(self.model, method, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def reduce(self, given: Arrays) -> Arrays:
        """As :class:`Training` says."""
        self.optimizer.zero_grad()
        self.model(given).backward()
        return self._gradients()

    def update(self, reduced: Arrays) -> None:
        """As :class:`Training` says."""
        self.optimizer.step()


class Torch(_Torch):
    """Horovod's optimizer for PyTorch."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank, self.world_size = hvd, hvd.rank(), hvd.size()

    def begin(self, shapes: Shapes, method: str, settings: dict[str, Any]) -> None:
        """As :class:`Training` says."""
        import torch

        from hvdcompress.horovod.torch import Compressor

        model = self._module(shapes)
        self.compressor = Compressor(method, model.named_parameters(), **settings)
        self.optimizer = self.hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE),
            named_parameters=model.named_parameters(),
            compression=self.compressor,
        )

    def reduce(self, given: Arrays) -> Arrays:
        """As :class:`Training` says."""
        self.optimizer.zero_grad()
        self.net(given).backward()
        self.optimizer.synchronize()
        return self._gradients()

    def update(self, reduced: Arrays) -> None:
        """As :class:`Training` says."""
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


class TensorFlow(Training):
    """Horovod's tape for TensorFlow, in a graph."""

    by_tensor = True

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import horovod.tensorflow as hvd

        hvd.init()
        self.hvd, self.rank, self.world_size = hvd, hvd.rank(), hvd.size()

    def begin(self, shapes: Shapes, method: str, settings: dict[str, Any]) -> None:
        """As :class:`Training` says."""
        import tensorflow as tf

        from hvdcompress.horovod.tensorflow import Compressor

        self.compressor = Compressor(method, names=list(shapes), **settings)
        self.variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in shapes.items()}
        variables = list(self.variables.values())

        @tf.function
        def reduced(given: list[Any]) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, given, strict=True)])
            tape = self.hvd.DistributedGradientTape(tape, compression=self.compressor)
            return tape.gradient(loss, variables)

        self.graph = reduced

    def reduce(self, given: Arrays) -> Arrays:
        """As :class:`Training` says."""
        import tensorflow as tf

        out = self.graph([tf.constant(given[name]) for name in self.variables])
        return {name: array.numpy() for name, array in zip(self.variables, out, strict=True)}

    def update(self, reduced: Arrays) -> None:
        """As :class:`Training` says."""
        self.step(reduced)

    def step(self, reduced: Arrays) -> None:
        """The optimizer."""
        for name, array in reduced.items():
            self.variables[name].assign_sub(RATE * array)

    def parameters(self) -> Arrays:
        """As :class:`Training` says."""
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def optimizer_class(self) -> type:
        """As :class:`Training` says."""
        return TensorFlow


def of(driver: str) -> Training:
    """The training of a driver, on this rank."""
    classes: dict[str, type[Training]] = {"mpi": Mpi, "ddp": Ddp, "torch": Torch, "tensorflow": TensorFlow}
    return classes[driver]()
