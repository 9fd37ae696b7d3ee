"""Building blocks that several methods share.

- feedback: error feedback (plain, low-pass, momentum) around a method
- momentum: adaptation of the optimizer's momentum to error feedback
- select: how many elements to keep, and which;   candidates: a faster way to find them
- wire: the header of gathered payloads;   pack: sparse payloads (header, indices, values)
- codecs: number formats of values, and sums of values in these formats
- quantize: stochastic quantization;   rangefloat: floats that cover only the range of the data
- regions: regions of a tensor that ranks own, balanced by the entries of the last steps
- sums: sums of tensors whose codes networks cannot add (gather, scatter-reduce)
- matrices: gradients as matrices and slices, and sums of projections
- seed: random numbers, shared by all ranks or private to one rank
"""
