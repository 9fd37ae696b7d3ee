"""Cosine between the compressed result and the uncompressed average of the gradients, every ``cosine_every`` steps.

In such a step each rank copies its gradients. When all exchanges are done, dense all-reduces average the copies, in the
same order on all ranks, and the averages are compared with the results of the methods. Results and states are the same
as without the comparison.
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

NAME = "cosine"  #: name of these all-reduces and of their bytes in the ledger


@dataclass(frozen=True)
class Product:
    """Scalar product of a result and the uncompressed average, and the squared norms of both."""

    dot: float = 0.0
    result: float = 0.0
    dense: float = 0.0

    def __add__(self, other: Product) -> Product:
        return Product(self.dot + other.dot, self.result + other.result, self.dense + other.dense)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between them; 0 if one of them is zero, NaN if both are."""
        if not self.result and not self.dense:
            return math.nan
        norms = math.sqrt(self.result) * math.sqrt(self.dense)
        return self.dot / norms if norms else 0.0

    @classmethod
    def exact(cls, norm: float, factor: float) -> Product:
        """Return the product for a result that equals ``factor`` times the average.

        Args:
            norm: l2-norm of the result.
            factor: ratio of the result and the average.
        """
        return cls(norm * norm / factor, norm * norm, (norm / factor) ** 2)

    @classmethod
    def of(cls, result: Array, dense: Array, ops: Ops) -> Product:
        """Return the product of two vectors [n]."""
        a = ops.l2_norm(result)
        b = ops.l2_norm(dense)
        if not a or not b:
            return cls(0.0, a * a, b * b)
        # ‖a − b‖² = 2 − 2·cos for unit vectors: this needs no float64 dot product, which some array libraries lack
        angle = ops.l2_norm(result * (1.0 / a) - dense * (1.0 / b))
        return cls((1.0 - 0.5 * angle * angle) * a * b, a * a, b * b)


class Comparison:
    """Gradient copies and results of one step.

    Args:
        local: this rank's state.

    Attributes:
        products: {tensor name: product}.
    """

    def __init__(self, local: RankState):
        self.local = local
        self.products: dict[str, Product] = {}
        self._copies: dict[str, Array] = {}  # {bucket name: gradients / world}
        self._results: dict[str, list[Array]] = {}
        self._in_flight: list[tuple[Exchange, Pending]] = []

    def keep(self, exchange: Exchange, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Copy gradients, divided by the number of ranks, before an exchange consumes them."""
        setup = exchange.setup
        if exchange.name not in self._copies:
            self._copies[exchange.name] = setup.ops.zeros(setup.bucket.spec.size, setup.dtype, setup.like)
        for index, gradient in zip(indices, gradients, strict=True):
            start, stop = setup.bucket.spans[index]
            setup.ops.write(self._copies[exchange.name][start:stop], gradient, 1.0 / self.local.world_size)

    def note_result(self, exchange: Exchange, factor: float) -> None:
        """Copy the results of an exchange before it delivers ``factor`` times its totals."""
        setup = exchange.setup
        outs = [setup.ops.zeros(member.size, setup.dtype, setup.like) for member in setup.bucket.members]
        exchange.write_totals(factor, outs)
        self._results[exchange.name] = outs

    def start(self, collectives: Collectives, exchanges: Collection[Exchange]) -> None:
        """Start the all-reduces of the copies, after all ranks know that the step is finite."""
        # Ordered transports need the same order on all ranks, and gradients may have arrived in different orders
        for number, exchange in enumerate(sorted(exchanges, key=lambda each: each.name)):
            setup = exchange.setup
            if exchange.name in self._copies and setup.bucket.spec.size:
                collective = AllReduce(self._copies[exchange.name], "sum", may_overwrite=True)
                self._in_flight.append((exchange, collectives.start(NAME, number, collective, setup.ops, setup.like)))

    def finish(self, collectives: Collectives) -> None:
        """Wait for the all-reduces and compare.

        Args:
            collectives: the network.
        """
        for exchange, pending in self._in_flight:
            collectives.advance(pending)
            average = collectives.result(pending)
            bucket = exchange.setup.bucket
            for member, (start, stop), result in zip(
                bucket.members, bucket.spans, self._results[exchange.name], strict=True
            ):
                self.products[member.name] = Product.of(result, average[start:stop], exchange.setup.ops)

    def report(self, unused: Collection[str]) -> None:
        """Report the cosines to the observers.

        Args:
            unused: names of the tensors whose results no rank uses.
        """
        # Sorted, because a sum of floats depends on the order, and all ranks report the same
        used = {name: product for name, product in sorted(self.products.items()) if name not in unused}
        cosines = {name: product.cosine for name, product in used.items() if not math.isnan(product.cosine)}
        if cosines:
            self._report(sum(used.values(), Product()).cosine, cosines)

    def _report(self, whole: float, cosines: Mapping[str, float]) -> None:
        local = self.local
        name = min(cosines, key=lambda each: cosines[each])
        compared = Compared(local.steps_done() + 1, whole, name, cosines[name])
        for observer in local.observers:
            observer.compared(local.rank, compared)
        if local.rank == 0:
            log.LOGGER.info("%s", compared)
