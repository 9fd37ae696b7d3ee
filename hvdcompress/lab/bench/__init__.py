"""Benchmarks of exchanges (with stock Horovod and DDP), of what a rank computes, of array verbs, and of TensorFlow."""
