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

from hvdcompress.local_steps import LocalSteps

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


def step_and_compare(local: LocalSteps) -> bool:
    """Note whether the ranks agree when a step has ended."""
    worked = step(local)
    first, second = everyone(next(local.model.parameters()).detach().clone())
    agree.append(torch.equal(first, second))
    return worked


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

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=LocalStepsDDP(EVERY, **SETTINGS),
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
    from transformers import Trainer, TrainingArguments

    from hvdcompress.integrations.transformers import LocalStepsCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

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
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint / "checkpoint-4"))
    return trainer.model.layer


def accelerate(checkpoint: Path | None) -> torch.nn.Linear:
    from accelerate import Accelerator

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
step = LocalSteps.step
LocalSteps.step = step_and_compare  # type: ignore[method-assign]
states = [run(given).state_dict() for given in (None, folder)]
assert agree == [False, False, True, False, False, True, False, False, False, True, False, False], agree
for rank, (whole, resumed) in enumerate(everyone(states)):
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), f"rank {rank}: resumed training differs in {name}"
        assert torch.equal(whole[name], states[0][name]), f"rank {rank} differs in {name}"
