"""Train on the digits with Lightning and compressed gradients: only the strategy differs from a plain Trainer.

python examples/lightning_compressed.py [FOLDER [CHECKPOINT]]

The first run compiles kernels, which takes some seconds; later runs load them from disk.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from hvdcompress.integrations.lightning import CompressedDDP

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"  # folder for checkpoints
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None  # a checkpoint to resume from
seed_everything(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = torch.arange(len(labels)) % 5 != 0


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


trainer = Trainer(
    max_epochs=20,
    accelerator="cpu",
    devices=2,
    strategy=CompressedDDP("scalecom", density=0.01),
    callbacks=[ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=10, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Digits()
data = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True)
trainer.fit(model, data, ckpt_path=checkpoint)

accuracy = (model.net(images[~train]).argmax(1) == labels[~train]).float().mean().item()
if trainer.is_global_zero:
    compressor = trainer.strategy.compressor
    print(f"sent {compressor.ledger.compression_ratio():.0f}x less, held-out accuracy {accuracy:.1%}")
    print(compressor.summary())
