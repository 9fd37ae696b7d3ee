"""The script keras_plain.py for several ranks, with compressed gradients.

horovodrun -np 2 python examples/keras_compressed.py

The first run compiles kernels, which takes some seconds; later runs load them from disk.
"""

import horovod.tensorflow as hvd
import keras
from sklearn.datasets import load_digits

from hvdcompress.horovod.keras import BroadcastCallback, DistributedOptimizer, MetricAverageCallback

hvd.init()
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target
x, y = images[300:], labels[300:]
share = len(x) // hvd.size()  # equal shares, so that all ranks take the same number of steps
x, y = x[hvd.rank() :: hvd.size()][:share], y[hvd.rank() :: hvd.size()][:share]

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), "scalecom", density=0.01)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
model.fit(x, y, batch_size=32, epochs=15, verbose=0, callbacks=[BroadcastCallback(), MetricAverageCallback()])

accuracy = model.evaluate(images[:300], labels[:300], verbose=0)[1]
if hvd.rank() == 0:
    print(f"held-out accuracy {accuracy:.1%}")
    print(optimizer.compressor.summary())
