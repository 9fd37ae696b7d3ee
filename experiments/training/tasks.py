"""The training tasks of experiments: data in memory, the batches that ranks draw, and the net that learns it.

A new task is a loader and a line in :data:`TASKS`; a new net is one in ``models_torch.py`` and a name in :data:`NETS`.
Any net of a task's kind can learn it: ``{task: fashion_mnist, net: lenet5}``. This file needs no framework, so that
``experiments run`` checks names before it starts any rank.
"""

from __future__ import annotations

import gzip
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.registry import suggest

Batch = tuple[np.ndarray, np.ndarray]  # inputs, and the int64 class of each
HELD_OUT_BATCH = 64  #: windows of text per forward pass
HELD_OUT_IMAGES = 500
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  #: where Debian's package dataset-fashion-mnist puts it


@dataclass(frozen=True)
class Images:
    """Labelled pictures in memory: x [N, channels, height, width], y [N] int64."""

    x: np.ndarray
    y: np.ndarray
    x_held_out: np.ndarray
    y_held_out: np.ndarray
    classes: int
    shift: int = 0  # pictures are moved by up to so many pixels while training
    label_noise: float = 0.0  # share of the labels that are drawn at random, again each time
    by_label: float = 0.0  # share of the pictures that are sorted by label, so that ranks have different classes

    def batches(self, rank: int, world_size: int, seed: int, size: int) -> Iterator[Batch]:
        """Yield batches from this rank's shard without end, reshuffled every epoch; they depend on nothing else."""
        random = np.random.default_rng([seed, rank])
        mine = self._shard(rank, world_size)
        order = random.permutation(mine)
        while True:
            while len(order) < size:
                order = np.concatenate([order, random.permutation(mine)])
            chosen, order = order[:size], order[size:]
            x = _shifted(self.x[chosen], random, self.shift) if self.shift else self.x[chosen]
            y = self.y[chosen]
            if self.label_noise:
                drawn = random.integers(0, self.classes, len(y))
                y = np.where(random.random(len(y)) < self.label_noise, drawn, y)
            yield prepare(x), y

    def _shard(self, rank: int, world_size: int) -> np.ndarray:
        """Return the indices of this rank's pictures; with ``by_label``, as in SCAFFOLD (arXiv 1910.06378)."""
        is_sorted = round(self.by_label * len(self.y))
        sorted_part = np.argsort(self.y[:is_sorted], kind="stable")
        own_classes = np.array_split(sorted_part, world_size)[rank]
        return np.concatenate([own_classes, np.arange(is_sorted + rank, len(self.y), world_size)])

    def held_out(self, rank: int, world_size: int) -> Iterator[Batch]:
        """Yield this rank's share of the held-out set."""
        for start in range(rank * HELD_OUT_IMAGES, len(self.y_held_out), world_size * HELD_OUT_IMAGES):
            part = slice(start, start + HELD_OUT_IMAGES)
            yield prepare(self.x_held_out[part]), self.y_held_out[part]


