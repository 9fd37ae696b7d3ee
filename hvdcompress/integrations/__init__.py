"""Compression for frameworks that make the ``DistributedDataParallel`` module themselves.

There is one module per framework: ``lightning``, ``accelerate`` and ``transformers`` (the Hugging Face ``Trainer``).
Each attaches a :class:`hvdcompress.ddp.Compressor`, and saves and restores the residuals together with the framework's
checkpoints, in one file per rank. Each needs its framework: ``pip install hvdcompress[lightning]``, ``[accelerate]`` or
``[transformers]``.
"""
