"""Frameworks that make the ``DistributedDataParallel`` module themselves: Lightning, accelerate, Transformers' Trainer.

Each file is a thin door over :mod:`hvdcompress.ddp`, and saves and restores the residuals with the framework's own
checkpoints, a file per rank. Each needs its framework: ``pip install hvdcompress[lightning]``, ``[accelerate]`` or
``[transformers]``.
"""
