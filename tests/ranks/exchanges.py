"""Settings that drivers are tried with: one for each kind of exchange that a method can ask for.

A driver does not know methods. It carries out collectives and writes results, so what differs for a driver is the
sequence of collectives, their operations and dtypes, and the form of the result (dense, sparse, shares, coded, low
rank, spectra). ``tests/unit/drivers/test_exchanges.py`` lists these for all methods in all variants and checks that
``EXCHANGES`` has each.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

EXCHANGES: list[tuple[str, Settings]] = [
    ("none", {}),
    ("none", {"feedback": "plain"}),
    ("fp16", {}),
    ("fp16", {"feedback": "plain"}),
    ("bf16", {}),
    ("topk", {"density": 0.05, "warmup": {"steps": 2}, "schedule": {"density": {"steps": {4: 0.01}}}}),
    ("topk", {"density": 0.05, "feedback": "momentum", "values": "qsgd4"}),
    ("scalecom", {"density": 0.02, "beta": 0.3}),
    ("scalecom", {"density": 0.02, "select": "exact", "values": "fp16"}),
    ("scalecom", {"density": 0.02, "values": "bf16", "feedback": "none"}),
    ("fft", {}),
    ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
    ("blockwise", {}),
    ("blockwise", {"values": "fp8_e4m3", "route": "gather", "feedback": "none"}),
    ("onebit", {}),
    ("terngrad", {}),
    ("gtopk", {"density": 0.02}),
    ("oktopk", {"density": 0.06, "feedback": "momentum"}),
    ("arctopk", {"density": 0.1, "row": 8, "sketch": 2, "values": "fp16"}),
    ("arctopk", {"density": 0.06, "values": "bf16"}),
    ("dgc", {"density": 0.02}),
    ("powersgd", {}),
    ("powersgd", {"matrix_rank": 1, "values": "bf16"}),
    ("powersgd", {"values": "fp16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "feedback": "plain"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "values": "qsgd8", "dense_values": "qsgd4"}),
]

#: methods whose state differs in kind, with settings under which a few steps go through all that they do
METHODS: dict[str, Settings] = {
    "topk": {"density": 0.05, "warmup": {"steps": 2}},
    "powersgd": {},
    "scalecom": {"density": 0.01, "beta": 0.3},
    "gradiveq": {"dense_steps": 2, "compressed_steps": 3},
    "dgc": {"density": 0.02},
    "fft": {},
    "qsgd": {},
    "none": {},
}


def sums_float16(method: str, settings: Settings) -> bool:
    """Return whether values are summed as float16, so that the order of three ranks or more matters."""
    return "fp16" in (method, settings.get("values"), settings.get("dense_values"))


def num_steps(settings: Settings) -> int:
    """Return enough steps for all phases."""
    return 6 if {"schedule", "dense_steps"} & settings.keys() else 3
