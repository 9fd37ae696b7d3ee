"""The script tensorflow_plain.py with compressed gradients.

horovodrun -np 2 python examples/tensorflow_compressed.py

The first run compiles kernels, which takes some seconds; later runs load them from disk.
"""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from hvdcompress.horovod.tensorflow import Compressor

hvd.init()
keras.utils.set_random_seed(0)

digits = load_digits()
images = tf.constant(digits.data / 16, tf.float32)
labels = tf.constant(digits.target)
train = tf.range(len(labels)) % 5 != 0

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
weights = [variable.value for variable in model.trainable_variables]
speeds = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
names = [str(number) for number in range(len(weights))]
compressor = Compressor("scalecom", density=0.01, names=names)  # outside of the step, because it holds the residuals


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
    tape = hvd.DistributedGradientTape(tape, compression=compressor)
    gradients = dict(zip(names, tape.gradient(loss, weights), strict=True))
    # gradients that waited in residuals act as momentum, so this momentum is adapted to them
    with compressor.adapted(dict(zip(names, speeds, strict=True)), gradients, momentum=0.9):
        for weight, speed, gradient in zip(weights, speeds, gradients.values(), strict=True):
            speed.assign(0.9 * speed + gradient)
            weight.assign_sub(0.1 * speed)
    return loss


mine = tf.where(train)[hvd.rank() :: hvd.size(), 0]
for _ in range(600):
    batch = tf.gather(mine, tf.random.uniform([32], maxval=len(mine), dtype=tf.int32))
    loss = step(tf.gather(images, batch), tf.gather(labels, batch))

right = tf.argmax(model(images[~train]), axis=1) == labels[~train]
if hvd.rank() == 0:
    print(f"loss {float(loss):.4f}, held-out accuracy {float(tf.reduce_mean(tf.cast(right, tf.float32))):.1%}")
    print(compressor.summary())
