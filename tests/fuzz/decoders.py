"""Everything that reads bytes from elsewhere: valid ones, and a function that must take any bytes or refuse them.

A decoder's ``decode`` returns, or raises one of ``refuses``: all else is a fault, and so is a result that does not fit
its tensor. Methods are run as a rank runs them, on the collectives of a step in which one round was tampered with.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hvdcompress
from experiments.report import results
from experiments.training.experiment import Experiment
from hvdcompress import registry
from hvdcompress.engine.collectives import has_headers, lift, lower, received_lengths
from hvdcompress.engine.commit import commit_step
from hvdcompress.engine.exchange import Exchange, ExchangeError
from hvdcompress.engine.lockstep import carry_out
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.parts import wire
from hvdcompress.plan import PlanError
from hvdcompress.testing import Case, numbers, plan_for
from tests.variants import variants

ELEMENTS = 600
NOT_SENT = ("feedback", "beta", "momentum", "local_clip_norm")  #: settings that change no payload's form
GUARD = np.float32(-77.0)  #: around a result's memory


@dataclass(frozen=True)
class Decoder:
    """What reads bytes.

    Attributes:
        name: tells it apart, also in its corpus.
        valid: inputs that it takes.
        decode: takes bytes.
        refuses: what it may raise.
    """

    name: str
    valid: tuple[bytes, ...]
    decode: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]

    def outcome(self, data: bytes) -> str:
        """ "taken", or what it was refused with, without the numbers of this case.

        Raises:
            Exception: anything that is not in ``refuses``.
        """
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                self.decode(data)
        except self.refuses as error:
            return (
                type(error).__name__
                + ": "
                + "".join(c for c in str(error).replace(_folder.name, "") if c.isalpha() or c == " ")[:60]
            )
        return "taken"


# -- payloads of methods -------------------------------------------------------------------------------------


class Tampered:
    """A step of two ranks under one method, of which rank 0 gets other bytes than were sent in one round."""

    def __init__(self, plan: Any, spec: TensorSpec, step: int):
        self.bucket, self.step = plan.buckets([spec])[0], step
        self.ranks = [RankState(plan, rank, 2) for rank in range(2)]
        size = spec.size
        self.guarded = np.full(size + 64, GUARD, np.float32)
        self.out = self.guarded[32 : 32 + size]
        self.gradients = [numbers((size,), rank, kind="heavy") for rank in range(2)]
        self.rounds: list[tuple[Any, bytes]] = []  # rank 0's result, and what rank 1 sent
        for now in range(step + 1):
            self._undisturbed(commit=now < step)

    def _undisturbed(self, commit: bool) -> None:
        self.rounds = []
        outs = [np.empty(self.bucket.spec.size, np.float32) for _ in range(2)]
        exchanges = [self._started(rank, out) for rank, out in enumerate(outs)]
        while exchanges[0].collective is not None:
            requests = [lower(one.collective, rank, 2, fast, one.x) for rank, one in enumerate(exchanges)]
            results = [np.array(result) for result in carry_out(requests)]
            gathers = isinstance(exchanges[0].collective, AllGather)
            sent = np.asarray(requests[1].payload).tobytes() if gathers else results[0].tobytes()
            self.rounds.append((results[0].copy(), sent))
            for one, request, result in zip(exchanges, requests, results, strict=True):
                found = has_headers(one.collective)
                lengths = received_lengths(result, one.collective, 2, fast) if found else request.recv_lengths
                one.resume(lift(one.collective, result, lengths or (), fast))
        for rank, one in zip(self.ranks, exchanges, strict=True):
            one.deliver(0.5)
            commit_step(rank, [one], commit)

    def _started(self, rank: int, out: Any) -> Exchange:
        gradient = self.gradients[rank].copy()
        exchange = Exchange(self.ranks[rank], Group(rank, 2), self.bucket, gradient, fast)
        exchange.add([0], [gradient], [out])
        exchange.start()
        return exchange

    def decode(self, number: int, told: bool, data: bytes) -> None:
        """Run rank 0 through the step, with ``data`` in the place of what came in a round.

        Args:
            number: the round.
            told: the network says how long each gathered payload is, as MPI does; else headers do, as under Horovod.
            data: what rank 1 sent, where it is gathered; else rank 0's whole result.
        """
        self.guarded.fill(GUARD)
        exchange = self._started(0, self.out)
        try:
            for at, (result, _) in enumerate(self.rounds):
                collective = exchange.collective
                assert collective is not None, "the method asks for fewer collectives"
                if isinstance(collective, AllGather):
                    own, got = collective.x, result
                    if at == number:
                        got = np.concatenate([own, np.frombuffer(data, np.uint8)])
                    by_header = at != number or not told
                    lengths = received_lengths(got, collective, 2, fast) if by_header else [len(own), len(data)]
                else:
                    got = result.copy()
                    if at == number:  # networks keep lengths
                        whole = (data + bytes(got.nbytes))[: got.nbytes]
                        got = np.frombuffer(bytearray(whole), got.dtype)
                    if has_headers(collective):
                        lengths = received_lengths(got, collective, 2, fast)
                    else:
                        lengths = lower(collective, 0, 2, fast, exchange.x).recv_lengths or ()
                exchange.resume(lift(collective, got, lengths, fast))
            assert exchange.collective is None, "the method asks for more collectives"
            exchange.deliver(0.5)
        except ExchangeError as error:
            if isinstance(error.__cause__, wire.WireError):
                raise error.__cause__ from None
            raise
        finally:
            exchange.abandon()
        assert (self.guarded[:32] == GUARD).all() and (self.guarded[-32:] == GUARD).all(), (
            "written outside of the result"
        )


def _methods() -> Iterator[Decoder]:
    for id in hvdcompress.available():
        cls = registry.classes()[id]
        for label, settings in variants(cls).items():
            if not settings.keys() & set(NOT_SENT) and settings.get("density") not in (1.0, 1e-9):
                yield from _rounds_of(f"method-{id}-{label}", cls(**registry.expand_paper_settings(cls, settings)))


def _rounds_of(label: str, method: Any) -> Iterator[Decoder]:
    shape = Case(method).shape(ELEMENTS)
    spec = TensorSpec("w", shape)
    if not method.suits(spec):
        return
    for step in (0, 3) if len(method.phases) > 1 else (1,):
        tampered = Tampered(plan_for(method), spec, step)
        for number, (result, sent) in enumerate(tampered.rounds):
            floats = result.dtype.kind == "f"  # whatever bytes they have, they are numbers: one run is enough
            for told in (False,) if floats or len(result) != 2 * len(sent) else (False, True):
                name = f"{label}-step{step}-round{number}{'-told' if told else ''}"
                decode = functools.partial(tampered.decode, number, told)
                yield Decoder(name.replace("=", "-").replace(",", "-"), (sent,), decode, (wire.WireError,))


# -- headers, files ------------------------------------------------------------------------------------------


def _headers() -> Iterator[Decoder]:
    one = wire.Header("topk", 1, 2, 1000, 10, 60)
    two = wire.Header("qsgd", 0, 5, 1000, 1000, 28)
    payloads = tuple(wire.pack(header) + bytes(header.length - wire.NUM_BYTES) for header in (one, two))

    def check(data: bytes) -> None:
        wire.check(data, len(data), one)

    def split(data: bytes) -> None:
        assert sum(wire.split(data, 2)) == len(data)

    yield Decoder("wire-check", payloads[:1], check, (wire.WireError,))
    yield Decoder("wire-split", (b"".join(payloads), payloads[1] * 2), split, (wire.WireError,))


def _saved() -> tuple[dict[str, Any], RankState, Any]:
    plan = plan_for(hvdcompress.get_method("powersgd", matrix_rank=2))
    spec = TensorSpec("w", (20, 30))
    tampered = Tampered(plan, spec, 1)
    return tampered.ranks[0].state_dict(), RankState(plan, 0, 2), plan.buckets([spec])


def _checkpoints(folder: Path) -> Iterator[Decoder]:
    saved, rank, buckets = _saved()
    data = checkpoint.to_bytes(saved)

    def load(bytes_: bytes) -> None:
        rank.load_state_dict(checkpoint.from_bytes(bytes_), lambda: buckets)

    def load_folder(bytes_: bytes) -> None:
        checkpoint.path_of(folder, 0, 2, 1).write_bytes(bytes_)
        rank.load_state_dict(checkpoint.load(folder, 0, 2), lambda: buckets)

    def other_world_size(bytes_: bytes) -> None:
        checkpoint.path_of(folder, 0, 2, 1).write_bytes(bytes_)
        checkpoint.load(folder, 0, 3)

    yield Decoder("checkpoint-bytes", (data,), load, (ValueError,))
    checkpoint.save({**saved, "rank": 1}, folder)
    whole = checkpoint.save(saved, folder).read_bytes()
    refuses = (ValueError, FileNotFoundError)
    yield Decoder("checkpoint-folder", (whole,), load_folder, refuses)
    yield Decoder("checkpoint-resharded", (whole,), other_world_size, refuses)


PLAN = b"""method: scalecom
density: 0.01
warmup: {steps: 100}
schedule: {density: {steps: {100: 0.1, 200: 0.01}}}
rules:
  - match: {name: "conv*", ndim: 4, min_size: 1000}
    method: powersgd
    matrix_rank: 4
  - match: {max_size: 10}
    method: none
