"""Nets of ``models_torch.py`` in TensorFlow, under the same names; a net that is in both trains with either."""

from __future__ import annotations

import math

import tensorflow as tf


class DigitsNet(tf.Module):
    """Three convolutions and two linear layers for pictures: 124 thousand parameters if they are 8x8.

    Weights are named as in PyTorch, so that a plan's rules match in both; they lie as TensorFlow wants them.
    """

    def __init__(self, data, seed: int):  # type: ignore[no-untyped-def]
        super().__init__()
        channels, height, width = data.x.shape[1:]
        self.flat = 64 * (height // 4) * (width // 4)
        shapes = {
            "0.weight": (3, 3, channels, 32),
            "2.weight": (3, 3, 32, 64),
            "5.weight": (3, 3, 64, 64),
            "9.weight": (self.flat, 256),
            "11.weight": (256, data.classes),
        }
        self.weights = {}
        for number, (name, shape) in enumerate(shapes.items()):  # He's initialisation, as in PyTorch
            start = tf.random.stateless_normal(shape, (seed, number), stddev=math.sqrt(2 / math.prod(shape[:-1])))
            self.weights[name] = tf.Variable(start, name=name)
        bound = 1 / math.sqrt(256)
        start = tf.random.stateless_uniform((data.classes,), (seed, len(shapes)), -bound, bound)
        self.weights["11.bias"] = tf.Variable(start, name="11.bias")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Pictures [N, channels, height, width] -> logits [N, classes]."""
        w = self.weights
        x = tf.transpose(x, (0, 2, 3, 1))
        x = tf.nn.relu(tf.nn.conv2d(x, w["0.weight"], 1, "SAME"))
        x = tf.nn.relu(tf.nn.conv2d(x, w["2.weight"], 1, "SAME"))
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        x = tf.nn.relu(tf.nn.conv2d(x, w["5.weight"], 1, "SAME"))
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        x = tf.nn.relu(tf.reshape(x, (-1, self.flat)) @ w["9.weight"])
        return x @ w["11.weight"] + w["11.bias"]


def digits_net(data, seed: int) -> DigitsNet:  # type: ignore[no-untyped-def]
    """A :class:`DigitsNet` for the pictures of ``data``."""
    return DigitsNet(data, seed)
