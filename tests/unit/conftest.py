"""Triton's kernels run in its interpreter, on CPU tensors.

With a GPU: ``TRITON_INTERPRET=0 pytest tests/unit/ops -k triton``
"""

from __future__ import annotations

import os
from contextlib import suppress

os.environ.setdefault("TRITON_INTERPRET", "1")  # it looks for this when it is imported
with suppress(ImportError):  # before TensorFlow, after which it cannot be imported
    import triton  # noqa: F401
