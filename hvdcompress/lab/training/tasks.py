"""The training tasks of an experiment: where the data comes from and which net learns it.

Adding a task is adding one loader under the ``@task`` decorator. This file needs numpy only, so that
``hvdcompress run`` can check a task's name and path before it starts any rank; the nets, which need
PyTorch, are in ``models_torch.py``.
"""

from __future__ import annotations

import math
import pickle
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]  # inputs, and the int64 class of each
HELD_OUT_BATCH = 64


class Metric(NamedTuple):
    """A measurement on the held-out set: ``value(nll, correct, count)`` from sums over its examples."""

    name: str
    unit: str
    higher_is_better: bool
    value: Callable[[float, float, float], float]


ACCURACY = Metric("held-out accuracy", "%", True, lambda nll, correct, count: 100 * correct / count)
BITS_PER_BYTE = Metric("held-out bits per byte", "bits", False, lambda nll, correct, count: nll / count / math.log(2))


@dataclass(frozen=True)
class Images:
    """Labelled pictures in memory: x [N, channels, height, width], y [N] int64."""

    x: np.ndarray
    y: np.ndarray
    x_held_out: np.ndarray
    y_held_out: np.ndarray
    classes: int
    flip: bool = False  # mirrored and shifted copies while training: right for photographs, wrong for digits

    def batches(self, rank: int, world: int, seed: int, size: int) -> Iterator[Batch]:
        """Endless batches from this rank's shard, reshuffled every epoch; they depend on nothing else."""
        random = np.random.default_rng([seed, rank])
        mine = np.arange(rank, len(self.y), world)
        order = random.permutation(mine)
        while True:
            while len(order) < size:
                order = np.concatenate([order, random.permutation(mine)])
            chosen, order = order[:size], order[size:]
            yield prepare(_shifted(self.x[chosen], random) if self.flip else self.x[chosen]), self.y[chosen]

    def held_out(self, rank: int, world: int) -> Iterator[Batch]:
        """This rank's share of the held-out set."""
        for start in range(rank * HELD_OUT_BATCH, len(self.y_held_out), world * HELD_OUT_BATCH):
            part = slice(start, start + HELD_OUT_BATCH)
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

    def batches(self, rank: int, world: int, seed: int, size: int) -> Iterator[Batch]:
        """Endless batches of windows at random places of this rank's part of the text."""
        random = np.random.default_rng([seed, rank])
        mine = np.array_split(self.text, world)[rank]
        while True:
            yield self._windows(mine, random.integers(0, len(mine) - self.context, size))

    def held_out(self, rank: int, world: int) -> Iterator[Batch]:
        """This rank's share of windows spread evenly over the held-out text."""
        last = len(self.text_held_out) - self.context - 1
        starts = np.linspace(0, last, self.windows_held_out).astype(np.int64)[rank::world]
        for start in range(0, len(starts), HELD_OUT_BATCH):
            yield self._windows(self.text_held_out, starts[start : start + HELD_OUT_BATCH])


@dataclass(frozen=True)
class Task:
    """A task's loader, the name of its net in ``models.py`` (or ``models_tensorflow.py``), and its measure."""

    id: str
    load: Callable[..., Images | Bytes]
    model: str
    metric: Metric
    needs_path: bool
    frameworks: tuple[str, ...]


TASKS: dict[str, Task] = {}


def task(
    id: str, *, model: str, metric: Metric, needs_path: bool = False, frameworks: tuple[str, ...] = ("torch",)
) -> Callable[[Any], Any]:
    """Register a loader; it is called with the task's settings (``path``, ``image_size``) as keywords."""

    def register(load: Callable[..., Images | Bytes]) -> Callable[..., Images | Bytes]:
        TASKS[id] = Task(id, load, model, metric, needs_path, frameworks)
        return load

    return register


def prepare(x: np.ndarray) -> np.ndarray:
    """Bytes 0..255 as float32 around zero; anything else as it is."""
    return (x.astype(np.float32) / 255 - 0.5) / 0.25 if x.dtype == np.uint8 else x


def _shifted(x: np.ndarray, random: np.random.Generator, pad: int = 2) -> np.ndarray:
    """Every picture moved by up to ``pad`` pixels, and half of them mirrored."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="edge")
    out = np.empty_like(x)
    for i, (dy, dx, mirror) in enumerate(random.integers(0, [2 * pad + 1, 2 * pad + 1, 2], (len(x), 3))):
        moved = padded[i, :, dy : dy + height, dx : dx + width]
        out[i] = moved[:, :, ::-1] if mirror else moved
    return out


def split(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and held out: always the same ones, whatever the experiment's seed."""
    order = np.random.default_rng(1797).permutation(count)
    held_out = max(1, round(count * share))
    return order[held_out:], order[:held_out]


