"""How far compressed gradients point in the direction of the uncompressed average, every ``cosine_every`` steps.

In such a step each rank keeps a copy of its gradients. When all exchanges are done, the copies are averaged by dense
all-reduces, in one order on all ranks, and compared with what the methods have brought: before clipping, and before the
optimizer's momentum is adapted. Results and states are what they would be without the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hvdcompress.engine.collectives import Collectives, Pending
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.observer import Compared
from hvdcompress.method import AllReduce, Array
from hvdcompress.ops.spec import Ops

NAME = "cosine"  #: of the all-reduces, and of their bytes in the ledger


@dataclass(frozen=True)
class Product:
    """The scalar product of a result and of the uncompressed average, and the squares of their norms."""

    dot: float = 0.0
    result: float = 0.0
    dense: float = 0.0

    def __add__(self, other: Product) -> Product:
        return Product(self.dot + other.dot, self.result + other.result, self.dense + other.dense)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between them; 0 if only one of them is 0, NaN if both are."""
        if not self.result and not self.dense:
            return math.nan
        norms = math.sqrt(self.result) * math.sqrt(self.dense)
        return self.dot / norms if norms else 0.0

    @classmethod
    def exact(cls, norm: float, factor: float) -> Product:
        """Return that of a result that is ``factor`` times the average."""
        return cls(norm * norm / factor, norm * norm, (norm / factor) ** 2)

    @classmethod
    def of(cls, result: Array, dense: Array, ops: Ops) -> Product:
        """Return that of two vectors."""
        a = ops.l2_norm(result)
        b = ops.l2_norm(dense)
        if not a or not b:
            return cls(0.0, a * a, b * b)
        # The norm of the difference of unit vectors needs no product in float64, which not every library has
        angle = ops.l2_norm(result * (1.0 / a) - dense * (1.0 / b))
        return cls((1.0 - 0.5 * angle * angle) * a * b, a * a, b * b)


class Comparison:
    """The copies and the results of one step.

    Args:
        local: this rank's state.
    """

    def __init__(self, local: RankState):
        self.local = local
        self._copies: dict[str, Array] = {}  # by bucket
        self._results: dict[str, list[Array]] = {}
        self._under_way: list[tuple[Exchange, Pending]] = []

    def keep(self, exchange: Exchange, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Copy gradients, divided by the number of ranks, before an exchange takes them."""
        setup = exchange.setup
        if exchange.name not in self._copies:
            self._copies[exchange.name] = setup.ops.zeros(setup.bucket.spec.size, setup.dtype, setup.like)
        for index, gradient in zip(indices, gradients, strict=True):
            start, stop = setup.bucket.spans[index]
            setup.ops.write(self._copies[exchange.name][start:stop], gradient, 1.0 / setup.group.world)

    def note_result(self, exchange: Exchange, factor: float) -> None:
        """Copy the results of an exchange that is about to deliver ``factor`` times its totals."""
        setup = exchange.setup
        outs = [setup.ops.zeros(member.size, setup.dtype, setup.like) for member in setup.bucket.members]
        exchange.write_totals(factor, outs)
        self._results[exchange.name] = outs

    def start(self, collectives: Collectives, exchanges: Collection[Exchange]) -> None:
        """Start the all-reduces of the copies, once all ranks know that the step is good."""
        # Sorted, because every rank has to start them in one order, and gradients may have come in different ones
        for number, exchange in enumerate(sorted(exchanges, key=lambda each: each.name)):
            setup = exchange.setup
            if exchange.name in self._copies and setup.bucket.spec.size:
                collective = AllReduce(self._copies[exchange.name], "sum", may_overwrite=True)
                self._under_way.append((exchange, collectives.start(NAME, number, collective, setup.ops, setup.like)))

    def finish(self, collectives: Collectives, exact: Mapping[str, Product], unused: Collection[str]) -> None:
        """Wait for the all-reduces, compare, and tell observers.

        Args:
            collectives: the network.
            exact: of tensors that the driver's framework has averaged.
            unused: tensors whose results no rank uses.
        """
        products = dict(exact)
        for exchange, pending in self._under_way:
            collectives.advance(pending)
            average = collectives.result(pending)
            bucket = exchange.setup.bucket
            for member, (start, stop), result in zip(
                bucket.members, bucket.spans, self._results[exchange.name], strict=True
            ):
                products[member.name] = Product.of(result, average[start:stop], exchange.setup.ops)
        used = {name: product for name, product in products.items() if name not in unused}
        cosines = {name: product.cosine for name, product in used.items() if not math.isnan(product.cosine)}
        if cosines:
            self._tell(sum(used.values(), Product()).cosine, cosines)

    def _tell(self, whole: float, cosines: Mapping[str, float]) -> None:
        local = self.local
        name = min(cosines, key=lambda each: cosines[each])
        compared = Compared(local.steps_done() + 1, whole, name, cosines[name])
        for observer in local.observers:
            observer.compared(local.rank, compared)
        if local.rank == 0:
            log.LOGGER.info("%s", compared)
