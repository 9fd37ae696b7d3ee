"""Horovod: any method behind its unmodified optimizers, for PyTorch, TensorFlow and Keras 3.

Each framework has a module of its own, which imports it: ``hvdcompress.horovod.torch``, ``.tensorflow`` and ``.keras``.
"""
