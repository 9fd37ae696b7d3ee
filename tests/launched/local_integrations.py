"""Run by two ranks: local steps within a framework's loop, and again from its checkpoint after the fourth step.

``python local_integrations.py FRAMEWORK FOLDER``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

EVERY, STEPS = 3, 8
SETTINGS: dict[str, Any] = {"method": "topk", "density": 0.1, "min_elements": 10}

framework, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
INPUTS, LABELS = torch.randn(32, 20), torch.randint(0, 3, (32,))
agree: list[bool] = []  # after each step, whether the ranks have the same parameters


def everyone(value: Any) -> list[Any]:
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def note(layer: torch.nn.Linear) -> None:
    first, second = everyone(layer.weight.detach().clone())
    agree.append(torch.equal(first, second))


def layer_of() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(20, 3)


def lightning(checkpoint: Path | None) -> torch.nn.Linear:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hvdcompress.integrations.lightning import LocalStepsDDP

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def training_step(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            note(self.layer)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=LocalStepsDDP(EVERY, SETTINGS),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    data = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
    trainer.fit(model, data, ckpt_path=checkpoint and checkpoint / "epoch=0.ckpt")
    return model.layer


def transformers(checkpoint: Path | None) -> torch.nn.Linear:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hvdcompress.integrations.transformers import LocalStepsCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **more: Any) -> None:
            note(getattr(model, "module", model).layer)

    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=4,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    trainer = Trainer(Net(), arguments, train_dataset=data)
    trainer.add_callback(LocalStepsCallback(trainer, EVERY, **SETTINGS))
    trainer.add_callback(Note())
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint / "checkpoint-4"))
    return trainer.model.layer


def accelerate(checkpoint: Path | None) -> torch.nn.Linear:
    from accelerate import Accelerator

    from hvdcompress.local_steps import LocalSteps

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(layer_of(), evaluation_mode=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer, data = accelerator.prepare(optimizer, DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4))
    local = LocalSteps(model, optimizer, every=EVERY, **SETTINGS)
    if checkpoint:
        local.load(checkpoint)
    while local.steps < STEPS:
        for inputs, labels in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            local.step()
            note(model)
        if local.steps == STEPS // 2:
            local.save(folder)
            accelerator.wait_for_everyone()
    local.synchronize()
    return model


run: Callable[[Path | None], torch.nn.Linear] = {
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
}[framework]
whole = run(None)
noted = list(agree)
resumed = run(folder)
# The Trainer also exchanges parameters before it saves them, after the fourth and the last step
saved = framework == "transformers"
assert noted == [False, False, True, saved, False, True, False, saved], noted
assert agree[STEPS:] == noted[STEPS // 2 :], agree
for layer in (whole, resumed):
    for first, second in zip(*everyone([each.detach().clone() for each in layer.parameters()]), strict=True):
        assert torch.equal(first, second), "ranks differ at the end"
for first, second in zip(whole.parameters(), resumed.parameters(), strict=True):
    assert torch.equal(first, second), "resumed training differs"
