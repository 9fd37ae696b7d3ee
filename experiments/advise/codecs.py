"""The seconds of a method's codec on this device, through the engine: the calls that a driver makes for a gradient.

Ranks in lockstep in one process (``bench.side``), timed in the thread's own time, so that what other processes take
does not count. From tensors of four sizes among two numbers of ranks come the constants of ``cost.Codec``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from experiments.advise.profile import MeasuredCodec
from experiments.bench import devices
from experiments.bench.lockstep import time_steps, warm_steps
from experiments.scale import cost, imagined
from experiments.scale.cost import Codec
from experiments.scale.model import SIZES, fit_codec, name_of
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import plan_of

__all__ = ["Known", "time_codec"]

LARGE = ((1 << 22,), (2048, 2048), (512, 912, 3, 3))  # no cache holds it, as none holds a net's gradients
WORLD_SIZES = (2, 4)
REPEATS = 4
LONGEST_WARM_UP = 200  # steps until a method is in its last phase; of longer ones the first phase is timed


def time_codec(method: Method, device: str = "cpu") -> MeasuredCodec:
    """Time one rank's codec: up to the last collective, and after it.

    Args:
        method: whose codec.
        device: where gradients lie, "cpu" or "cuda".
    """
    at, phase = devices.device(device), imagined.last_phase(method)
    plan = plan_of(method, min_elements=1)
    rows: dict[str, list[tuple[float, ...]]] = {"encode": [], "decode": []}
    warm = min(warm_steps(plan), LONGEST_WARM_UP)
    for candidates in (*SIZES, LARGE):
        spec = next((spec for shape in candidates if method.suits(spec := TensorSpec("timed", shape))), None)
        if spec is None:
            continue
        for world_size in WORLD_SIZES:
            found = time_steps(plan, [spec], world_size, REPEATS, warm, at)
            pieces, num_bytes = cost.gathered(imagined.imagine(method, phase, world_size, spec), world_size)
            for part, of in (("encode", ("encode",)), ("decode", ("decode", "apply"))):
                seconds = statistics.median(map(sum, zip(*(found[one] for one in of), strict=True)))
                if seconds > 0:
                    rows[part].append((1.0, spec.size, pieces, num_bytes, seconds))
    return MeasuredCodec.of(*(fit_codec(rows[part]) if rows[part] else Codec() for part in ("encode", "decode")))


class Known:
    """Codecs that were timed, and those that are timed when they are asked for.

    Args:
        codecs: by name, as a profile has them; what is timed is added.
        say: called with a method's name before it is timed.
        device: where gradients lie.
    """

    def __init__(
        self, codecs: dict[str, MeasuredCodec], say: Callable[[str], None] = lambda text: None, device: str = "cpu"
    ):
        self.codecs, self.say, self.device = codecs, say, device

    def __call__(self, method: Method) -> tuple[Codec, Codec]:
        """A method's codec before its last collective, and after it."""
        if method.identity and method.feedback == "none":
            return Codec(), Codec()  # the gradient itself travels
        name = name_of(method)
        if name not in self.codecs:
            self.say(f"timing {name}")
            self.codecs[name] = time_codec(method, self.device)
        return self.codecs[name].codecs

    def time_all(self, methods: Iterable[Method]) -> None:
        """Time those that are not known."""
        for method in methods:
            self(method)
