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

from hvdcompress.ddp.local_steps import CountedLocalSteps

EVERY, STEPS = 3, 8
SETTINGS: dict[str, Any] = {"method": "topk", "density": 0.1, "min_elements": 10}

framework, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
INPUTS, LABELS = torch.randn(32, 20), torch.randint(0, 3, (32,))
evaluations: list[int] = []
agree: list[bool] = []  # after each step, whether the ranks have the same parameters


def everyone(value: Any) -> list[Any]:
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def step_and_compare(local: CountedLocalSteps) -> bool:
    """Note whether the ranks agree when a step has ended."""
    worked = step(local)
    first, second = everyone(next(local.model.parameters()).detach().clone())
    agree.append(torch.equal(first, second))
    return worked


def check_equal(layer: torch.nn.Linear) -> None:
    """Check in an evaluation that all ranks have the same parameters."""
    first, second = everyone(layer.weight.detach().clone())
    assert torch.equal(first, second), "ranks evaluate different models"
    evaluations.append(0)


def layer_of() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(20, 3)


def lightning(checkpoint: Path | None) -> torch.nn.Linear:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hvdcompress.integrations.lightning import CompressedDDP

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def training_step(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any) -> None:
            check_equal(self.layer)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=CompressedDDP(local_steps=EVERY, **SETTINGS),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    data = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
    trainer.fit(model, data, data, ckpt_path=checkpoint and checkpoint / "epoch=0.ckpt")
    return model.layer


def transformers(checkpoint: Path | None) -> torch.nn.Linear:
    from transformers import Trainer, TrainingArguments

    from hvdcompress.integrations.transformers import CompressionCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if not self.training:
                check_equal(self.layer)
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    trainer = Trainer(Net(), arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.add_callback(CompressionCallback(trainer, local_steps=EVERY, **SETTINGS))
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint / "checkpoint-4"))
    return trainer.model.layer


def accelerate(checkpoint: Path | None) -> torch.nn.Linear:
    from accelerate import Accelerator

    from hvdcompress.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    layer = layer_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
    model, optimizer, data = accelerator.prepare(layer, optimizer, loader)
    local = attach(accelerator, model, local_steps=EVERY, **SETTINGS)
    attach(accelerator, accelerator.prepare(torch.nn.Linear(20, 3)), **SETTINGS)  # each model has its own folder
    if checkpoint:
        accelerator.load_state(checkpoint)
    for epoch in range(1 if checkpoint else 0, 2):
        for inputs, labels in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
        if not epoch:
            with local.synchronized():
                accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            assert (folder / "hvdcompress").is_dir() and (folder / "hvdcompress_1").is_dir()
    local.synchronize()
    return layer


run: Callable[[Path | None], torch.nn.Linear] = {
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
}[framework]
step = CountedLocalSteps.step
CountedLocalSteps.step = step_and_compare  # type: ignore[method-assign]
states = [run(given).state_dict() for given in (None, folder)]
assert evaluations or framework == "accelerate"
# A step is counted in the next forward pass: the fourth one by both trainings
assert agree == [step % EVERY == 0 for step in (*range(1, STEPS + 1), *range(4, STEPS + 1))], agree
for rank, (whole, resumed) in enumerate(everyone(states)):
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), f"rank {rank}: resumed training differs in {name}"
        assert torch.equal(whole[name], states[0][name]), f"rank {rank} differs in {name}"
