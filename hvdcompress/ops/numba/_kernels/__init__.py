"""Kernels of the numba backend: compiled loops, in one module per subject, like the backend's ops.

An op's time is the time to move memory, so each kernel reads its input once and allocates no temporary of the tensor's
size. Three rules let LLVM vectorise the loops:

- Loops run over *slices* with ``range(size)``. Numba then knows that no index is negative. A loop between two bounds
  of the whole array does not vectorise.
- Magnitudes are compared as integers: the bits of non-negative floats are in the order of the floats.
- Floating-point sums run in lanes, several partial sums side by side. LLVM may not reorder them (no ``fastmath``), so
  that results are the same on every processor. Matrix products are the exception; they are exact "to rounding" only.

In the kernels' names, a *magnitude* is an |x|, and its *bits* are the int32 with the bit pattern of the float32 |x|.
"""
