"""Horovod for TensorFlow with Keras 2."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

from tests.ranks.drivers.tensorflow import TensorFlowDriver

DRIVER = TensorFlowDriver
