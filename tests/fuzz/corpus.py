"""The corpus: inputs that the fuzzers kept, in one archive per family of decoders. The tests replay them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile, ZipInfo

ARCHIVES = Path(__file__).parent / "corpus"


def archive_of(decoder: str) -> Path:
    """Return the archive of a family: ``wire.zip`` has ``wire-split``, ``method-topk.zip`` has ``method-topk-…``."""
    words = decoder.split("-")
    return ARCHIVES / f"{'-'.join(words[: 2 if words[0] == 'method' else 1])}.zip"


def read(archive: Path) -> dict[str, bytes]:
    """Return the inputs of an archive, by "decoder/hash", sorted."""
    if not archive.exists():
        return {}
    with ZipFile(archive) as opened:
        return {name: opened.read(name) for name in sorted(opened.namelist())}


def write(archive: Path, inputs: dict[str, bytes]) -> None:
    """Write an archive whose bytes depend on nothing but the inputs."""
    with ZipFile(archive, "w") as opened:
        for name in sorted(inputs):
            opened.writestr(ZipInfo(name), inputs[name])  # dated 1980, not compressed


def kept(decoder: str) -> list[bytes]:
    """Return the corpus of a decoder."""
    return [data for name, data in read(archive_of(decoder)).items() if name.startswith(f"{decoder}/")]


def keep(decoder: str, found: Iterable[bytes]) -> list[str]:
    """Add inputs to the corpus of a decoder; return their names."""
    inputs = {f"{decoder}/{hashlib.sha256(data).hexdigest()[:12]}": data for data in found}
    archive = archive_of(decoder)
    write(archive, read(archive) | inputs)
    return list(inputs)


def count() -> int:
    """Return the number of inputs in all archives."""
    return sum(len(read(archive)) for archive in ARCHIVES.glob("*.zip"))
