"""The methods of a driver that promises call, and what all drivers have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hvdcompress
from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.method import TensorSpec
from hvdcompress.optimizers import SGD
from hvdcompress.plan import Grouping, Plan, plan_of
from hvdcompress.testing import Trial
from hvdcompress.testing.trial import Grouped
from tests import harness
from tests.promises.variants import METHODS, ROUTES, VARIANTS, Settings, has_half_sums

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Counter:
    """Bytes of the arrays that a transport was given."""

    num_bytes: int = 0


def on_host(array: Any) -> np.ndarray:
    """A numpy array of a driver's array, which may be on a GPU."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


class Handle(ABC):
    """One Compressor with its tensors, on this rank. What is not written here is the Compressor's own."""

    compressor: Any
    shapes: Shapes

    @abstractmethod
    def reduce(self, gradients: Arrays) -> Arrays:
        """One step: this rank's gradients, in the order in which they come -> the reduced ones (bfloat16: float32)."""

    @abstractmethod
    def overhead(self, steps: int) -> dict[str, int]:
        """Bytes that the driver sends in so many steps beyond what methods ask for, by the ledger's names; a set-up
        cost, and what depends on the method, as it was counted."""

    def lengths(self) -> dict[str, int]:
        """The bytes of lengths that precede payloads where the network must know them, by the ledger's name."""
        told = self.compressor.ledger.tensors().get("lengths")
        if not told:
            return {}
        # In an all-to-all there is one for each rank, which tests/unit/engine/test_collectives.py counts
        has_pieces = self.compressor.plan.program.main.id == "oktopk"
        return {"lengths": told.sent if has_pieces else 8 * told.collectives}

    def unseen(self) -> set[str]:
        """Tensors whose gradients go from the framework to the transport itself: no observer sees them."""
        return set()

    def change(self, name: str) -> None:
        """Change a parameter on this rank alone, by as little as can be; drivers without parameters are excepted."""
        raise NotImplementedError

    def sent(self) -> dict[str, int]:
        """Bytes sent by this rank, by the ledger's names."""
        return {name: entry.sent for name, entry in self.compressor.ledger.tensors().items() if entry.sent}

    def bytes_sent(self) -> int:
        return self.compressor.ledger.bytes_sent()

    def bytes_inside_node(self) -> int:
        """What goes to the other rank of a node of two, with two levels."""
        return self.compressor.ledger.bytes_inside_node()

    def counters(self) -> dict[str, int]:
        return self.compressor.ledger.counters()

    def residual(self, name: str) -> np.ndarray:
        return on_host(self.compressor.residual(name))

    def state(self) -> dict[str, Any]:
        """``state_dict()``, with numpy arrays."""
        saved = self.compressor.state_dict()
        state = {name: {s: on_host(a) for s, a in slots.items()} for name, slots in saved["state"].items()}
        return {**saved, "state": state}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.compressor.load_state_dict(saved)

    def save(self, folder: Path) -> None:
        self.compressor.save(folder)

    def load(self, folder: Path) -> None:
        self.compressor.load(folder)

    def describe(self) -> str:
        return self.compressor.describe()

    def summary(self) -> str:
        return self.compressor.summary()

    def openmetrics(self, **labels: str) -> str:
        return self.compressor.openmetrics(**labels)

    def log_to(self, writer: Any, step: int) -> None:
        self.compressor.log_to(writer, step)

    def trigger(self) -> None:
        self.compressor.trigger()

    def discard(self) -> None:
        self.compressor.discard()

    def paused(self) -> AbstractContextManager[None]:
        return self.compressor.paused()

    def observe(self, **metrics: float) -> None:
        self.compressor.observe(**metrics)

    def watch(self, observer: Any) -> None:
        self.compressor.watch(observer)

    def use(self, optimizer: SGD) -> None:
        """Have this rank cancel the momentum of an optimizer."""
        self.compressor.local.optimizer = optimizer.read

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Free what the driver holds; collective."""


class Driver(ABC):
    """A driver on one rank of a launch."""

    name: str
    rank: int
    world_size: int
    folder: Path  #: of this launch, the same on every rank
    num_nodes = int(os.environ.get("NODES", "0"))  #: of exchanges with two levels; 0: one level
    shapes: Shapes = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
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
        """A Compressor for tensors of these names and shapes."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""

    @abstractmethod
    def counting(self) -> AbstractContextManager[Counter]:
        """Inside, the bytes of what the transport is called with by Compressors that are made inside."""

    @property
    def exact(self) -> bool:
        """Whether sums are the loopback's to the bit: two numbers are added alike in any order, and the ranks of a node
        are always added in their order."""
        return self.num_exchanging <= 2

    @property
    def nodes(self) -> Nodes | None:
        """The nodes of exchanges with two levels."""
        return Nodes(self.num_nodes, self.world_size // self.num_nodes) if self.num_nodes else None

    @property
    def num_exchanging(self) -> int:
        """How many ranks exchange a tensor with each other, and so take part in a method: one of each node."""
        return self.num_nodes or self.world_size

    def of_node(self, value: Any) -> list[Any]:
        """The values of this rank's node, of which each tensor has one owner; this rank's alone with one level."""
        if not self.nodes:
            return [value]
        everyone = self.gather(value)
        return [everyone[rank] for rank in self.nodes.ranks_of_node(self.nodes.node_of(self.rank))]

    def placed(self, settings: Settings, method: Any = "") -> Settings:
        """Settings, with the number of nodes if there are two levels; a plan has it already."""
        return {"nodes": self.num_nodes, **settings} if self.num_nodes and not isinstance(method, Plan) else settings

    def reshard(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The states of all ranks, from those of other ranks."""
        return reshard(saved, self.world_size, self.nodes)

    def exact_with(self, method: str | Plan) -> bool:
        """The same of a method's results. On a device, a matrix product's rounding depends on where the matrix lies."""
        return self.exact and (self.same_products or hvdcompress.get(str(method)).exact)

    def variants(self) -> list[tuple[str, Settings]]:
        """The methods and settings that this driver is tried with: two ranks get one of each method and of each route,
        as MPI and the loopback are tried with every option."""
        return VARIANTS if self.world_size != 2 else [*METHODS.items(), *ROUTES]

    def tolerance(self, method: str | Plan, settings: Settings) -> tuple[float, float] | None:
        """How far results may be from the loopback's: relative, and of a tensor's greatest number. None: any."""
        if self.exact_with(method):
            return 0.0, 0.0
        if has_half_sums(str(method), settings):
            return None
        loose = 1.0 if hvdcompress.get(str(method)).exact else 100.0  # matrix products and feedback make more of it
        return 2e-6 * loose, 4e-7 * loose

    def again(self, method: str | Plan, settings: Settings) -> tuple[float, float] | None:
        """How far two runs of the same may be from each other: Horovod adds three numbers or more in an order that
        depends on which tensors go together."""
        return (0.0, 0.0) if self.sums_in_order else self.tolerance(method, settings)

    def yardstick(self, method: str | Plan, settings: Settings, world_size: int | None = None) -> Trial:
        """The loopback with the same plan; all its collectives are noted."""
        plan = plan_of(method, **(self.placed(settings) if world_size in (None, self.world_size) else settings))
        if self.grouping:
            plan = Grouped.of(plan, self.grouping)
        net = Trial(plan, world_size or self.world_size)
        net.grouping = self.grouping
        return net

    def specs(self, shapes: Shapes) -> list[TensorSpec]:
        """The tensors as the loopback knows them."""
        return [TensorSpec(name, tuple(shape)) for name, shape in shapes.items()]

    def gradients(self, step: int, shapes: Shapes, rank: int | None = None) -> Arrays:
        """A rank's gradients of a step (this one's); they come in the opposite order on odd ranks."""
        rank = self.rank if rank is None else rank
        drawn = harness.heavy_tailed(shapes, step, rank)
        return drawn if rank % 2 == 0 else dict(reversed(drawn.items()))

    def everyone(self, step: int, shapes: Shapes, dtype: str = "float32") -> list[Arrays]:
        """Every rank's gradients of a step."""
        drawn = [self.gradients(step, shapes, rank) for rank in range(self.world_size)]
        return [{name: array.astype(dtype) for name, array in one.items()} for one in drawn]

    def meet(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def must_raise(self, kind: Any, words: list[str], run: Callable[[], object], same: bool = True) -> str:
        """``run`` raises on every rank, with these words; ``same``: the same message."""
        return harness.must_raise(kind, words, run, self.gather, same)


@contextmanager
def replaced(places: list[tuple[Any, str]], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, the attributes are wrapped."""
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, wrap(original))
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)