"""
EXPERIMENT = b"""name: small
tasks: [{task: digits, label: d, steps: 20, batch_size: 4, learning_rate: 0.1}]
methods:
  - none
  - {method: topk, density: 0.01, label: sparse}
ranks: 2
seeds: [0]
"""
METRICS = b'{"step": 1, "loss": 2.5, "sent": 100}\n{"step": 2, "loss": NaN, "sent": 200}\n'


def _files(folder: Path) -> Iterator[Decoder]:
    def reading(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        file = folder / name

        def decode(data: bytes) -> None:
            file.write_bytes(data)
            read(file)

        return decode

    yield Decoder("plan", (PLAN,), reading("plan.yaml", hvdcompress.load_plan), (PlanError,))
    yield Decoder("experiment", (EXPERIMENT,), reading("experiment.yaml", Experiment.open), (PlanError,))
    yield Decoder("metrics", (METRICS,), reading("metrics.jsonl", results.read_lines), ())


_folder = tempfile.TemporaryDirectory(prefix="hvdcompress-fuzz-")


@functools.cache
def decoders() -> dict[str, Decoder]:
    """Return all decoders, by name."""
    folder = Path(_folder.name)
    for name in ("state", "files"):
        (folder / name).mkdir()
    each = (*_headers(), *_checkpoints(folder / "state"), *_files(folder / "files"), *_methods())
    return {decoder.name: decoder for decoder in each}
