"""One training step on a time line: gradients become ready, are encoded, queue for the link, and are decoded.

Two things are busy in a step. The *processor* (or the device) runs the forward and the backward pass, encodes each
gradient when it is ready, which delays all that follow, and decodes what has come. The *link* takes one collective
after another; what waits for it meanwhile, and is of one kind, travels as one, as Horovod fuses it. This is the model
of Espresso (Wang et al., EuroSys 2023, arXiv 2205.14465, §4), with several rounds per exchange and with fusion::

    start = max(end of what is on the link, when it was asked for)
    end   = start + round + α · messages that wait for each other + 8 · bytes on the link / rate

On machines whose processors carry the bytes themselves, computing is slower while the link is busy: ``Link.overlap`` is
the share of its speed that is left. All ranks are assumed to be alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments.scale import cost
from experiments.scale.cost import Kind

__all__ = ["Call", "Link", "Step", "Times", "Unit", "simulate"]


@dataclass(frozen=True)
class Link:
    """What a collective costs.

    ``rate``: bits per second; ``message``: α, seconds of a message that waits for another; ``round``: seconds of a
    collective besides its messages; ``call``: processor seconds that it takes to ask for one; ``overlap``: the share of
    its speed at which the processor computes while the link is busy, from 0 to 1; ``window``: of a round's seconds,
    those in which others of the kind may still join, as in Horovod's cycle; ``share``: the part of the speed that the
    link is known by which ``rate`` is.
    """

    rate: float
    message: float = 0.0
    round: float = 0.0
    call: float = 0.0
    overlap: float = 1.0
    window: float = 0.0
    share: float = 1.0

    @property
    def speed(self) -> float:
        """Bits per second by which the link is known: 10 Gbit/s of a link that is sold as such."""
        return self.rate / self.share

    def seconds(self, kind: Kind, lengths: Sequence[int], line: float, world_size: int) -> float:
        """Seconds of collectives of one kind that travel together.

        Args:
            kind: as ``cost.kind`` says.
            lengths: bytes that a rank hands over to each.
            line: bytes that pass one after the other, of all of them.
            world_size: the number of ranks.
        """
        collective, _, partners = kind
        return (
            self.round + self.message * cost.messages(collective, lengths, world_size, partners) + 8 * line / self.rate
        )


@dataclass(frozen=True)
class Times:
    """The seconds of a step on one rank, without any exchange.

    ``ready``: when each gradient is ready, after the beginning of the backward pass, which takes ``backward``.
    ``waits``: the backward pass is not on the processors that encode and carry bytes: these do not slow it down.
    """

    ready: Mapping[str, float]
    backward: float
    forward: float = 0.0
    update: float = 0.0
    waits: bool = False

    @property
    def alone(self) -> float:
        """Seconds of a step that exchanges nothing: the ceiling of what any method can reach."""
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Call:
    """A collective of a unit: its kind, the bytes that a rank hands over, and those that pass one after the other."""

    kind: Kind
    num_bytes: int
    line: float


@dataclass(frozen=True)
class Unit:
    """What is exchanged together: its tensors, its collectives, and seconds of the processor before and after them.

    ``extra``: collectives that are asked for with the first of ``calls``, such as a driver's placeholders.
    """

    name: str
    members: tuple[str, ...]
    calls: tuple[Call, ...]
    encode: float = 0.0
    decode: float = 0.0
    extra: tuple[Call, ...] = ()


@dataclass
class Step:
    """A predicted step. ``exposed``: what the exchange adds to it; ``link``: seconds for which the link was busy.

    ``latency``: of those, what is not spent on bytes; ``hidden``: units whose last collective ended in the backward
    pass.
    """

    seconds: float
    exposed: float
    link: float
    latency: float
    hidden: list[str] = field(default_factory=list)


@dataclass
class _Asked:
    """A collective that was asked for at some time; ``at`` is its place in its unit, -1 for its extra ones."""

    call: Call
    unit: int
    at: int
    time: float = 0.0


class _Run:
    """The state of one simulated step."""

    def __init__(self, link: Link, world_size: int):
        self.link, self.world_size = link, world_size
        self.now = self.until = 0.0  # of the processor; until when the link is busy
        self.queue: list[_Asked] = []
        self.flying: list[_Asked] = []
        self.came: deque[_Asked] = deque()
        self.busy = self.latency = 0.0

    def ask(self, asked: _Asked) -> None:
        """Hand a collective to the network."""
        self.spend(self.link.call)
        asked.time = self.now
        self.queue.append(asked)
        self.drive()

    @property
    def next(self) -> float:
        """When the link ends what it carries, or begins with what waits; infinite if there is neither."""
        if self.flying:
            return self.until
        return max(self.until, self.queue[0].time + self.link.window) if self.queue else math.inf

    def drive(self) -> None:
        """Let the link do what it has done by now."""
        while self.next <= self.now:
            if self.flying:
                self.came.extend(self.flying)
                self.flying = []
            else:
                self._begin(self.next)

    def _begin(self, time: float) -> None:
        kind = self.queue[0].call.kind
        together = [each for each in self.queue if each.call.kind == kind]
        self.queue = [each for each in self.queue if each.call.kind != kind]
        line = sum(each.call.line for each in together)
        seconds = self.link.seconds(kind, [each.call.num_bytes for each in together], line, self.world_size)
        self.until = time + seconds - self.link.window
        self.busy += seconds
        self.latency += seconds - 8 * line / self.link.rate
        self.flying = together

    def spend(self, seconds: float, slowed: bool = True) -> None:
        """Let the processor work for so many seconds, at less than its speed while the link is busy if ``slowed``."""
        left = seconds
        self.drive()
        while left > 0:
            speed = self.link.overlap if slowed and self.flying else 1.0
            until = self.next - self.now
            if speed and left <= speed * until:
                self.now += left / speed
                left = 0.0
            else:
                left -= speed * until
                self.now = self.next
            self.drive()

    def wait(self) -> None:
        """Let the processor wait until the link has brought something."""
        while not self.came:
            self.now = max(self.now, self.next)
            self.drive()


def simulate(times: Times, units: Sequence[Unit], link: Link, world_size: int, last: Sequence[Call] = ()) -> Step:
    """Predict one step.

    Args:
        times: when gradients are ready.
        units: what is exchanged; each begins when the last of its tensors is ready.
        link: what collectives cost.
        world_size: the number of ranks.
        last: collectives that are asked for when the backward pass has ended, such as a driver's status.
    """
    if world_size < 2:
        return Step(times.alone, 0.0, 0.0, 0.0)
    run = _Run(link, world_size)
    of = {name: number for number, unit in enumerate(units) for name in unit.members}
    missing = [len(unit.members) for unit in units]
    left = sum(len(unit.calls) + len(unit.extra) for unit in units) + len(last)
    ended = [math.inf] * len(units)
    run.now = times.forward
    before = 0.0

    def ask(number: int, at: int) -> None:
        run.spend(units[number].encode / max(1, len(units[number].calls)))
        run.ask(_Asked(units[number].calls[at], number, at))

    def poll() -> None:
        nonlocal left
        run.drive()
        while run.came:
            one = run.came.popleft()
            left -= 1
            if one.at < 0:
                continue
            unit = units[one.unit]
            if one.at + 1 < len(unit.calls):
                ask(one.unit, one.at + 1)
            else:
                ended[one.unit] = run.now
                run.spend(unit.decode)

    for name in sorted(times.ready, key=lambda name: times.ready[name]):
        run.spend(times.ready[name] - before, slowed=not times.waits)
        before = times.ready[name]
        if name not in of:
            continue
        number = of[name]
        missing[number] -= 1
        if not missing[number]:
            for call in units[number].extra:
                run.ask(_Asked(call, number, -1))
            if units[number].calls:
                ask(number, 0)
        poll()
    run.spend(times.backward - before, slowed=not times.waits)
    computed = run.now
    for call in last:
        run.ask(_Asked(call, -1, -1))
    poll()
    while left:
        run.wait()
        poll()
    seconds = run.now + times.update
    hidden = [unit.name for unit, end in zip(units, ended, strict=True) if end <= computed]
    return Step(seconds, seconds - times.alone, run.busy, run.latency, hidden)
