"""What the drivers for PyTorch share: Horovod, DistributedDataParallel and FSDP2."""
