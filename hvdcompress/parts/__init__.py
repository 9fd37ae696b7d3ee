"""Steps that methods share, each written once.

- feedback: error feedback (plain, low-pass, momentum) around a method
- select: how many elements to keep, and which
- wire: the header of gathered payloads;   pack: sparse payloads (header, indices, values)
- codecs: number formats of values, and sums of values in them
- quantize: stochastic quantization;   rangefloat: floats that cover only the data's range
- sums: summing tensors whose codes no network can add (gather, scatter-reduce)
- matrices: gradients as matrices and slices, and sums of projections
- seed: random numbers, shared by all ranks or private to one
"""
