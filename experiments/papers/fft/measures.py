"""What FFT's claims need measured: errors of one exchange and of number formats in a training, and codec times.

A format's error is ‖decoded − x‖/‖x‖ over all tensors of a rank in a step, each coded by itself: of a gradient, or of
the frequencies that ``fft`` keeps of it. A uniform code has 2^N − 1 levels from −max|x| to max|x|, rounded to nearest;
fp8 is scaled so that max|x| is its largest number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from experiments import nets
from experiments.bench.lockstep import PARTS, time_steps
from experiments.papers import simulate
from experiments.training.simulate import Moment
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec, Workspace
from hvdcompress.methods.fft import FFT
from hvdcompress.ops import fast
from hvdcompress.parts.codecs import codec
from hvdcompress.plan import load_plan

Vector = np.ndarray[Any, Any]
BITS = (6, 7, 8, 9, 10)  #: of the range floats, uniform codes and other floats
EXPONENTS = (3, 4, 5)  #: bits of the other floats' exponents


def uniform(x: Vector, bits: int) -> Vector:
    """Return x [n] float32 as rounded to 2^bits − 1 levels."""
    step = np.abs(x).max() / (2 ** (bits - 1) - 1)
    return np.rint(x / step).astype(np.float32) * step


def coded(x: Vector, name: str) -> Vector:
    """Return x [n] float32 as a codec of values writes and reads it."""
    made = codec(name)
    return np.asarray(made.decode(made.encode(x, None, Workspace(fast)), len(x), fast))  # type: ignore[arg-type]


def fp8(x: Vector, dtype: torch.dtype) -> Vector:
    """Return x [n] float32 as scaled to the range of an 8-bit float and rounded to it."""
    scale = torch.finfo(dtype).max / float(np.abs(x).max())
    return (torch.from_numpy(x * np.float32(scale)).to(dtype).to(torch.float32) / scale).numpy()


def small_float(x: Vector, exponent: int, mantissa: int) -> Vector:
    """Return x [n] float32 as scaled to the range of a float with so many bits of each, and rounded to nearest even."""
    largest = np.float32(2.0 - 2.0**-mantissa)  # with the exponent 0; the least normal number's is 2 − 2^exponent
    scale = largest / np.abs(x).max()
    _, above = np.frexp(x * scale)  # |x| < 2^above
    ulp = np.ldexp(np.float32(1.0), np.maximum(above - 1, 2 - 2**exponent) - mantissa)
    return np.asarray(np.rint(x * scale / ulp) * ulp / scale)


def formats() -> list[tuple[int, str, Callable[[Vector], Vector]]]:
    """Return bits, name, and what writes and reads, of each format."""
    made: list[tuple[int, str, Callable[[Vector], Vector]]] = []
    for n in BITS:
        made += [(n, "uniform", partial(uniform, bits=n)), (n, f"rangefloat{n}", partial(coded, name=f"rangefloat{n}"))]
        made += [(n, f"e{e}m{n - 1 - e}", partial(small_float, exponent=e, mantissa=n - 1 - e)) for e in EXPONENTS]
    made += [
        (8, "fp8 e4m3", partial(fp8, dtype=torch.float8_e4m3fn)),
        (8, "fp8 e5m2", partial(fp8, dtype=torch.float8_e5m2)),
    ]
    return made + [(16, name, partial(coded, name=name)) for name in ("bf16", "fp16", "rangefloat16")]


def kept_frequencies(x: Vector, method: FFT) -> Vector:
    """Return real and imaginary parts of the frequencies of x [n] that the method sends, alternating [2·k]."""
    return fast.largest_frequencies(x, method.block_length(len(x)), method.num_kept(TensorSpec("x", (len(x),))))[1]


def error(xs: Iterable[Vector], change: Callable[[Vector], Vector]) -> float:
    """Return the error of vectors that are changed each by itself, relative to all of them together."""
    pairs = [(np.square(change(x) - x, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()) for x in xs]
    lost, there = np.sum(pairs, axis=0)
    return float(np.sqrt(lost / there))


def statistics_of(x: Vector) -> dict[str, float]:
    """Return what decides whether elements or frequencies of x [n] are better left out.

    Returns:
        ``correlation`` of neighbours in memory (lag-1 autocorrelation), and ``kurtosis`` of the elements: 3 for a
        normal distribution, more with heavy tails.
    """
    centred = x - x.mean(dtype=np.float64)
    variance = np.square(centred).mean()
    lagged, fourth = (centred[1:] * centred[:-1]).mean(), (centred**4).mean()
    return {"correlation": float(lagged / variance), "kurtosis": float(fourth / variance**2)}


Settings = dict[str, Any]
LEAST = 1000  #: elements of a tensor that is looked at; smaller ones are sent dense by default
USUAL = 0.15  #: FFT's density, 1 − θ, where it is not matched to another method's bytes
#: What FFT is compared with at equal bytes. Those with a density get FFT's bytes; FFT is matched to the others'.
RIVALS: Mapping[str, Settings] = {
    "top-k, range floats": {"method": "topk", "values": "rangefloat10"},
    "top-k, fp32": {"method": "topk"},
    "QSGD, 2 bits": {"method": "qsgd", "bits": 2},
    "QSGD, 4 bits": {"method": "qsgd", "bits": 4},
    "TernGrad": {"method": "terngrad", "route": "gather"},
}
EQUAL = f"top-k at θ {1 - USUAL:g}"  #: values are sent in full
FEW, MANY = 2, 8  #: ranks that codecs are timed with
WARM = 2  #: steps before the first that counts: buffers are made, kernels compiled, thresholds learned


# -- in a training -------------------------------------------------------------------------------


def watched(task: Settings, ranks: int, seed: int, samples: int = 6) -> list[Settings]:
    """Train dense, and compress the ranks' gradients of some steps by every method, without feedback.

    Args:
        task: the training.
        ranks: simulated ones.
        seed: of the training.
        samples: steps that are looked at.

    Returns:
        Records with ``step`` and ``phase``, of two kinds. "exchange": ``tensor``, its ``layers``, ``kurtosis`` and
        ``correlation`` of neighbours, and for each ``rival`` the errors of ``fft`` and of the ``other``, and what they
        sent, ``fft_bytes`` and ``other_bytes``. "format": ``bits``, ``format``, and its errors ``raw`` and ``kept`` on
        rank 0's gradients and on the frequencies that are kept of them.
    """
    networks: dict[str, dict[str, tuple[Loopback, Loopback]]] = {}

    def look(moment: Moment) -> list[Settings]:
        layers = layers_of({name: x.shape for name, x in moment.reduced.items()})
        rows: list[Settings] = []
        raw = []
        for name, like in moment.reduced.items():
            gradients = [each[name] for each in moment.gradients]
            if like.size >= LEAST and np.any(gradients[0]):
                if name not in networks:
                    networks[name] = rivals_of(TensorSpec(name, like.shape), ranks)
                place = {"kind": "exchange", "tensor": name, "layers": layers[name]}
                rows += [{**place, **row} for row in exchanges(networks[name], gradients)]
                raw.append(np.ascontiguousarray(gradients[0]).ravel())
        kept = [kept_frequencies(x, FFT(density=USUAL)) for x in raw]
        for bits, name, change in formats():
            rows.append(
                {"kind": "format", "bits": bits, "format": name, "raw": error(raw, change), "kept": error(kept, change)}
            )
        return rows

    return simulate.watch(task, {"method": "none"}, ranks, seed, look, simulate.spread_out(task["steps"], samples))


def exchanges(networks: Mapping[str, tuple[Loopback, Loopback]], gradients: Sequence[Vector]) -> list[Settings]:
    """Exchange one tensor by FFT and by each rival; return errors ‖ĝ − ḡ‖/‖ḡ‖ and bytes, by rival."""
    mean = np.mean(gradients, axis=0, dtype=np.float64)
    about = statistics_of(np.ascontiguousarray(gradients[0]).ravel())
    rows = []
    for rival, pair in networks.items():
        row = {"rival": rival, **about}
        for name, net in zip(("fft", "other"), pair, strict=True):
            before = net.ledger.bytes_sent(0)
            row[name] = float(np.linalg.norm(net.allreduce(gradients)[0] - mean) / np.linalg.norm(mean))
            row[f"{name}_bytes"] = net.ledger.bytes_sent(0) - before
        rows.append(row)
    return rows


def rivals_of(spec: TensorSpec, ranks: int) -> dict[str, tuple[Loopback, Loopback]]:
    """Return FFT and each rival for a tensor, with densities at which their bytes are equal, and top-k at equal θ."""
    plans: dict[str, tuple[Settings, Settings]] = {}
    for name, rival in RIVALS.items():
        fft: Settings = {"method": "fft", "density": USUAL}
        if rival["method"] == "topk":
            rival = matched(rival, spec, num_bytes(fft, spec, ranks), ranks)
        else:
            fft = matched(fft, spec, num_bytes(rival, spec, ranks), ranks)
        plans[name] = fft, rival
    same = {"density": USUAL, "values": "fp32"}
    plans[EQUAL] = {"method": "fft", **same}, {"method": "topk", **same}
    common = {"min_elements": 1, "feedback": "none"}
    return {
        name: (Loopback({**fft, **common}, ranks), Loopback({**other, **common}, ranks))
        for name, (fft, other) in plans.items()
    }


def num_bytes(settings: Settings, spec: TensorSpec, ranks: int) -> int:
    """Return the bytes that a rank passes to its collectives."""
    return load_plan(settings).program.main.num_bytes(spec, ranks)


def matched(settings: Settings, spec: TensorSpec, most: int, ranks: int) -> Settings:
    """Return the settings with the largest density whose payload has at most ``most`` bytes."""
    places = spec.size // 2 + 1 if settings["method"] == "fft" else spec.size
    counts = range(1, places + 1)
    fit = bisect_right(counts, most, key=lambda k: num_bytes({**settings, "density": density(k, places)}, spec, ranks))
    return {**settings, "density": density(max(fit, 1), places)}


def density(k: int, places: int) -> float:
    """Return a density with which k of the places are kept."""
    return min(1.0, (k + 0.5) / places)


def layers_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the kind of each tensor's layer; the first half of the convolutions of a net are early ones."""
    convolutions = [name for name, shape in shapes.items() if len(shape) == 4]
    early = convolutions[: (len(convolutions) + 1) // 2]
    words = {"lstm": "LSTM", "blocks": "transformer", "embed": "embedding", "position": "embedding"}
    found = {name: words.get(name.split(".")[0], "fully connected") for name in shapes}
    return found | {name: "early conv" if name in early else "late conv" for name in convolutions}


# -- on this machine -----------------------------------------------------------------------------


def codecs(net: str, small: str, method: Settings, seed: int, runs: int = 3) -> Settings:
    """Time a rank's side of an exchange on one core.

    Args:
        net: in :data:`experiments.nets.NETS`; two ranks exchange its tensors.
        small: one of its tensors, which two and eight ranks exchange.
        method: a plan.
        seed: of the gradients.
        runs: steps that count.

    Returns:
        ``seconds`` of the net's tensors, and of the parts of it; ``further``, seconds that each further rank adds.
    """
    shapes = nets.get(net)
    one = {small: shapes[small]}

    def parts(tensors: nets.Shapes, world_size: int) -> Settings:
        specs = [TensorSpec(name, shape) for name, shape in tensors.items()]
        spent = time_steps(load_plan(method), specs, world_size, runs, WARM, seed=seed)[list(PARTS)]
        return {"seconds": spent.sum(axis=1).median(), **spent.median()}

    added = parts(one, MANY)["seconds"] - parts(one, FEW)["seconds"]
    share = nets.total(one) / nets.total(shapes)
    return {**parts(shapes, FEW), "further": max(added, 0.0) / (MANY - FEW) / share}
