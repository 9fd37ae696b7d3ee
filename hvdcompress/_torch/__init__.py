"""Code that the PyTorch drivers share: Horovod, DistributedDataParallel and FSDP2."""