@task("digits", model="digits_net", metric=ACCURACY, frameworks=("torch", "tensorflow"))
def digits(**_: Any) -> Images:
    """The 1797 handwritten digits (8x8) that scikit-learn carries; a quarter is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the task 'digits' needs scikit-learn: pip install scikit-learn") from None
    raw = load_digits()
    x, y = (raw.images[:, None] / 16 - 0.3).astype(np.float32), raw.target.astype(np.int64)
    train, held_out = split(len(y), 0.25)
    return Images(x[train], y[train], x[held_out], y[held_out], classes=10)


@task("bytes", model="byte_transformer", metric=BITS_PER_BYTE)
def stdlib_bytes(*, max_bytes: int = 4_000_000, **_: Any) -> Bytes:
    """The source text of this interpreter's standard library; every tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}
    files = sorted(file for file in root.rglob("*.py") if not skip & set(file.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for i, file in enumerate(files):
        content = file.read_bytes()
        parts[i % 10 == 9].append(content)
        total += len(content)
        if total >= max_bytes:
            break
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    if min(len(train), len(held_out)) < 1000:
        raise ValueError(f"the task 'bytes' found only {total} bytes of Python source under {root}")
    return Bytes(train, held_out)


@task("cifar10", model="resnet", metric=ACCURACY, needs_path=True)
def cifar10(*, path: str, **_: Any) -> Images:
    """CIFAR-10, the "python" or the "binary" download, unpacked in the folder ``path``."""
    folder = _folder(path)
    for candidate in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix, read in (("", _cifar_python), (".bin", _cifar_binary)):
            train = sorted(f for f in candidate.glob(f"data_batch_*{suffix}") if f.suffix == suffix)
            test = candidate / f"test_batch{suffix}"
            if train and test.is_file():
                batches = [read(file) for file in train]
                x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
                return Images(x, y, *read(test), classes=10, flip=True)
    raise ValueError(
        f"no CIFAR-10 in {folder}: expected data_batch_1 … and test_batch (the 'python' version), "
        "or data_batch_1.bin … and test_batch.bin (the 'binary' version)"
    )


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any code; CIFAR-10's files need these four names and get no other."""

    allowed = {"_reconstruct", "ndarray", "dtype", "encode"}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in {"numpy", "_codecs"} or name not in self.allowed:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which CIFAR-10's files do not contain")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _cifar_python(file: Path) -> Batch:
    try:
        with file.open("rb") as stream:
            raw = _ArraysOnly(stream, encoding="bytes").load()
        return raw[b"data"].reshape(-1, 3, 32, 32), np.array(raw[b"labels"], np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is not a CIFAR-10 batch: {error}") from None


def _cifar_binary(file: Path) -> Batch:
    raw = np.fromfile(file, np.uint8)
    if not raw.size or raw.size % 3073:
        raise ValueError(f"{file} is not a CIFAR-10 batch: {raw.size} bytes are not a multiple of 3073")
    raw = raw.reshape(-1, 3073)
    return raw[:, 1:].reshape(-1, 3, 32, 32), raw[:, 0].astype(np.int64)


@task("images", model="resnet", metric=ACCURACY, needs_path=True)
def images(*, path: str, image_size: int = 32, **_: Any) -> Images:
    """A folder with one subfolder a class (or train/ and val/ with such subfolders); a tenth is held out."""
    folder = _folder(path)
    parts = [folder / "train", next((folder / n for n in ("val", "test") if (folder / n).is_dir()), folder / "val")]
    if all(part.is_dir() for part in parts):
        x, y, names = _read_images(parts[0], image_size)
        x_held_out, y_held_out, _names = _read_images(parts[1], image_size, names)
        return Images(x, y, x_held_out, y_held_out, classes=len(names), flip=True)
    x, y, names = _read_images(folder, image_size)
    train, held_out = split(len(y), 0.1)
    return Images(x[train], y[train], x[held_out], y[held_out], classes=len(names), flip=True)


def _read_images(folder: Path, size: int, names: list[str] | None = None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("the task 'images' needs Pillow: pip install pillow") from None
    extensions = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp"}
    found = {
        part.name: [file for file in sorted(part.rglob("*")) if file.suffix.lower() in extensions]
        for part in sorted(folder.iterdir())
        if part.is_dir()
    }
    if names is None:
        names = [name for name, files in found.items() if files]
    elif unknown := sorted(set(found) - set(names)):
        raise ValueError(f"{folder} has classes that the training set lacks: {', '.join(unknown)}")
    x, y = [], []
    for label, name in enumerate(names):
        for file in found.get(name, []):
            try:
                with Image.open(file) as image:
                    x.append(np.asarray(image.convert("RGB").resize((size, size))).transpose(2, 0, 1))
            except OSError as error:
                raise ValueError(f"{file} is not a readable image: {error}") from None
            y.append(label)
    if len(names) < 2 or len(x) < 2:
        raise ValueError(
            f"{folder} holds {len(x)} images in {len(names)} classes: expected two or more subfolders, "
            f"one a class, with {', '.join(sorted(extensions))} files"
        )
    return np.stack(x), np.array(y, np.int64), names


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    if not any(folder.iterdir()):
        raise ValueError(f"the folder {folder} is empty")
    return folder
