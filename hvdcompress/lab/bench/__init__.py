"""Benchmarks of exchanges beside stock Horovod and DDP, of array operations, and of the TensorFlow driver."""
