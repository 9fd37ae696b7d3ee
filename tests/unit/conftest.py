"""Hypothesis runs are reproducible, and Triton's kernels run in its interpreter, on CPU tensors.

With a GPU: ``TRITON_INTERPRET=0 pytest tests/unit/ops -k triton``
"""

from __future__ import annotations

import os
from contextlib import suppress

from hypothesis import HealthCheck, settings

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

os.environ.setdefault("TRITON_INTERPRET", "1")  # it looks for this when it is imported
with suppress(ImportError):  # before TensorFlow, after which it cannot be imported
    import triton  # noqa: F401
