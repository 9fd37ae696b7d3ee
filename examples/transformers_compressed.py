"""Train on the digits with the Transformers Trainer and compressed gradients: one callback.

torchrun --nproc-per-node 2 examples/transformers_compressed.py [FOLDER [CHECKPOINT]]

The first run compiles kernels, which takes some seconds; later runs load them from disk.
"""

import sys

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments

from hvdcompress.integrations.transformers import CompressionCallback

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/transformers"  # folder for checkpoints
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None  # a checkpoint to resume from
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = torch.arange(len(labels)) % 5 != 0


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


arguments = TrainingArguments(
    folder,
    num_train_epochs=20,
    per_device_train_batch_size=32,
    learning_rate=0.01,
    save_strategy="epoch",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
data = [{"x": x, "labels": y} for x, y in zip(images[train], labels[train], strict=True)]
trainer = Trainer(Digits(), arguments, train_dataset=data)
compression = CompressionCallback(trainer, "scalecom", density=0.01, resume_from=checkpoint)
trainer.add_callback(compression)
trainer.train(resume_from_checkpoint=checkpoint)

accuracy = (trainer.model.net(images[~train]).argmax(1) == labels[~train]).float().mean().item()
if trainer.is_world_process_zero():
    print(f"sent {compression.compressor.ledger.compression_ratio():.0f}x less, held-out accuracy {accuracy:.1%}")
    print(compression.compressor.summary())
