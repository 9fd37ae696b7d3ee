"""How kernels are compiled, and the constants that they share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

# Compiled kernels have these values in them, and numba looks at a kernel's own file alone: after a change here, delete
# __pycache__/*.nb* of this folder.
MAGNITUDE = np.int32(0x7FFFFFFF)  #: all bits of a float32 but its sign
LANES = 64  #: how many sums run side by side
FOUR = 4 * LANES  #: elements of which four go into each of these sums
SPAN = 1 << 16  #: elements whose sums are one row: threads begin at multiples of it, so that sums are the same
BLOCK = 1024  #: how many elements stay in the processor's nearest cache
NEAR = 256  #: so few that the processor fetches the next elements while it looks at these again


def compiled(function: Any, **options: Any) -> Any:
    """Compile ``function`` when it is first called; the result is kept on disk, for all ranks and later runs."""
    try:
        return njit(function, cache=True, nogil=True, **options)
    except RuntimeError:  # neither next to the kernel's file nor in the user's cache can anything be written
        return njit(function, nogil=True, **options)


def reordered(function: Any) -> Any:
    """Do :func:`compiled` for a verb "to rounding": sums may be added in the order that suits the processor."""
    return compiled(function, fastmath={"reassoc"})
