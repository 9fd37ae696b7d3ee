"""A rank's side of a step: ranks in lockstep in one process, of which only what they compute is timed.

The way is that of PyTorch's driver: gradients come one by one, the last layer's first, into the buckets that it would
make; the reduced ones are written over them; and what it leaves to Horovod as it is costs nothing here, either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.bench.devices import Cost, Device, Gauge
from hvdcompress.engine.commit import Outcome, commit_step
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.rehearsal import carry_out
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import NextStep, RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import Array, Broadcast, TensorSpec
from hvdcompress.plan import BY_NAME, Bucket, Plan

__all__ = ["PARTS", "Side", "Spent"]

#: Of a step: up to the last collective (receiving the gradients is in it); from its result to the sum; writing the sum
#: over the gradients and keeping the new state.
PARTS = ("encode", "decode", "apply")


@dataclass
class Spent:
    """What a rank spent in a step, on average over the ranks, by part."""

    parts: dict[str, Cost] = field(default_factory=lambda: {part: Cost() for part in PARTS})

    @property
    def whole(self) -> Cost:
        """The parts together."""
        found = Cost()
        for cost in self.parts.values():
            found.add(cost)
        return found


class Side:
    """The ranks of a world.

    Args:
        plan: what each tensor gets.
        specs: the tensors, in the order of the net.
        world_size: number of ranks.
        device: where their gradients lie.

    Attributes:
        buckets: what is exchanged together.
        ranks: their states.
    """

    def __init__(self, plan: Plan, specs: Sequence[TensorSpec], world_size: int, device: Device):
        self.plan, self.world_size, self.device = plan, world_size, device
        self.buckets = plan.buckets(specs, BY_NAME)
        self.ranks = [RankState(plan, rank, world_size) for rank in range(world_size)]
        places = {
            member.name: (bucket, place) for bucket in self.buckets for place, member in enumerate(bucket.members)
        }
        self._places = [places[spec.name] for spec in specs]

    def step(self, gradients: Sequence[Sequence[Array]], gauge: Gauge | None = None) -> Spent:
        """Make one step.

        Args:
            gradients: by rank and tensor, flat float32; the reduced ones are written over them.
            gauge: calls what is measured; the device's clock by default.
        """
        spent = Spent()
        self._gauge = gauge or self.device.timed
        received = [self._receive(rank, given, spent) for rank, given in zip(self.ranks, gradients, strict=True)]
        exchanges = [own for own, _ in received]
        for bucket in self.buckets:
            if bucket.spec.name in exchanges[0]:
                self._exchange([each[bucket.spec.name] for each in exchanges], spent)
        for rank, (own, passed) in zip(self.ranks, received, strict=True):
            for exchange in own.values():
                self._measured(spent, "apply", exchange.deliver, 1.0 / self.world_size)
            self._measured(spent, "apply", commit_step, rank, own.values(), passed, Outcome())
        return spent

    def _measured(self, spent: Spent, part: str, call: Any, *arguments: Any) -> Any:
        """``call(*arguments)``, a rank's share of its cost added to a part."""
        result, cost = self._gauge(call, *arguments)
        spent.parts[part].add(cost, 1.0 / self.world_size)
        return result

    def _receive(
        self, rank: RankState, given: Sequence[Array], spent: Spent
    ) -> tuple[dict[str, Exchange], list[NextStep]]:
        """Take all gradients of a rank, up to the first collective of each bucket.

        Returns:
            The exchanges by bucket name, and the turns of the buckets that Horovod reduces itself.
        """
        exchanges: dict[str, Exchange] = {}
        passed: list[NextStep] = []
        rank.begin_round()
        for (bucket, index), gradient in reversed(list(zip(self._places, given, strict=True))):
            if rank.next_step(bucket).passes_through:
                passed.append(self._measured(spent, "encode", self._pass_on, rank, bucket, gradient))
            else:
                self._measured(spent, "encode", self._add, rank, bucket, index, gradient, exchanges)
        return exchanges, passed

    def _add(
        self, rank: RankState, bucket: Bucket, index: int, gradient: Array, exchanges: dict[str, Exchange]
    ) -> None:
        """Take a gradient as under Horovod."""
        exchange = exchanges.get(bucket.spec.name)
        if exchange is None:
            exchange = Exchange(Setup(rank, Group(rank.rank, self.world_size), bucket, gradient, self.device.ops))
            exchanges[exchange.name] = exchange
        exchange.add([index], [gradient])
        if exchange.is_full:
            exchange.start()

    def _pass_on(self, rank: RankState, bucket: Bucket, gradient: Array) -> NextStep:
        if not self.plan.stateless:
            self.device.ops.all_finite(gradient)
        return rank.pass_through(bucket, gradient, self.device.ops)

    def _exchange(self, exchanges: list[Exchange], spent: Spent) -> None:
        """The collectives of one bucket. Who computes the root's part of a broadcast is the mean rank, too."""
        while (collective := exchanges[0].collective) is not None:
            collectives: list[Any] = [exchange.collective for exchange in exchanges]
            if isinstance(collective, Broadcast):
                made = self.device.fetch(self._measured(spent, "encode", collectives[collective.root].make))
                collectives = [replace(collective, make=lambda made=made: made)] * self.world_size  # type: ignore[misc]
            else:
                collectives = [replace(each, x=self.device.fetch(each.x)) for each in collectives]
            for exchange, result in zip(exchanges, carry_out(collectives), strict=True):
                self._advance(exchange, self._lifted(result), spent)

    def _advance(self, exchange: Exchange, result: Any, spent: Spent) -> None:
        """Hand a result to a rank. Only then is it known whether that was the last collective."""
        _, cost = self._gauge(exchange.resume, result)
        spent.parts["decode" if exchange.collective is None else "encode"].add(cost, 1.0 / self.world_size)

    def _lifted(self, result: Any) -> Any:
        """A collective's result on the device: an array, or a list of them."""
        return [self.device.array(each) for each in result] if isinstance(result, list) else self.device.array(result)
