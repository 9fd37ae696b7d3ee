"""A profile: what was measured of a training, its link and its device, as a JSON file that advice is made from.

The file has a version and no code in it. What a purchase would change can be replaced: the link, the ranks, how many of
them share a processor.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from experiments import nets
from experiments.advise.losses import Trial
from experiments.advise.timeline import Link, Times
from experiments.configfile import NAME, ConfigFile, Real
from experiments.scale.cost import Codec

__all__ = ["VERSION", "MeasuredCodec", "MeasuredLink", "MeasuredStep", "MeasuredTimes", "Profile"]

VERSION = 1
CYCLE = 1e-3  #: seconds: Horovod looks so often for what has come (HOROVOD_CYCLE_TIME's default)
NotNegative = Field(ge=0, allow_inf_nan=False)


class Part(BaseModel):
    """A part of a profile."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MeasuredLink(Part):
    """A link; see :class:`timeline.Link`."""

    rate: Real = Field(gt=0, allow_inf_nan=False)
    message: Real = NotNegative
    round: Real = NotNegative
    call: Real = NotNegative
    overlap: Real = Field(ge=0, le=1)

    @property
    def link(self) -> Link:
        """For the time line."""
        return Link(**self.model_dump(), window=min(CYCLE, self.round))


class MeasuredTimes(Part):
    """The times of a step without an exchange; see :class:`timeline.Times`."""

    forward: Real = NotNegative
    backward: Real = NotNegative
    update: Real = NotNegative
    waits: bool = False
    ready: dict[str, Real]


class MeasuredCodec(Part):
    """One rank's processor seconds by ``cost.Codec``: up to the last collective, and after it."""

    encode: list[Real]
    decode: list[Real]

    @classmethod
    def of(cls, encode: Codec, decode: Codec) -> MeasuredCodec:
        """From fitted codecs."""
        return cls(encode=list(asdict(encode).values()), decode=list(asdict(decode).values()))

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Before the last collective, and after it."""
        return Codec(*self.encode), Codec(*self.decode)


class MeasuredStep(Part):
    """The step of a plan, in seconds: the median of some."""

    plan: dict[str, Any]
    seconds: Real = Field(gt=0, allow_inf_nan=False)


class Profile(ConfigFile):
    """What advice is made from.

    ``shared``: ranks that shared a processor, as measured; ``memory``: bytes that were free; ``dense``: seconds of a
    dense step over ``link``, as measured, which the link's costs are brought into line with; ``compressed``: those of a
    step under ``calibrate.REFERENCE``; ``steps``: those of plans whose predictions were close to each other;
    ``trials``: trainings of plans against dense ones.
    """

    what: ClassVar[str] = "profile"
    entries: ClassVar[dict[str, type[BaseModel]]] = {}

    version: int
    name: str = Field("profile", pattern=NAME)
    made: str = ""
    """The day."""
    ranks: int = Field(1, ge=1)
    shared: Real = Field(1.0, ge=1, allow_inf_nan=False)
    memory: int | None = Field(None, ge=0)
    driver: Literal["Horovod", "DDP"] = "Horovod"
    tensors: dict[str, list[int]]
    """Shapes by name."""
    times: MeasuredTimes
    link: MeasuredLink | None = None
    dense: Real | None = Field(None, gt=0, allow_inf_nan=False)
    compressed: Real | None = Field(None, gt=0, allow_inf_nan=False)
    codecs: dict[str, MeasuredCodec] = {}
    """By the methods' names as ``scale.model.name_of`` writes them."""
    steps: list[MeasuredStep] = []
    trials: list[Trial] = []

    def _check(self) -> None:
        if self.version != VERSION:
            raise self.error(
                ("version",), f"{self.version}: this version of hvdcompress reads {VERSION}; measure again"
            )
        if not self.tensors:
            raise self.error(("tensors",), "there are none")
        for name, shape in self.tensors.items():
            if any(n < 1 for n in shape):
                raise self.error(("tensors", name), f"{shape!r} is not a shape: write positive whole numbers")
            if name not in self.times.ready:
                raise self.error(("times", "ready", name), "is missing")
        for name, seconds in self.times.ready.items():
            if name not in self.tensors:
                raise self.error(("times", "ready", name), "is no tensor of this profile")
            if not 0 <= seconds <= self.times.backward * (1 + 1e-9) or not math.isfinite(seconds):
                raise self.error(
                    ("times", "ready", name),
                    f"{seconds!r}: must lie within the backward pass of {self.times.backward} s",
                )
        for name, codec in self.codecs.items():
            for part in ("encode", "decode"):
                found = getattr(codec, part)
                if len(found) != 4 or not all(math.isfinite(n) and n >= 0 for n in found):
                    raise self.error(("codecs", name, part), f"{found!r}: must be four numbers, none below 0")

    @property
    def shapes(self) -> nets.Shapes:
        """Shapes by name."""
        return {name: tuple(shape) for name, shape in self.tensors.items()}

    def times_if(self, shared: float) -> Times:
        """The step's times if so many ranks share a processor."""
        slower = 1.0 if self.times.waits else shared / self.shared
        return Times(
            {name: seconds * slower for name, seconds in self.times.ready.items()},
            self.times.backward * slower,
            self.times.forward * slower,
            self.times.update * shared / self.shared,
            self.times.waits,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self.model_dump(exclude_none=True)

    def save(self, file: Path) -> None:
        """Write it as JSON; :meth:`open` reads the same back."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def made_of(cls, **given: Any) -> Self:
        """A checked profile of these values."""
        return cls.open({"version": VERSION, **given})
