"""What all tests share: reproducible hypothesis runs, and the methods' test modules as importable oracles."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# TensorFlow, where a test imports it: silent, and not on all cores at once
for setting, value in (("CPP_MIN_LOG_LEVEL", "3"), ("NUM_INTRAOP_THREADS", "1"), ("NUM_INTEROP_THREADS", "1")):
    os.environ.setdefault(f"TF_{setting}", value)

# Triton's kernels run in its interpreter, on CPU tensors; it looks for this when it is imported, later than this file.
# With a GPU:  TRITON_INTERPRET=0 pytest tests/ops/test_ops.py -k "triton and verbs_on"
os.environ.setdefault("TRITON_INTERPRET", "1")
with suppress(ImportError):  # before TensorFlow, after which it cannot be imported
    import triton  # noqa: F401

# tests/mutations/ runs other tests again, with the library broken: it imports them by name
for folder in ("methods", "parts", "engine", "ops", "lab", "fuzz"):
    sys.path.insert(0, str(Path(__file__).resolve().parent / folder))

# No deadline: continuous integration shares its cores. Derandomized: a red run is red for everybody.
settings.register_profile(
    "hvdcompress",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("hvdcompress")
