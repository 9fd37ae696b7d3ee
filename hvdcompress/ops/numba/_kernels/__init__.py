"""The compiled loops behind the numba backend, by the same subjects as its ops.

Moving memory is what an op costs, so each kernel reads its input once and makes no temporary of the tensor's size.
Three habits let LLVM vectorise the loops: they run over *slices* (numba then knows that no index is negative);
magnitudes are compared as integers (the bits of non-negative floats ascend with the floats); and floating-point sums
run in lanes and are not reordered (no ``fastmath``), so that results are the same on every processor; products of
matrices, which are to rounding, are the exception.
"""
