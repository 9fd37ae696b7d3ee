"""The training tasks of an experiment: where the data comes from and which nets learn it.

Adding a task is adding one loader under the ``@task`` decorator; adding a net is adding it to :data:`NETS` and to
``models_torch.py``. Any net of a task's kind can learn it: ``{task: fashion_mnist, net: lenet5}``. This file needs
numpy only, so that ``experiments run`` can check names and paths before it starts any rank; the nets need PyTorch.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.training import readers
from experiments.training.data import Batch, Bytes, Images, prepare, split
from hvdcompress.registry import suggest

__all__ = ["NETS", "TASKS", "Batch", "Bytes", "Images", "Metric", "Net", "Task", "net_of", "prepare", "split"]


class Metric(NamedTuple):
    """A measurement on the held-out set: ``value(nll, correct, count)`` from sums over its examples."""

    name: str
    unit: str
    higher_is_better: bool
    value: Callable[[float, float, float], float]


ACCURACY = Metric("held-out accuracy", "%", True, lambda nll, correct, count: 100 * correct / count)
BITS_PER_BYTE = Metric("held-out bits per byte", "bits", False, lambda nll, correct, count: nll / count / math.log(2))


class Net(NamedTuple):
    """A net: which kind of data it learns, and the frameworks that have it."""

    kind: type
    frameworks: tuple[str, ...] = ("torch",)


NETS = {
    "digits_net": Net(Images, ("torch", "tensorflow")),
    "fnn3": Net(Images),
    "lenet5": Net(Images),
    "resnet": Net(Images),
    "resnet20": Net(Images),
    "resnet32": Net(Images),
    "vgg11": Net(Images),
    "byte_transformer": Net(Bytes),
    "byte_lstm": Net(Bytes),
}


@dataclass(frozen=True)
class Task:
    """A task's loader, the net that it is trained with unless another is named, and its measure."""

    id: str
    load: Callable[..., Images | Bytes]
    net: str
    metric: Metric
    needs_path: bool
    default_path: Path | None
    package: str
    """The Debian package that brings ``default_path``."""

    @property
    def nets(self) -> list[str]:
        """The nets that can learn it."""
        return [id for id, net in NETS.items() if net.kind is NETS[self.net].kind]

    def missing(self, path: str | None) -> str | None:
        """What is wrong with the data's place, or None: it is not named, or not there."""
        if path is not None:
            return None if Path(path).expanduser().is_dir() else f"no such folder: {path}"
        if self.needs_path:
            return f"is missing: the task {self.id!r} reads your own data"
        if self.default_path is not None and not self.default_path.is_dir():
            return (
                f"is missing, and there is no {self.default_path}: apt-get install {self.package} (Debian) brings it, "
                f"or name a folder with its files"
            )
        return None


TASKS: dict[str, Task] = {}


def task(
    id: str,
    *,
    net: str,
    metric: Metric,
    needs_path: bool = False,
    default_path: Path | None = None,
    package: str = "",
) -> Callable[[Any], Any]:
    """Register a loader; it is called with the task's settings (``path``, ``image_size``) as keywords."""

    def register(load: Callable[..., Images | Bytes]) -> Callable[..., Images | Bytes]:
        TASKS[id] = Task(id, load, net, metric, needs_path, default_path, package)
        return load

    return register


def net_of(task: str, net: str | None) -> str:
    """The net that learns a task: the one that is named, or the task's own.

    Raises:
        ValueError: there is no such net, or it learns data of another kind.
    """
    known = TASKS[task].nets
    if net is None:
        return TASKS[task].net
    if net not in NETS:
        raise ValueError(f"unknown net {net!r}{suggest(net, known)}; for {task!r}: {', '.join(known)}")
    if net not in known:
        raise ValueError(f"the net {net!r} cannot learn {task!r}; these can: {', '.join(known)}")
    return net


def _sklearn(task: str) -> Any:
    try:
        import sklearn.datasets
    except ImportError:
        raise ValueError(f"the task {task!r} needs scikit-learn: pip install scikit-learn") from None
    return sklearn.datasets


def _digits(task: str, **augmented: Any) -> Images:
    raw = _sklearn(task).load_digits()
    x, y = (raw.images[:, None] / 16 - 0.3).astype(np.float32), raw.target.astype(np.int64)
    train, held_out = split(len(y), 0.25)
    return Images(x[train], y[train], x[held_out], y[held_out], classes=10, **augmented)


@task("digits", net="digits_net", metric=ACCURACY)
def digits(**_: Any) -> Images:
    """The 1797 handwritten digits (8x8) that scikit-learn carries; a quarter is held out."""
    return _digits("digits")


