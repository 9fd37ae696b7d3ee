"""Array ops on CUDA tensors: Triton kernels where they save passes over memory. The other ops are inherited.

Kernels take contiguous tensors of the dtypes that the drivers use, with at least one element. The ops pass all other
inputs to ops/torch. Results are the reference's bits, except for ops "to rounding".

With ``TRITON_INTERPRET=1`` in the environment before Triton is imported, kernels run in Triton's interpreter, on CPU
tensors; the tests use it. :mod:`hvdcompress.ops.torch` lists the ops in which the host waits for the device,
and :mod:`hvdcompress.ops.triton.tensors` the differences in this backend.
"""

from hvdcompress.ops.triton.arithmetic import ArithmeticOps
from hvdcompress.ops.triton.codes import CodeOps
from hvdcompress.ops.triton.floats import FloatOps
from hvdcompress.ops.triton.matrices import MatrixOps
from hvdcompress.ops.triton.selection import SelectionOps
from hvdcompress.ops.triton.statistics import StatisticsOps


class TritonOps(ArithmeticOps, CodeOps, FloatOps, MatrixOps, SelectionOps, StatisticsOps):
    """The array ops on CUDA tensors, with Triton kernels."""


ops = TritonOps()  #: the backend
