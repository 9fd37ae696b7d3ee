"""Drivers for unmodified Horovod: PyTorch, TensorFlow and Keras 3.

Each framework has its own module, so that only this framework is imported: ``hvdcompress.horovod.torch``,
``hvdcompress.horovod.tensorflow`` and ``hvdcompress.horovod.keras``.
"""
