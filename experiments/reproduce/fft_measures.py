"""What FFT's claims need measured in a training: errors of one exchange by tensor, and of number formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.bench import formats
from experiments.reproduce import simulate
from experiments.reproduce.simulate import Moment
from hvdcompress import registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import Method, TensorSpec
from hvdcompress.methods.fft import FFT
from hvdcompress.ops import fast

Vector = np.ndarray[Any, Any]
Settings = dict[str, Any]
LEAST = 1000  #: elements of a tensor that is looked at; smaller ones travel dense by default
USUAL = 0.15  #: FFT's density, 1 − θ, where it is not matched to another method's bytes
#: What FFT is held against at equal bytes. Those with a density get FFT's bytes; to the others' FFT is matched.
RIVALS: Mapping[str, Settings] = {
    "top-k, range floats": {"method": "topk", "values": "rangefloat10"},
    "top-k, fp32": {"method": "topk"},
    "QSGD, 2 bits": {"method": "qsgd", "bits": 2},
    "QSGD, 4 bits": {"method": "qsgd", "bits": 4},
    "TernGrad": {"method": "terngrad", "route": "gather"},
}


def watched(task: Settings, ranks: int, seed: int, samples: int, thetas: Sequence[float]) -> dict[str, Any]:
    """Train dense, and compress the ranks' gradients of some steps by every method, without feedback.

    Args:
        task: the task's settings.
        ranks: simulated ranks.
        seed: of the training.
        samples: steps that are looked at.
        thetas: θ, shares of frequencies and of elements that are dropped, values being sent in full.

    Returns:
        ``tensors``: for each step and tensor what :meth:`Watch.tensor` says; ``formats``: for each step and number
        format bits, name, and the errors ``raw`` and ``kept`` on rank 0's gradients and on their kept frequencies.
    """
    run = simulate.run_of(task, {"method": "none"}, ranks, seed)
    watch = Watch(ranks, thetas)
    trained = simulate.train(run, watch, simulate.spread_out(run.task.steps, samples), until=run.task.steps)
    return {part: [row for found in trained.rows for row in found[part]] for part in ("tensors", "formats")}


class Watch:
    """What is looked at in a step.

    Args:
        ranks: how many exchange.
        thetas: as in :func:`watched`.
    """

    def __init__(self, ranks: int, thetas: Sequence[float]):
        self.ranks, self.thetas = ranks, thetas
        self.nets: dict[str, dict[str, Loopback]] = {}

    def __call__(self, moment: Moment) -> dict[str, list[Settings]]:
        """All tensors of a step that are large enough and not zero, and all number formats."""
        kinds = kinds_of({name: x.shape for name, x in moment.reduced.items()})
        given = {
            name: [gradients[name] for gradients in moment.gradients]
            for name, x in moment.reduced.items()
            if x.size >= LEAST and np.any(moment.gradients[0][name])
        }
        place = {"step": moment.step, "phase": moment.phase}
        raw = [np.ascontiguousarray(ranks[0]).ravel() for ranks in given.values()]
        kept = [formats.kept_frequencies(x, FFT(density=USUAL)) for x in raw]
        return {
            "tensors": [
                {**place, "tensor": name, "kind": kinds[name], **self.tensor(name, ranks)}
                for name, ranks in given.items()
            ],
            "formats": [
                {**place, "bits": bits, "format": name, "raw": formats.error(raw, f), "kept": formats.error(kept, f)}
                for bits, name, f in number_formats()
            ],
        }

    def tensor(self, name: str, gradients: Sequence[Vector]) -> Settings:
        """One tensor.

        Returns:
            ``n``; ``kurtosis`` and ``correlation`` of neighbours, of rank 0's gradient; ``rivals``: by name the errors
            of FFT and of the rival, and their bytes; ``thetas``: by θ the errors of FFT and of top-k.
        """
        mean = np.mean(gradients, axis=0, dtype=np.float64)
        if name not in self.nets:
            self.nets[name] = contenders(TensorSpec(name, mean.shape), self.ranks, self.thetas)
        errors, sent = {}, {}
        for label, net in self.nets[name].items():
            before = net.ledger.bytes_sent(0)
            errors[label] = relative(net.allreduce(gradients, name)[0], mean)
            sent[label] = net.ledger.bytes_sent(0) - before
        about = formats.statistics_of(gradients[0].ravel())
        return {
            "n": mean.size,
            "kurtosis": about.kurtosis,
            "correlation": about.correlation,
            "rivals": {
                rival: {
                    "fft": errors[f"fft for {rival}"],
                    "rival": errors[rival],
                    "bytes": [sent[f"fft for {rival}"], sent[rival]],
                }
                for rival in RIVALS
            },
            "thetas": {str(t): {"fft": errors[f"fft {t}"], "topk": errors[f"topk {t}"]} for t in self.thetas},
        }


def number_formats() -> list[tuple[int, str, Callable[[Vector], Vector]]]:
    """Bits, name, and what writes and reads, of each format: those of ``bench.formats``, and two more of 16 bits."""
    return [*formats.formats(), (16, "rangefloat16", partial(formats.coded, name="rangefloat16")), (16, "fp16", fp16)]


def fp16(x: Vector) -> Vector:
    """The values of x [n] float32 rounded to half precision, unscaled."""
    return np.asarray(fast.from_fp16(fast.to_fp16(x, 1.0)[0], 1.0))


def relative(found: Vector, wanted: Any) -> float:
    """‖found − wanted‖/‖wanted‖; NaN where nothing was wanted."""
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(found - wanted) / norm) if norm else float("nan")


def contenders(spec: TensorSpec, ranks: int, thetas: Sequence[float]) -> dict[str, Loopback]:
    """Every method for a tensor, with densities at which their bytes are equal, or their θ."""
    plans: dict[str, Settings] = {}
    for name, settings in RIVALS.items():
        fft: Settings = {"method": "fft", "density": USUAL}
        if settings["method"] == "topk":
            settings = matched(settings, spec, num_bytes(fft, spec, ranks), ranks)
        else:
            fft = matched(fft, spec, num_bytes(settings, spec, ranks), ranks)
        plans |= {name: settings, f"fft for {name}": fft}
    for theta in thetas:
        same = {"density": 1 - theta, "values": "fp32"}
        plans |= {f"fft {theta}": {"method": "fft", **same}, f"topk {theta}": {"method": "topk", **same}}
    return {name: Loopback(plan, ranks, min_elements=1, feedback="none") for name, plan in plans.items()}


def made(settings: Settings) -> Method:
    """A method from its id and hyper-parameters."""
    return registry.get(settings["method"], **{key: value for key, value in settings.items() if key != "method"})


def num_bytes(settings: Settings, spec: TensorSpec, ranks: int) -> int:
    """Bytes that a rank hands to its collectives."""
    return made(settings).num_bytes(spec, ranks)


def matched(settings: Settings, spec: TensorSpec, most: int, ranks: int) -> Settings:
    """The settings with the largest density whose payload has ``most`` bytes at most."""
    places = spec.size // 2 + 1 if settings["method"] == "fft" else spec.size
    low, high = 1, places
    while low < high:
        middle = (low + high + 1) // 2
        fits = num_bytes({**settings, "density": density(middle, places)}, spec, ranks) <= most
        low, high = (middle, high) if fits else (low, middle - 1)
    return {**settings, "density": density(low, places)}


def density(k: int, places: int) -> float:
    """The density with which about k of the places are kept."""
    return min(1.0, (k + 0.5) / places)


def kinds_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The kind of each tensor's layer: the first half of a net's convolutions are early ones."""
    convolutions = [name for name, shape in shapes.items() if len(shape) == 4]
    early = convolutions[: (len(convolutions) + 1) // 2]

    def kind(name: str) -> str:
        if name in convolutions:
            return "early conv" if name in early else "late conv"
        words = {"lstm": "LSTM", "blocks": "transformer", "embed": "embedding", "position": "embedding"}
        return words.get(name.split(".")[0], "fully connected")

    return {name: kind(name) for name in shapes}
