"""Benchmarks of exchanges (with stock Horovod and DDP), and of what a rank computes."""
