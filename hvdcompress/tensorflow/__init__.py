"""TensorFlow under Horovod: any method behind the unmodified ``hvd.DistributedGradientTape(compression=…)``."""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.tensorflow.compressor import Compressor

__all__ = ["Compressor", "PeerError"]
