"""The array verbs that methods are written in, once for each array library.

``numpy`` is the reference: simple and obviously right. ``numba`` overrides the verbs where a benchmark
earned it (it is ``fast``, what CPU drivers use); ``torch`` serves CUDA. All produce the same payload bytes.
"""

from hvdcompress.ops import numpy as fast

__all__ = ["fast"]
