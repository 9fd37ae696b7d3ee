"""Compress the gradients of ``hvd.DistributedGradientTape`` under TensorFlow; for Keras 3 see ``horovod/keras.py``."""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.horovod.tensorflow.compressor import Compressor

__all__ = ["Compressor", "PeerError"]
