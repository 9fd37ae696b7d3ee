"""What made a saved state: driver and versions; and what differs where it is loaded.

This is for people. A state that was made in another way is loaded all the same, with a warning.
"""

from __future__ import annotations

import json
import platform
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from hvdcompress import __version__
from hvdcompress.plan import Plan
from hvdcompress.plan.reading import PLAN_KEYS, RULE_KEYS

MADE_BY = "made_by"  #: the key of a saved state
#: packages whose version is noted where they are in use
PACKAGES = ("numpy", "numba", "torch", "tensorflow", "horovod", "mpi4py")
#: plan keys that change neither what is sent nor what comes of it
IDLE = {"watchdog", "warn_after", "end_after", "verify_every"}


def made_by(driver: str) -> dict[str, Any]:
    """Return what makes a state, as plain data: ``driver``, and ``versions`` by package.

    Args:
        driver: the driver's name.
    """
    versions = {"hvdcompress": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        if (version := getattr(sys.modules.get(package), "__version__", None)) is not None:
            versions[package] = str(version)
    return {"driver": driver, "versions": versions}


def differences(saved: Mapping[str, Any], plan: Plan) -> str:
    """Return what matters and was different where a state was saved; nothing if all is the same.

    Args:
        saved: the state.
        plan: the plan of the Compressor that loads it.
    """
    before = json.loads(json.dumps(saved["plan"]))  # so that both have texts as keys
    now = json.loads(plan.source)
    keys = (before.keys() | now.keys()) - IDLE
    if before.get("method") != now.get("method"):
        keys &= {*RULE_KEYS, *PLAN_KEYS}  # each method has hyper-parameters of its own
    found = [("hvdcompress", saved[MADE_BY]["versions"]["hvdcompress"], __version__)]
    found += [(key, before.get(key), now.get(key)) for key in sorted(keys)]
    return "; ".join(f"{what} was {_shown(was)}, is {_shown(here)}" for what, was, here in found if was != here)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value[:60] if isinstance(value, str) else reprlib.repr(value)
