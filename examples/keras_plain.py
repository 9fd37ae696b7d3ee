"""A plain Keras 3 training script for one process: a small network on scikit-learn's digits.

python examples/keras_plain.py
"""

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target
x, y = images[300:], labels[300:]

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
model.fit(x, y, batch_size=32, epochs=15, verbose=0)

print(f"held-out accuracy {model.evaluate(images[:300], labels[:300], verbose=0)[1]:.1%}")
