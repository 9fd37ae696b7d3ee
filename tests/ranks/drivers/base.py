"""The interface of a driver, as tests see it, and what all drivers have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.method import TensorSpec
from hvdcompress.plan import Grouping, Plan, plan_of
from hvdcompress.testing import Trial
from tests.ranks import checks
from tests.ranks.exchanges import Settings, sums_float16

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Counter:
    """Bytes of the arrays that a transport was given."""

    num_bytes: int = 0


def on_host(array: Any) -> np.ndarray:
    """A numpy array of a driver's array, which may be on a GPU."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def step_of(optimizer: Any, parameters: Mapping[str, Any], momentum: float) -> Arrays:
    """Take a step of a PyTorch optimizer, if the gradients are finite. Return by how much each tensor decreases."""
    if not all(parameter.grad.isfinite().all() for parameter in parameters.values()):
        return {name: parameter.grad.numpy() for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        group["momentum"] = momentum
    for parameter in parameters.values():
        parameter.data.zero_()
    optimizer.step()
    return {name: -parameter.detach().numpy() for name, parameter in parameters.items()}


class Handle(ABC):
    """A Compressor with its tensors, on this rank."""

    compressor: Any
    shapes: Shapes

    @abstractmethod
    def reduce(self, gradients: Arrays) -> Arrays:
        """Do a step: return the reduced gradients (of bfloat16 as float32) of this rank's, in the order given."""

    @abstractmethod
    def overhead(self, steps: int) -> dict[str, int]:
        """Return the bytes that the driver sends in addition to those of methods, by the ledger's names."""

    def lengths(self) -> dict[str, int]:
        """Return the bytes of lengths, sent before payloads where the network must know them, by the ledger's name."""
        told = self.compressor.ledger.tensors().get("lengths")
        if not told:
            return {}
        # an all-to-all has one for each rank; tests/unit/engine/test_collectives.py counts them
        has_pieces = self.compressor.plan.program.main.id == "oktopk"
        return {"lengths": told.sent if has_pieces else 8 * told.collectives}

    def unseen(self) -> set[str]:
        """Return the tensors whose gradients the framework hands to the transport itself: no observer sees them."""
        return set()

    def change(self, name: str) -> None:
        """Change one bit of a parameter on this rank alone."""
        raise NotImplementedError

    def sent(self) -> dict[str, int]:
        """Return the bytes sent by this rank, by the ledger's names."""
        return {name: entry.sent for name, entry in self.compressor.ledger.tensors().items() if entry.sent}

    def bytes_sent(self) -> int:
        return self.compressor.ledger.bytes_sent()

    def bytes_inside_node(self) -> int:
        """Return the bytes sent to other ranks of the node, with two levels."""
        return self.compressor.ledger.bytes_inside_node()

    def counters(self) -> dict[str, int]:
        return self.compressor.ledger.counters()

    def residual(self, name: str) -> np.ndarray:
        return on_host(self.compressor.residual(name))

    def state(self) -> dict[str, Any]:
        """Return ``state_dict()`` as plain data with NumPy arrays."""
        saved = checks.state_of(self.compressor)
        state = {name: {s: on_host(a) for s, a in slots.items()} for name, slots in saved["state"].items()}
        return {**saved, "state": state}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.compressor.load_state_dict(saved)

    def __getattr__(self, name: str) -> Any:
        """Return what the Compressor has: ``save``, ``load``, ``summary``, ``trigger``, ``discard`` …."""
        return getattr(self.compressor, name)

    def train(self, gradients: Arrays, momentum: float) -> Arrays:
        """Do a step of SGD with a rate of 1. Return by how much each tensor decreases.

        A step in which a gradient is not finite is skipped.
        """
        reduced = self.reduce(gradients)
        if not all(np.isfinite(array).all() for array in reduced.values()):
            return reduced
        buffers = vars(self).setdefault("buffers", {name: np.zeros_like(array) for name, array in reduced.items()})
        with self.adapted(buffers, reduced, momentum=momentum):
            for name, array in reduced.items():
                buffers[name][...] = momentum * buffers[name] + array
            return {name: buffer.copy() for name, buffer in buffers.items()}

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Free what the Compressor holds; collective."""


class Driver(ABC):
    """A driver on one rank of a launch; tests have it as ``driver``."""

    name: str
    rank: int
    world_size: int
    folder: Path  #: of this launch, the same on every rank
    num_nodes = int(os.environ.get("NODES", "0"))  #: of exchanges with two levels; 0: one level
    shapes: ClassVar[Shapes] = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
    error: type[Exception] = Exception  #: what all ranks raise when one has failed
    recovers = False  #: a Compressor can be used after an error
    expensive = False  #: making a Compressor takes most of a second
    by_tensor = False  #: a step is undone tensor by tensor
    shared = False  #: ranks live in one object
    on_host = True  #: gradients lie in host memory
    same_products = True  #: matrix products round as the loopback's
    grouping: Grouping | None = None  #: which tensors the driver puts into one bucket by itself
    sums_in_order = False  #: float16 sums do not depend on what else is sent
    probe = 0  #: bytes that travel with each tensor
    passes_on: tuple[str, ...] = ()  #: methods under which a NaN stays where it is, as with the stock optimizer

    @abstractmethod
    def make(
        self,
        method: str | Plan,
        settings: Settings,
        shapes: Shapes,
        *,
        dtype: str = "float32",
        op: str = "average",
        loss_scale: float | Callable[[], float] = 1.0,
    ) -> Handle:
        """Return a Compressor for tensors of these names and shapes."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""

    @abstractmethod
    def counting(self) -> AbstractContextManager[Counter]:
        """Context manager that counts the bytes that Compressors made inside give to the transport."""

    @property
    def exact(self) -> bool:
        """Whether sums are the loopback's to the bit. The sum of two numbers does not depend on their order, and the
        ranks of a node are added in rank order."""
        return self.num_exchanging <= 2

    @property
    def nodes(self) -> Nodes | None:
        """The nodes of exchanges with two levels."""
        return Nodes(self.num_nodes, self.world_size // self.num_nodes) if self.num_nodes else None

    @property
    def num_exchanging(self) -> int:
        """Number of ranks that exchange a tensor with each other: with two levels, one per node."""
        return self.num_nodes or self.world_size

    def of_node(self, value: Any) -> list[Any]:
        """Return the values of all ranks of this node; with one level, this rank's."""
        if not self.nodes:
            return [value]
        everyone = self.gather(value)
        return [everyone[rank] for rank in self.nodes.ranks_of_node(self.nodes.node_of(self.rank))]

    def placed(self, settings: Settings, method: Any = "") -> Settings:
        """Add the number of nodes to settings if there are two levels; a plan has it already."""
        return {"nodes": self.num_nodes, **settings} if self.num_nodes and not isinstance(method, Plan) else settings

    def reshard(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Convert states of another number of ranks to this one."""
        return reshard(saved, self.world_size, self.nodes)

    def exact_with(self, method: str | Plan) -> bool:
        """Return whether a method's results are exact; on a device, the rounding of matrix products is not."""
        return self.exact and (self.same_products or hvdcompress.get_method(str(method)).exact)

    def some(self, methods: Mapping[str, Settings]) -> list[tuple[str, Settings]]:
        """Return methods with their settings: the first two if a Compressor takes most of a second."""
        return list(methods.items())[: 2 if self.expensive else None]

    def tolerance(self, method: str | Plan, settings: Settings) -> tuple[float, float] | None:
        """Return how far results may be from the loopback's, as for `assert_close`; None if by any amount."""
        if self.exact_with(method):
            return 0.0, 0.0
        if sums_float16(str(method), settings):
            return None
        loose = (
            1.0 if hvdcompress.get_method(str(method)).exact else 100.0
        )  # matrix products and feedback make more of it
        return 2e-6 * loose, 4e-7 * loose

    def again(self, method: str | Plan, settings: Settings) -> tuple[float, float] | None:
        """Return how far two equal runs may be from each other: Horovod's order of addition depends on which tensors it
        fuses."""
        return (0.0, 0.0) if self.sums_in_order else self.tolerance(method, settings)

    def yardstick(self, method: str | Plan, settings: Settings, world_size: int | None = None) -> Trial:
        """Return the loopback with the same plan."""
        plan = plan_of(method, **(self.placed(settings) if world_size in (None, self.world_size) else settings))
        return Trial(plan, world_size or self.world_size, grouping=self.grouping)

    def specs(self, shapes: Shapes) -> list[TensorSpec]:
        """Return the tensors' specs for the loopback."""
        return [TensorSpec(name, tuple(shape)) for name, shape in shapes.items()]

    def gradients(self, step: int, shapes: Shapes, rank: int | None = None) -> Arrays:
        """Return a rank's gradients (default: this one's) of a step; on odd ranks they are in the opposite order."""
        rank = self.rank if rank is None else rank
        drawn = checks.heavy_tailed(shapes, step, rank)
        return drawn if rank % 2 == 0 else dict(reversed(drawn.items()))

    def everyone(self, step: int, shapes: Shapes, dtype: str = "float32") -> list[Arrays]:
        """Return every rank's gradients of a step."""
        drawn = [self.gradients(step, shapes, rank) for rank in range(self.world_size)]
        return [{name: array.astype(dtype) for name, array in one.items()} for one in drawn]

    def meet(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def must_raise(self, kind: Any, words: list[str], run: Callable[[], object], same: bool = True) -> str:
        """Check that ``run`` raises on every rank; see :func:`tests.ranks.checks.must_raise`."""
        return checks.must_raise(kind, words, run, self.gather, same)


@contextmanager
def replaced(places: list[tuple[Any, str]], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager in which attributes (object, name) are wrapped."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield
