"""``python -m experiments bench codec``: what a rank computes in a step, in copies of its gradient.

For each method, in a process of its own with one thread, these take turns: the method on one tensor, the method on the
tensors of a net, and what it is compared with (``peers.py``). Before each turn a copy of the gradient is timed: in such
copies the time is counted, as they carry over from machine to machine, and from a quiet minute to a busy one.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeVar

from experiments import nets
from experiments.bench.devices import Device, device
from experiments.bench.draws import Draws
from experiments.bench.peers import peers_of
from experiments.bench.side import PARTS, Side, Spent
from hvdcompress import registry
from hvdcompress.method import Array, TensorSpec
from hvdcompress.plan import BY_NAME, Plan, PlanError, load, settings_of

__all__ = ["Asked", "Figures", "Measured", "asked_for", "measure", "net_of", "ratio", "run", "specs_of"]

DENSITY = 0.01  #: of every method that has one, unless its own is given
#: What methods do their real work with: GradiVeQ's usual 8 components of 100, on any tensor
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gradiveq": {"paper": True, "tensors": "all", "slice_elements": 768, "matrix_rank": 96, "dense_steps": 97},
}
WARM = 4  #: steps before the first that counts, at least: thresholds are learned, buffers are made
TENSORS_AT_MOST = 1.2  #: times that a net's tensors may take as long as one tensor of their size
NOTHING = 0.01  #: copies: what takes less is not compared with
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "HVDCOMPRESS_THREADS")
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What is to be measured.

    Attributes:
        methods: labels and plans, as :func:`asked_for` reads them.
        elements: of the one tensor, or a few less, so that it is a matrix that is nearly square.
        net: in :data:`experiments.nets.NETS`: its tensors, compared with one tensor of their size.
        world_size: ranks in lockstep.
        runs: steps that are measured.
        device: in ``devices.DEVICES``.
        peers: whether to measure what methods are compared with.
    """

    methods: Mapping[str, Mapping[str, Any]]
    elements: int = 25_000_000
    net: str | None = None
    world_size: int = 2
    runs: int = 9
    device: str = "cpu"
    peers: bool = True


@dataclass
class Figures:
    """What was measured of one thing.

    Attributes:
        name: what it is.
        seconds: of each run, a rank's.
        copies: seconds of the copy of the one tensor that was made before each run.
        parts: seconds of a rank's parts of a step, of each run; empty for what is not ours.
        faults: page faults of a rank in a step, the mean; None where they are not counted.
        fresh: bytes of fresh memory that a rank takes in a step; None where that was not asked.
        kept: bytes that a rank keeps from step to step.
        buckets: exchanges in a step.
        at_most: how many times as long as this the method may take.
    """

    name: str
    seconds: list[float]
    copies: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    faults: float | None = None
    fresh: float | None = None
    kept: float | None = None
    buckets: int = 0
    at_most: float | None = None

    def in_copies(self, part: str | None = None) -> float:
        """The median of the runs, or of a part of them, each in the copy before it."""
        seconds = self.parts[part] if part else self.seconds
        return statistics.median(one / copy for one, copy in zip(seconds, self.copies, strict=True))

    def least(self) -> float:
        """The shortest run in shortest copies."""
        return min(self.seconds) / min(self.copies)


@dataclass
class Measured:
    """One method's group: what took turns.

    Attributes:
        label: the method's.
        shape: of the one tensor.
        elements: of the net's tensors together, or of the one tensor.
        one: the method on it.
        many: the method on the net's tensors; None without a net.
        peers: what it is compared with.
    """

    label: str
    shape: tuple[int, int]
    elements: int
    one: Figures
    many: Figures | None
    peers: list[Figures]


# -- what is asked for ---------------------------------------------------------------------------------


def asked_for(words: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read methods as a user names them, such as "topk" or "topk density=0.001 values=fp16".

    Args:
        words: the methods; none for all of them.

    Returns:
        Plans by label. What is not said is :data:`DENSITY`, :data:`SETTINGS`, or the method's default.

    Raises:
        ValueError: there is no such method, or a setting is unknown or wrong; the message names it.
    """
    found = {}
    for text in words or registry.available():
        id, *pairs = text.replace(",", " ").split() or [""]
        if id not in registry.classes():
            registry.get(id)  # raises the error that suggests another
        has_density = "density" in registry.get(id).hyperparameters()
        usual = {**({"density": DENSITY} if has_density else {}), **SETTINGS.get(id, {})}
        try:
            plan = {"method": id, **usual, **settings_of(pairs)}
            load(plan)
        except PlanError as error:
            raise ValueError(f"{text!r}: {error}") from None
        found[" ".join([id, *pairs])] = plan
    return found


def net_of(words: str) -> str:
    """The net that is named, or that has so many tensors: "161" is resnet50.

    Raises:
        ValueError: there is none.
    """
    sizes = {name: len(nets.get(name)) for name in nets.NETS}
    if not words.isdecimal():
        nets.get(words)
        return words
    for name, count in sizes.items():
        if count == int(words):
            return name
    known = ", ".join(f"{count} ({name})" for name, count in sizes.items())
    raise ValueError(f"no net has {words} tensors; known: {known}")


def matrix_of(elements: int) -> tuple[int, int]:
    """The nearly square matrix of so many elements, or a few less.

    >>> matrix_of(25_000_000), matrix_of(25_557_032)
    ((5000, 5000), (5055, 5055))
    """
    rows = math.isqrt(elements)
    return rows, elements // max(rows, 1)


def specs_of(asked: Asked) -> tuple[TensorSpec, list[TensorSpec]]:
    """The one tensor, and the net's tensors."""
    shapes = nets.get(asked.net) if asked.net else {}
    one = TensorSpec("w", matrix_of(nets.total(shapes) or asked.elements))
    return one, [TensorSpec(name, shape) for name, shape in shapes.items()]


# -- taking turns --------------------------------------------------------------------------------------


class Ours:
    """A method on tensors of these shapes."""

    def __init__(self, plan: Plan, specs: Sequence[TensorSpec], asked: Asked, draws: Draws, at: Device):
        self.side, self.draws = Side(plan, specs, asked.world_size, at), draws
        self.gradients = [[at.empty(spec.size) for spec in specs] for _ in range(asked.world_size)]

    def prepare(self) -> None:
        """Give every rank its next gradients; not measured."""
        self.draws.fill(self.gradients)

    def take(self) -> Spent:
        """Make a step."""
        return self.side.step(self.gradients)

    def warm_up(self, steps: int) -> None:
        """Make steps that do not count."""
        for _ in range(steps):
            self.prepare()
            self.take()

    def fresh(self) -> float:
        """Bytes of fresh memory of a rank in a step."""
        at = self.side.device
        self.prepare()
        at.tracing(True)
        try:
            return self.side.step(self.gradients, at.traced).whole.fresh
        finally:
            at.tracing(False)

    def figures(self, name: str, taken: Sequence[Spent], copies: list[float]) -> Figures:
        """What the runs, the copies before them and a further step tell."""
        kept = statistics.fmean(rank.num_state_bytes() for rank in self.side.ranks)
        return Figures(
            name,
            [one.whole.seconds for one in taken],
            copies,
            {part: [one.parts[part].seconds for one in taken] for part in PARTS},
            faults_of(taken, self.side.device),
            self.fresh(),
            kept,
            len(self.side.buckets),
        )


class Theirs:
    """A function of one rank's gradient."""

    def __init__(self, call: Callable[[Array], Any], gradient: Array, draws: Draws, at: Device):
        self.call, self.gradient, self.draws, self.at = call, gradient, draws, at

    def prepare(self) -> None:
        """Draw the next gradient; not measured."""
        self.draws.fill([[self.gradient]])

    def take(self) -> Spent:
        """Call it."""
        result, cost = self.at.timed(self.call, self.gradient)
        del result
        return Spent({"call": cost})

    def figures(self, name: str, taken: Sequence[Spent], copies: list[float], at_most: float | None) -> Figures:
        """What the runs and the copies before them tell."""
        seconds = [one.whole.seconds for one in taken]
        return Figures(name, seconds, copies, faults=faults_of(taken, self.at), at_most=at_most)


def faults_of(taken: Sequence[Spent], at: Device) -> float | None:
    """Page faults of a step, the mean: what happens in one step of many counts, too."""
    return statistics.fmean(one.whole.faults for one in taken) if at.faults else None


Taken = tuple[list[Spent], list[float]]  #: one contender's runs, and the seconds of the copy before each


def take_turns(contenders: Sequence[Ours | Theirs], runs: int, copy: Callable[[], float]) -> list[Taken]:
    """So many runs of each; each round begins with another, so that nobody always comes after the same one."""
    taken: list[Taken] = [([], []) for _ in contenders]
    for run in range(runs):
        for place in range(len(contenders)):
            at = (run + place) % len(contenders)
            spent, copies = taken[at]
            copies.append(copy())
            contenders[at].prepare()
            spent.append(contenders[at].take())
    return taken


def warm_steps(plan: Plan) -> int:
    """Steps until the method is in its last phase, and its thresholds are learned."""
    method = plan.program.main
    last = len(method.phases) - 1
    return next(age for age in range(WARM, 1_000_000) if method.phase_of(age) == last)


def measure(asked: Asked, label: str) -> Measured:
    """Measure one method's group in this thread.

    Args:
        asked: what to measure.
        label: one of its methods.

    Raises:
        ValueError: the method does not work on the one tensor, which is sent uncompressed, or the device is not there.
    """
    plan, at = load(asked.methods[label]), device(asked.device)
    spec, many = specs_of(asked)
    check(plan, spec, label)
    elements = sum(each.size for each in many) or spec.size
    draws = Draws(elements, at)
    ours = [Ours(plan, specs, asked, draws, at) for specs in ([spec], many) if specs]
    gradient, to = at.empty(spec.size), at.empty(spec.size)
    peers = peers_of(plan.program.main, spec, asked.world_size, at) if asked.peers else []
    theirs = [Theirs(peer.call, gradient, draws, at) for peer in peers]

    def copy() -> float:
        return at.timed(at.copy, to, gradient)[1].seconds

    for each in ours:
        each.warm_up(warm_steps(plan))
    take_turns([*ours, *theirs], 1, copy)  # the first one makes buffers, or compiles
    taken = take_turns([*ours, *theirs], asked.runs, copy)
    found = [each.figures(label, *runs) for each, runs in zip(ours, taken, strict=False)]
    others = [
        each.figures(peer.name, *runs, peer.at_most)
        for each, peer, runs in zip(theirs, peers, taken[len(ours) :], strict=True)
    ]
    rows, columns = spec.shape
    return Measured(label, (rows, columns), elements, found[0], found[1] if many else None, others)


def check(plan: Plan, spec: TensorSpec, label: str) -> None:
    """Refuse a tensor that is sent uncompressed under the plan: its figures would not be the method's.

    Raises:
        ValueError: it does.
    """
    [bucket] = plan.buckets([spec], BY_NAME)
    if bucket.program.main != plan.program.main:
        raise ValueError(
            f"{label} sends a tensor of shape {list(spec.shape)} dense, so its figures would not be the method's: "
            f"give more --elements, or the method a smaller min_elements (now {plan.min_elements})"
        )


def ratio(method: Figures, other: Figures) -> float | None:
    """How many times as long as another a method takes.

    Returns:
        The median of the ratios in each round; None where the other takes no time to speak of, as what is left to
        Horovod.
    """
    if other.in_copies() < NOTHING:
        return None
    return statistics.median(mine / its for mine, its in zip(method.seconds, other.seconds, strict=True))


# -- a process of its own ------------------------------------------------------------------------------


def apart(call: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a fresh process, in which numpy's and PyTorch's libraries have one thread.

    Raises:
        ValueError: the process ended without an answer.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(call, *arguments).result()
    except BrokenProcessPool:
        raise ValueError(
            "the process that measured was ended, perhaps for want of memory: try fewer elements"
        ) from None
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run(asked: Asked, say: Callable[[str], object] = lambda label: None) -> Iterator[Measured]:
    """Measure every method, one after the other, each in a process of its own.

    Args:
        asked: what to measure.
        say: called with each method's label before it is measured.

    Raises:
        ValueError: the device is not there, or a method does not work on the tensor; before anything is measured.
            Or memory did not suffice.
    """
    device(asked.device)
    spec, _ = specs_of(asked)
    for label, plan in asked.methods.items():
        check(load(plan), spec, label)
    for label in asked.methods:
        say(label)
        yield apart(measure, asked, label)
