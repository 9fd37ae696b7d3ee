"""Train on the digits with Hugging Face accelerate and compressed gradients: one line after ``prepare``.

torchrun --nproc-per-node 2 examples/accelerate_compressed.py [FOLDER [CHECKPOINT]]

The first run compiles kernels, which takes some seconds; later runs load them from disk.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from hvdcompress.integrations.accelerate import attach

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"  # folder for checkpoints
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None  # a checkpoint to resume from
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = torch.arange(len(labels)) % 5 != 0

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
compressor = attach(accelerator, model, "scalecom", density=0.01)
if checkpoint:
    accelerator.load_state(checkpoint)

for epoch in range(10 if checkpoint else 0, 20):
    data.set_epoch(epoch)
    for x, y in data:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    if epoch % 10 == 9:
        accelerator.save_state(f"{folder}/epoch-{epoch}")

accuracy = (model(images[~train]).argmax(1) == labels[~train]).float().mean().item()
accelerator.print(f"sent {compressor.ledger.compression_ratio():.0f}x less, held-out accuracy {accuracy:.1%}")
accelerator.print(compressor.summary())
accelerator.end_training()