@dataclass(frozen=True)
class Bytes:
    """A text as bytes, cut into windows of ``context`` bytes; the class to predict is the next byte."""

    text: np.ndarray
    text_held_out: np.ndarray
    context: int = 64
    windows_held_out: int = 512
    classes: int = 256

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> Batch:
        window = text[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
        return window[:, :-1], window[:, 1:]

    def batches(self, rank: int, world_size: int, seed: int, size: int) -> Iterator[Batch]:
        """Yield batches of windows at random places of this rank's part of the text, without end."""
        random = np.random.default_rng([seed, rank])
        mine = np.array_split(self.text, world_size)[rank]
        while True:
            yield self._windows(mine, random.integers(0, len(mine) - self.context, size))

    def held_out(self, rank: int, world_size: int) -> Iterator[Batch]:
        """Yield this rank's share of windows spread evenly over the held-out text."""
        last = len(self.text_held_out) - self.context - 1
        starts = np.linspace(0, last, self.windows_held_out).astype(np.int64)[rank::world_size]
        for start in range(0, len(starts), HELD_OUT_BATCH):
            yield self._windows(self.text_held_out, starts[start : start + HELD_OUT_BATCH])


def prepare(x: np.ndarray) -> np.ndarray:
    """Return bytes 0..255 as float32 around zero; anything else as it is."""
    return (x.astype(np.float32) / 255 - 0.5) / 0.25 if x.dtype == np.uint8 else x


def _shifted(x: np.ndarray, random: np.random.Generator, pad: int) -> np.ndarray:
    """Return every picture moved by up to ``pad`` pixels."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="edge")
    # the third draw turned photographs around once; without it, the same seed would draw other batches
    places = random.integers(0, [2 * pad + 1, 2 * pad + 1, 1], (len(x), 3))
    return np.stack([padded[i, :, dy : dy + height, dx : dx + width] for i, (dy, dx, _) in enumerate(places)])


# -- loaders ------------------------------------------------------------------------------------


def digits(**augmented: Any) -> Images:
    """Return the 1797 handwritten digits (8x8) that scikit-learn carries; a quarter is held out."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x, y = (raw.images[:, None] / 16 - 0.3).astype(np.float32), raw.target.astype(np.int64)
    order = np.random.default_rng(1797).permutation(len(y))  # the same ones are held out whatever the seed
    held_out, train = np.split(order, [round(len(y) / 4)])
    return Images(x[train], y[train], x[held_out], y[held_out], classes=10, **augmented)


def noisy_digits() -> Images:
    """Return the same digits, moved by up to a pixel and with a fifth of the labels drawn again each time.

    A net learns the 1348 digits themselves by heart, and its gradients vanish; these it cannot. Held out are the same
    digits as in ``digits``, as they are.
    """
    return digits(shift=1, label_noise=0.2)


def fashion_mnist(folder: Path = FASHION_MNIST) -> Images:
    """Return Fashion-MNIST: 60 000 pictures of clothes (28x28, grey), 10 000 held out (Xiao et al. 2017).

    Args:
        folder: has the four files of MNIST's form.

    Raises:
        FileNotFoundError: there is no such file.
    """
    parts = {
        (part, kind): _idx(folder / f"{part}-{kind}-ubyte.gz")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    }
    (x, y), (x_held_out, y_held_out) = (
        (parts[part, "images-idx3"][:, None], parts[part, "labels-idx1"].astype(np.int64)) for part in ("train", "t10k")
    )
    return Images(x, y, x_held_out, y_held_out, classes=int(y.max()) + 1)


def scaled_fashion_mnist(mean: float, deviation: float = 1.0, held_out: int = 10_000) -> Images:
    """Return Fashion-MNIST with pixels 0..1, minus ``mean``, divided by ``deviation``, as float32.

    The first ``held_out`` of the held-out images are kept.
    """
    raw = fashion_mnist()

    def scaled(x: np.ndarray) -> np.ndarray:
        return ((x.astype(np.float32) / 255 - mean) / deviation).astype(np.float32)

    x_held_out, y_held_out = raw.x_held_out[:held_out], raw.y_held_out[:held_out]
    return replace(raw, x=scaled(raw.x), x_held_out=scaled(x_held_out), y_held_out=y_held_out)


def _idx(file: Path) -> np.ndarray:
    """Return the array of a gzip'd IDX file: 0, 0, type 8 (bytes), dimensions, each size as big-endian int32, data."""
    raw = gzip.decompress(file.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{file} is not an IDX file of unsigned bytes")
    start = 4 + 4 * raw[3]
    return np.frombuffer(raw, np.uint8, offset=start).reshape(np.frombuffer(raw[4:start], ">i4"))


def stdlib_bytes(max_bytes: int = 4_000_000) -> Bytes:
    """Return the source text of this interpreter's standard library; every tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}
    files = sorted(file for file in root.rglob("*.py") if not skip & set(file.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for number, file in enumerate(files):
        content = file.read_bytes()
        parts[number % 10 == 9].append(content)
        total += len(content)
        if total >= max_bytes:
            break
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    if min(len(train), len(held_out)) < 1000:
        raise ValueError(f"the task 'bytes' found only {total} bytes of Python source under {root}")
    return Bytes(train, held_out)


def windows(context: int) -> Bytes:
    """Return that source text in windows of ``context`` bytes; 256 windows are held out."""
    return replace(stdlib_bytes(), context=context, windows_held_out=256)


# -- what can be trained ------------------------------------------------------------------------


class Metric(NamedTuple):
    """A measurement on the held-out set: ``value(nll, correct, count)`` from sums over its examples."""

    unit: str
    higher_is_better: bool
    value: Callable[[float, float, float], float]


ACCURACY = Metric("%", True, lambda nll, correct, count: 100 * correct / count)
BITS_PER_BYTE = Metric("bits", False, lambda nll, correct, count: nll / count / math.log(2))


class Source(NamedTuple):
    """A task's loader, the net that it is trained with unless another is named, its measure, and a folder it needs."""

    load: Callable[..., Images | Bytes]
    net: str
    metric: Metric
    folder: Path | None = None

    def require(self) -> None:
        """Raise ValueError unless the data is on this machine; the message says how to get it."""
        if self.folder and not self.folder.is_dir():
            raise ValueError(f"there is no {self.folder}: apt-get install dataset-fashion-mnist (Debian) brings it")


CENTRED = partial(scaled_fashion_mnist, 0.286)
LIKE_MNIST = partial(scaled_fashion_mnist, 0.1307, 0.3081)  #: as pytorch_mnist.py scales MNIST
TASKS = {
    "digits": Source(digits, "digits_net", ACCURACY),
    "noisy_digits": Source(noisy_digits, "digits_net", ACCURACY),
    "fashion_mnist": Source(fashion_mnist, "lenet5", ACCURACY, FASHION_MNIST),
    "fashion_mnist_centred": Source(CENTRED, "mlp", ACCURACY, FASHION_MNIST),
    # for nets whose evaluation takes long
    "fashion_mnist_short": Source(partial(CENTRED, held_out=2000), "resnet", ACCURACY, FASHION_MNIST),
    # of a rank's pictures, 80 % are of its own classes
    "fashion_mnist_by_label": Source(lambda: replace(CENTRED(), by_label=0.8), "mlp", ACCURACY, FASHION_MNIST),
    "fashion_mnist_example": Source(LIKE_MNIST, "mnist_example", ACCURACY, FASHION_MNIST),
    "bytes": Source(stdlib_bytes, "byte_transformer", BITS_PER_BYTE),
    **{f"bytes{context}": Source(partial(windows, context), "transformer", BITS_PER_BYTE) for context in (32, 48, 128)},
}
NETS = {
    "pictures": (
        *("digits_net", "fnn3", "lenet5", "resnet", "resnet20", "resnet_wide"),
        *("mlp", "mlp_wide", "cnn", "cnn_wide", "mnist_example"),
    ),
    "text": (
        *("byte_transformer", "transformer", "transformer_wide", "transformer_deep"),
        *("byte_lstm", "lstm", "lstm_wide"),
    ),
}  #: by the kind of data that they learn


@cache
def data_of(task: str) -> Images | Bytes:
    """Return a task's data, read once per process."""
    return TASKS[task].load()


def net_of(task: str, net: str | None) -> str:
    """Return the net that learns a task: the one that is named, or the task's own.

    Raises:
        ValueError: there is no such task or net, or the net learns data of another kind.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}{suggest(task, list(TASKS))}; known: {', '.join(TASKS)}")
    own = TASKS[task].net
    known = next(nets for nets in NETS.values() if own in nets)
    if net is not None and net not in known:
        raise ValueError(f"no net {net!r} learns {task!r}{suggest(net, list(known))}; these do: {', '.join(known)}")
    return net or own
