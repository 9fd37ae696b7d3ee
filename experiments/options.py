"""What commands of several areas share: lists with commas, files of ``configs/``, emulated hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.cluster.hosts import Hosts
from experiments.configfile import MethodEntry, MethodsFile
from hvdcompress.registry import available, suggest

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def split(text: str | None) -> list[str]:
    """Return the words that commas part."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def config_file(given: Path | str, *kinds: str) -> Path:
    """Return the file that a user means: a path that exists, or the name of a file in a folder of ``configs/``.

    Args:
        given: the path or the name.
        kinds: folders of ``configs/``.

    Raises:
        ValueError: it is neither.
    """
    if Path(given).is_file():
        return Path(given)
    known = {file.stem: file for kind in kinds for file in sorted((CONFIGS / kind).glob("*.yaml"))}
    if str(given) not in known:
        hint = suggest(str(given), list(known))
        raise ValueError(
            f"there is no file {given}, and none of that name in configs/{hint}; known: {', '.join(known)}"
        )
    return known[str(given)]


def emulated_hosts(count: int | None, rate: str | None, ranks: int | None = None) -> Hosts | None:
    """Return the emulated hosts that were asked for, or None.

    Raises:
        ValueError: the options contradict each other.
    """
    if (count is None) != (rate is None):
        raise ValueError("emulated hosts need --hosts and the rate of their links, such as --hosts 4 --rate 1gbit")
    if count is None or rate is None:
        return None
    if ranks and ranks % count:
        raise ValueError(f"-np {ranks} and --hosts {count}: each host must get equally many ranks")
    return Hosts(count, rate, ranks_per_host=(ranks or count) // count)


def methods_of(config: str | None, labels: str | None) -> Sequence[MethodEntry]:
    """Return the methods of a file; every method with its defaults for None.

    Raises:
        ValueError, OSError: there is no such file, something in it is wrong, or there is no such label.
    """
    source = {"methods": available()} if config is None else config_file(config, "bench", "experiments")
    return MethodsFile.open(source).pick("methods", split(labels))


def seeds_of(text: str) -> list[int]:
    """Return the seeds of ``1-3,7``, which are 1, 2, 3 and 7.

    Raises:
        ValueError: the text is not of that form.
    """
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found
