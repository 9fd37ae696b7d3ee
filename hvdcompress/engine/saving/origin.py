"""What made a saved state: driver and versions; and what differs where it is loaded.

This is for people. A state that was made in another way is loaded all the same, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import platform
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from hvdcompress import __version__
from hvdcompress.plan import Plan, load_plan
from hvdcompress.plan.plan import read_source
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


def recorded(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what :func:`made_by` returned where a state was saved; empty for a state of an earlier version."""
    found = saved.get(MADE_BY)
    return found if isinstance(found, Mapping) else {}


def differences(saved: Mapping[str, Any], plan: Plan) -> str:
    """Return what matters and was different where a state was saved; nothing if all is the same.

    Args:
        saved: the state; one that an earlier version has saved may lack :data:`MADE_BY`.
        plan: the plan of the Compressor that loads it.
    """
    before = recorded(saved)
    versions = before.get("versions")
    version = versions.get("hvdcompress") if isinstance(versions, Mapping) else None
    found = [("hvdcompress", version, __version__)] if version and version != __version__ else []
    return "; ".join(
        f"{what} was {_shown(was)}, is {_shown(here)}" for what, was, here in [*found, *_in_plan(saved, plan)]
    )


def _in_plan(saved: Mapping[str, Any], plan: Plan) -> list[tuple[str, Any, Any]]:
    """Return the keys that differ between two plans, with both values."""
    before, now = _plain(saved["plan"]), _plain(plan.to_dict())
    keys = (before.keys() | now.keys()) - IDLE
    if before.get("method") != now.get("method"):
        keys &= {*RULE_KEYS, *PLAN_KEYS}  # each method has hyper-parameters of its own
    return [(key, before.get(key), now.get(key)) for key in sorted(keys, key=str) if before.get(key) != now.get(key)]


def _plain(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's keys, with the defaults of this version, if this version can read it."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(load_plan(read_source(json.dumps(plan))).source)
    return dict(plan)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value[:60] if isinstance(value, str) else reprlib.repr(value)
