"""Benchmarks of exchanges (with stock Horovod and DDP), of what a rank computes, of array ops, and of TensorFlow."""
