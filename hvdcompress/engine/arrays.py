"""NumPy arrays that programs give to the MPI driver and to the loopback."""

from __future__ import annotations

from typing import Any

import numpy as np

PLAIN = (np.ndarray, np.memmap)  #: types whose elements are all that they contain


def plain_array(given: Any, what: str) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of float16, float32 or float64.

    Args:
        given: an array, or an object that ``numpy.asarray`` converts.
        what: the name of the tensor, for messages.

    Raises:
        TypeError: an array contains more than its elements, such as a mask or a unit, which would be lost.
        ValueError: the dtype or the byte order is another one.
    """
    if isinstance(given, np.ndarray) and type(given) not in PLAIN:
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        raise TypeError(f"{what} is a {kind}: only its elements would be reduced; give a plain array, numpy.asarray(…)")
    array = np.asarray(given)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise ValueError(
            f"{what}: {array.dtype} cannot be reduced; use float16, float32 or float64, in native byte order"
        )
    return array
