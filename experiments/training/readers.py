"""Readers of data sets' files: IDX (MNIST's form), CIFAR-10's downloads, and folders of pictures."""

from __future__ import annotations

import gzip
import math
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from experiments.training.data import Batch


def idx(file: Path) -> np.ndarray:
    """The array of an IDX file of unsigned bytes, gzip'd or not.

    The form of MNIST's files: two zero bytes, the type (8: unsigned byte), the number of dimensions, each size as a
    big-endian int32, then the elements.

    Returns:
        uint8, in the file's shape.

    Raises:
        ValueError: the file is damaged, or has elements of another type.
    """
    raw = file.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{file} is a damaged gzip file: {error}") from None
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise ValueError(f"{file} is not an IDX file of unsigned bytes: it begins with {raw[:4].hex(' ') or 'nothing'}")
    start = 4 + 4 * raw[3]
    shape = np.frombuffer(raw[4:start], ">i4").tolist()
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{file} is not a whole IDX file: {len(raw) - start} bytes of data for the shape {shape}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def mnist(folder: Path, part: str) -> Batch:
    """Pictures uint8 [n, 1, height, width] and labels int64 [n] of one part of a data set in MNIST's four files.

    Args:
        folder: holds ``{part}-images-idx3-ubyte`` and ``{part}-labels-idx1-ubyte``, with or without ``.gz``.
        part: "train" or "t10k".

    Raises:
        ValueError: a file is missing or damaged, or there is not one label a picture.
    """
    x, y = (idx(_plain_or_gz(folder / f"{part}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1"))
    if x.ndim != 3 or y.shape != x.shape[:1]:
        raise ValueError(f"{folder}: {part} has pictures of shape {x.shape} and labels of shape {y.shape}")
    return x[:, None], y.astype(np.int64)


def _plain_or_gz(file: Path) -> Path:
    for found in (file.with_name(f"{file.name}.gz"), file):
        if found.is_file():
            return found
    raise ValueError(f"{file.parent} holds neither {file.name} nor {file.name}.gz")


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any code; CIFAR-10's files need these four names and get no other."""

    allowed = {"_reconstruct", "ndarray", "dtype", "encode"}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in {"numpy", "_codecs"} or name not in self.allowed:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which CIFAR-10's files do not contain")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def cifar_python(file: Path) -> Batch:
    """One file of CIFAR-10's "python" download: pictures uint8 [n, 3, 32, 32] and labels."""
    try:
        with file.open("rb") as stream:
            raw = _ArraysOnly(stream, encoding="bytes").load()
        return raw[b"data"].reshape(-1, 3, 32, 32), np.array(raw[b"labels"], np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is not a CIFAR-10 batch: {error}") from None


def cifar_binary(file: Path) -> Batch:
    """One file of CIFAR-10's "binary" download: pictures uint8 [n, 3, 32, 32] and labels."""
    raw = np.fromfile(file, np.uint8)
    if not raw.size or raw.size % 3073:
        raise ValueError(f"{file} is not a CIFAR-10 batch: {raw.size} bytes are not a multiple of 3073")
    raw = raw.reshape(-1, 3073)
    return raw[:, 1:].reshape(-1, 3, 32, 32), raw[:, 0].astype(np.int64)


def image_folder(folder: Path, size: int, names: list[str] | None = None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Pictures of a folder with one subfolder a class, scaled.

    Args:
        folder: the folder.
        size: pixels a side.
        names: the classes, in order; the subfolders' names unless given.

    Returns:
        Pictures uint8 [n, 3, size, size], labels int64 [n], and the classes' names.

    Raises:
        ValueError: Pillow is missing, a file cannot be read, or there are too few pictures or unknown classes.
    """
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


def folder_of(path: str) -> Path:
    """The folder that a task's ``path`` names.

    Raises:
        ValueError: it does not exist, or is empty.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    if not any(folder.iterdir()):
        raise ValueError(f"the folder {folder} is empty")
    return folder
