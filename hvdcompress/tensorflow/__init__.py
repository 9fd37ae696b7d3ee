"""TensorFlow under Horovod: any method behind the unmodified ``hvd.DistributedGradientTape(compression=…)``."""

from hvdcompress.tensorflow.compressor import Compressor, PeerError

__all__ = ["Compressor", "PeerError"]
