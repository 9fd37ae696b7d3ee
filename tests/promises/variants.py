"""The methods and settings that drivers are tried with: every method, and each option that changes its collectives."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

VARIANTS: list[tuple[str, Settings]] = [
    ("none", {}),
    ("none", {"feedback": "plain"}),
    ("fp16", {}),
    ("fp16", {"feedback": "plain"}),
    ("bf16", {}),
    ("topk", {"density": 0.02}),
    ("topk", {"density": 0.5, "values": "fp16"}),
    ("topk", {"density": 0.05, "values": "qsgd4"}),
    ("topk", {"density": 0.05, "feedback": "momentum"}),
    ("topk", {"density": 0.05, "warmup": {"steps": 2}, "schedule": {"density": {"steps": {4: 0.01}}}}),
    ("topk", {"density": 0.05, "values": "qsgd4", "warmup": {"steps": 2}}),
    ("randomk", {"density": 0.02}),
    ("randomk", {"density": 0.05, "values": "bf16"}),
    ("randomk", {"density": 0.05, "values": "rangefloat8"}),
    ("scalecom", {"density": 0.01, "beta": 0.3}),
    ("scalecom", {"density": 0.02, "select": "exact", "values": "fp16"}),
    ("scalecom", {"density": 0.02, "values": "bf16"}),
    ("scalecom", {"density": 0.05, "values": "qsgd8", "warmup": {"steps": 2}}),
    ("gaussiank", {"density": 0.02}),
    ("gaussiank", {"density": 0.02, "refine": "paper", "values": "bf16"}),
    ("redsync", {"density": 0.02, "interval": 2}),
    ("redsync", {"density": 0.02, "select": "trimmed", "values": "fp16"}),
    ("redsync", {"density": 0.02, "interval": 2, "paper": True}),
    ("fft", {}),
    ("fft", {"feedback": "plain", "order": "filters", "block": 64}),
    ("qsgd", {}),
    ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
    ("blockwise", {}),
    ("blockwise", {"values": "int4", "block": 64, "rotation": True}),
    ("blockwise", {"values": "fp8_e4m3", "route": "gather", "feedback": "none"}),
    ("natural", {}),
    ("onebit", {}),
    ("terngrad", {}),
    ("terngrad", {"clip_factor": 0.0, "route": "scatter"}),
    ("terngrad", {"route": "gather"}),
    ("signsgd", {}),
    ("signsgd", {"route": "scatter"}),
    ("gtopk", {"density": 0.02}),
    ("gtopk", {"density": 0.02, "values": "fp16"}),
    ("oktopk", {"density": 0.02}),
    ("oktopk", {"density": 0.05, "values": "qsgd4"}),
    ("arctopk", {"density": 0.05, "row": 16}),
    ("arctopk", {"density": 0.1, "row": 8, "sketch": 2, "values": "fp16"}),
    ("dgc", {"density": 0.02}),
    ("dgc", {"density": 0.02, "local_clip_norm": 1.0, "select": "exact"}),
    ("powersgd", {}),
    ("powersgd", {"matrix_rank": 1, "values": "bf16"}),
    ("acpsgd", {}),
    ("acpsgd", {"matrix_rank": 1, "values": "fp16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "feedback": "plain"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 3, "tensors": "all", "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "values": "qsgd8", "dense_values": "qsgd4"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "feedback": "plain", "paper": True}),
]

#: settings of which a driver is asked for other collectives than in METHODS
ROUTES: list[tuple[str, Settings]] = [
    ("none", {"feedback": "plain"}),
    ("topk", {"density": 0.05, "feedback": "momentum"}),
    ("topk", {"density": 0.05, "values": "qsgd4", "warmup": {"steps": 2}}),
    ("scalecom", {"density": 0.02, "select": "exact", "values": "fp16"}),
    ("qsgd", {"bits": 8, "norm": "l2", "route": "scatter"}),
    ("terngrad", {"route": "gather"}),
    ("signsgd", {"route": "scatter"}),
    ("powersgd", {"matrix_rank": 1, "values": "bf16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "values": "qsgd8", "dense_values": "qsgd4"}),
]

#: one of each method, with settings under which a few steps go through all that it does
METHODS: dict[str, Settings] = {
    **{method: settings for method, settings in reversed(VARIANTS)},
    "topk": {"density": 0.05, "warmup": {"steps": 2}},
    "gradiveq": {"dense_steps": 2, "compressed_steps": 3},
}


def has_half_sums(method: str, settings: Settings) -> bool:
    """Whether numbers are summed as float16, so that of three ranks or more the order shows."""
    return "fp16" in (method, settings.get("values"), settings.get("dense_values"))