@task("noisy_digits", net="digits_net", metric=ACCURACY)
def noisy_digits(**_: Any) -> Images:
    """The same digits, moved by up to a pixel and with a fifth of the labels drawn again each time.

    A net learns the 1348 digits themselves by heart, and its gradients vanish; these it cannot. Held out are the same
    digits as in ``digits``, as they are.
    """
    return _digits("noisy_digits", shift=1, label_noise=0.2)


@task(
    "fashion_mnist",
    net="lenet5",
    metric=ACCURACY,
    default_path=Path("/usr/share/datasets/fashion-mnist"),
    package="dataset-fashion-mnist",
)
def fashion_mnist(*, path: str | None = None, **_: Any) -> Images:
    """Fashion-MNIST: 60 000 pictures of clothes (28x28, grey) to train on, 10 000 held out (Xiao et al. 2017).

    Any data set in MNIST's four files can be read from a folder ``path`` instead, MNIST itself included.
    """
    found = TASKS["fashion_mnist"]
    if problem := found.missing(path):
        raise ValueError(f"the task 'fashion_mnist': path {problem}")
    folder = readers.folder_of(path or str(found.default_path))
    x, y = readers.mnist(folder, "train")
    return Images(x, y, *readers.mnist(folder, "t10k"), classes=int(y.max()) + 1)


PATCH, TILES = 32, (3, 4)  #: pixels a side; rows and columns of regions of each photograph


@task("photographs", net="resnet20", metric=ACCURACY)
def photographs(*, patches: int = 6000, **_: Any) -> Images:
    """Patches of the two photographs (427x640, colour) that scikit-learn carries; which region is each one from?

    Each photograph is divided into 3 x 4 regions, hence 24 classes. The lowest ``PATCH`` rows of each region are held
    out: no pixel of theirs is in a patch that is trained on.
    """
    found = _sklearn("photographs").load_sample_images().images
    random = np.random.default_rng(1797)
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    labels: tuple[list[int], list[int]] = ([], [])
    regions = [region for image in found for region in _regions(np.asarray(image).transpose(2, 0, 1))]
    for number in range(patches + patches // 10):
        held_out, label = number >= patches, number % len(regions)
        region = regions[label]
        part = region[:, -PATCH:] if held_out else region[:, :-PATCH]
        y, x = (random.integers(0, size - PATCH + 1) for size in part.shape[1:])
        parts[held_out].append(part[:, y : y + PATCH, x : x + PATCH])
        labels[held_out].append(label)
    (x_train, x_held_out), (y_train, y_held_out) = map(np.stack, parts), (np.array(y, np.int64) for y in labels)
    return Images(x_train, y_train, x_held_out, y_held_out, classes=len(regions), mirror=True)


def _regions(image: np.ndarray) -> list[np.ndarray]:
    """A picture [channels, height, width] cut into ``TILES`` of equal size."""
    height, width = (size // tiles for size, tiles in zip(image.shape[1:], TILES, strict=True))
    return [
        image[:, r * height : (r + 1) * height, c * width : (c + 1) * width]
        for r in range(TILES[0])
        for c in range(TILES[1])
    ]


@task("bytes", net="byte_transformer", metric=BITS_PER_BYTE)
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


@task("cifar10", net="resnet", metric=ACCURACY, needs_path=True)
def cifar10(*, path: str, **_: Any) -> Images:
    """CIFAR-10, the "python" or the "binary" download, unpacked in the folder ``path``."""
    folder = readers.folder_of(path)
    for candidate in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix, read in (("", readers.cifar_python), (".bin", readers.cifar_binary)):
            train = sorted(f for f in candidate.glob(f"data_batch_*{suffix}") if f.suffix == suffix)
            test = candidate / f"test_batch{suffix}"
            if train and test.is_file():
                batches = [read(file) for file in train]
                x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
                return Images(x, y, *read(test), classes=10, shift=2, mirror=True)
    raise ValueError(
        f"no CIFAR-10 in {folder}: expected data_batch_1 … and test_batch (the 'python' version), "
        "or data_batch_1.bin … and test_batch.bin (the 'binary' version)"
    )


@task("images", net="resnet", metric=ACCURACY, needs_path=True)
def images(*, path: str, image_size: int = 32, **_: Any) -> Images:
    """A folder with one subfolder a class (or train/ and val/ with such subfolders); a tenth is held out."""
    folder = readers.folder_of(path)
    parts = [folder / "train", next((folder / n for n in ("val", "test") if (folder / n).is_dir()), folder / "val")]
    if all(part.is_dir() for part in parts):
        x, y, names = readers.image_folder(parts[0], image_size)
        x_held_out, y_held_out, _names = readers.image_folder(parts[1], image_size, names)
        return Images(x, y, x_held_out, y_held_out, classes=len(names), shift=2, mirror=True)
    x, y, names = readers.image_folder(folder, image_size)
    train, held_out = split(len(y), 0.1)
    return Images(x[train], y[train], x[held_out], y[held_out], classes=len(names), shift=2, mirror=True)
