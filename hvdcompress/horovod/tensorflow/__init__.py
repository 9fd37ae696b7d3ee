"""TensorFlow under Horovod: any method behind the unmodified ``hvd.DistributedGradientTape(compression=…)``."""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.horovod.tensorflow.compressor import Compressor

__all__ = ["Compressor", "PeerError"]
