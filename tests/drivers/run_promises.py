"""Run by every rank of a launch: the promises of one door.

``python run_promises.py OUT PROMISE…`` with ``DOOR`` in the environment; see ``harness.py`` for what is written.
"""

from __future__ import annotations

import importlib
import os

import harness
from promises import PROMISES, keep


def main() -> None:
    name = os.environ["DOOR"]
    module = importlib.import_module(f"doors.{name}")
    door = next(
        cls for cls in vars(module).values() if isinstance(cls, type) and getattr(cls, "name", None) == name
    )(harness.OUT)
    checks = {name: lambda promise=promise: keep(promise, door) for name, promise in PROMISES.items()}
    harness.run(door.rank, door.meet, checks, lambda name: PROMISES[name].seconds)


if __name__ == "__main__":
    main()
