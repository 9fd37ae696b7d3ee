"""Benchmarks of exchanges beside stock Horovod and DDP, of what a rank computes, of array verbs, and of TensorFlow."""
