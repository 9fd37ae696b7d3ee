"""Gradient compression for data-parallel training, plugged into the unmodified Horovod optimizer.

Importing this package imports no framework: ``hvdcompress.horovod.torch`` and the other drivers do.
"""

from hvdcompress.optimizers import without_momentum
from hvdcompress.plan import Plan, load
from hvdcompress.registry import available, get

__version__ = "0.1.0"
__all__ = ["Plan", "available", "get", "load", "without_momentum", "__version__"]
