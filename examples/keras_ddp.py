"""Keras 3 on PyTorch: ``model.fit`` with a training step that goes through DDP, and compressed gradients.

torchrun --nproc-per-node 2 examples/keras_ddp.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
keras.utils.set_random_seed(0)
torch.set_num_threads(1)


class DataParallel(keras.Sequential):
    """A model that is trained through DDP, by an optimizer of PyTorch."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        optimizer.zero_grad()
        prediction = ddp_model(x, training=True)
        loss = self.compute_loss(x, y, prediction, sample_weight)
        loss.backward()
        optimizer.step()
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, prediction, sample_weight]))
        return {metric.name: metric.result() for metric in self.metrics}


digits = load_digits()
images, labels = digits.images.reshape(-1, 64).astype(np.float32) / 16, digits.target
train = np.arange(len(labels)) % 5 != 0

model = DataParallel([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
ddp_model = DistributedDataParallel(model)
compressor = ddp.attach(ddp_model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], jit_compile=False
)

share = train.sum() // size  # equal shares, so that all ranks take the same number of steps
x, y = images[train][rank::size][:share], labels[train][rank::size][:share]
model.fit(x, y, batch_size=32, epochs=15, verbose=0)

_, accuracy = model.evaluate(images[~train], labels[~train], verbose=0)
if rank == 0:
    print(f"held-out accuracy {accuracy:.1%}")
    print(compressor.summary())
dist.destroy_process_group()
