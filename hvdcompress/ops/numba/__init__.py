"""Array ops on numpy arrays, compiled with numba where a benchmark shows a gain for a method.

Kernels take contiguous, aligned float32 arrays. The ops pass all other inputs to the numpy backend, the reference, and
return the reference's bits, except for ops "to rounding". Ops without a kernel are the reference's own.
"""

from hvdcompress.ops.numba.arithmetic import ArithmeticOps
from hvdcompress.ops.numba.bits import BitOps
from hvdcompress.ops.numba.codes import CodeOps
from hvdcompress.ops.numba.floats import FloatOps
from hvdcompress.ops.numba.matrices import MatrixOps
from hvdcompress.ops.numba.memory import MemoryOps
from hvdcompress.ops.numba.selection import SelectionOps
from hvdcompress.ops.numba.spectra import SpectrumOps
from hvdcompress.ops.numba.statistics import StatisticsOps


class NumbaOps(
    ArithmeticOps, BitOps, CodeOps, FloatOps, MatrixOps, MemoryOps, SelectionOps, SpectrumOps, StatisticsOps
):
    """The array ops on numpy arrays, with compiled loops."""


ops = NumbaOps()  #: the backend
