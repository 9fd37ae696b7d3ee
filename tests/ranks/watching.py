"""An observer that keeps what a rank sends, and how that is compared with what the loopback sends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from hvdcompress.engine.telemetry.observer import Sent


def on_host(payload: Any) -> np.ndarray:
    """Return a payload as a numpy array; one of PyTorch may be on a GPU."""
    return np.asarray(payload.cpu() if hasattr(payload, "cpu") else payload)


class Watcher:
    """An observer that keeps what one rank sends."""

    def __init__(self, rank: int):
        self.rank, self.payloads, self.num_bytes = rank, defaultdict(list), 0
        self.events: dict[str, int] = defaultdict(int)

    def sent(self, rank: int, name: str, what: Sent) -> None:
        if rank == self.rank:
            # of a broadcast by another rank there is nothing to see but how much it is
            seen = bytes(what.num_bytes) if what.payload is None else on_host(what.payload).tobytes()
            self.payloads[name].append(seen)
            self.num_bytes += what.num_bytes

    def __getattr__(self, event: str) -> Any:
        if event not in ("begun", "encoded", "completed", "waited", "decoded", "committed"):
            raise AttributeError(event)

        def note(rank: int, *rest: Any, **more: Any) -> None:
            self.events[event] += rank == self.rank

        return note


def carries(got: list[bytes], want: list[bytes], probe: int) -> bool:
    """Whether ``got`` is ``want`` in order; a payload may have a probe of so many bytes behind it, and probes may go
    alone."""
    if not got:
        return not want
    first, rest = got[0], got[1:]
    whole = want and (first == want[0] or (probe and first[:-probe] == want[0]))  # an empty one may be a probe alone
    return bool(whole and carries(rest, want[1:], probe)) or (len(first) == probe and carries(rest, want, probe))
