"""Stands for a machine without TensorFlow; see ``without_tensorflow`` in ``installed.py``."""

raise ImportError("no TensorFlow in this launch")
