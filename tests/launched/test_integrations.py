"""The frameworks' examples train, checkpoint and go on from it to the bit, each by the framework's own usual call.

They need what ``pip install hvdcompress[lightning,accelerate,transformers]`` brings: 29 MB, which ``launch/setup.sh``
installs. What is not there is skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import ROOT
from tests.installed import needs
from tests.launching import launch

#: framework -> how its example is launched, its checkpoints in the middle and at the end, and where residuals are
FRAMEWORKS = {
    "lightning": ("torchrun-2", "epoch=9.ckpt", "epoch=19.ckpt", "{}.hvdcompress"),
    "accelerate": ("torchrun-2", "epoch-9", "epoch-19", "{}/hvdcompress"),
    "transformers": ("torchrun-2", "checkpoint-230", "checkpoint-460", "{}/hvdcompress"),
}


def train(framework: str, *arguments: Path) -> str:
    kind = FRAMEWORKS[framework][0]
    script = ROOT / "examples" / f"{framework}_compressed.py"
    done = launch(kind, script, *map(str, arguments), seconds=120, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def residuals(framework: str, checkpoint: Path) -> list[dict[str, np.ndarray]]:
    folder = Path(FRAMEWORKS[framework][3].format(str(checkpoint).removesuffix(".ckpt")))
    (step,) = {path.name.split("-")[1] for path in folder.glob("step-*")}
    return [load_file(folder / f"step-{step}-rank-{rank}-of-2.safetensors") for rank in range(2)]


def weights(framework: str, checkpoint: Path) -> dict[str, np.ndarray]:
    if framework == "lightning":
        import torch

        return {name: w.numpy() for name, w in torch.load(checkpoint, weights_only=False)["state_dict"].items()}
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=[] if name == "lightning" else [pytest.mark.slow]) for name in FRAMEWORKS]
)
def test_training_goes_on_from_a_checkpoint_to_the_bit(framework: str, tmp_path: Path) -> None:
    needs(framework)
    _, middle, end, _ = FRAMEWORKS[framework]
    said = train(framework, tmp_path / "whole")
    rate, accuracy = map(float, re.search(r"sent (\d+)x less, held-out accuracy ([\d.]+)%", said).groups())
    assert rate > 20 and accuracy > 90, said[-2000:]
    assert "adapted to the delay of gradients" in said, "the momentum of the framework's optimizer"
    before = residuals(framework, tmp_path / "whole" / middle)
    assert all(any(np.abs(array).max() > 0 for array in rank.values()) for rank in before), "residuals to restore"
    assert any(not np.array_equal(before[0][name], before[1][name]) for name in before[0]), "each rank has its own"

    train(framework, tmp_path / "resumed", tmp_path / "whole" / middle)
    for found in (residuals, lambda f, c: [weights(f, c)]):
        whole, resumed = (found(framework, tmp_path / run / end) for run in ("whole", "resumed"))
        for one, other in zip(whole, resumed, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=f"{framework}: {name}")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_local_steps_exchange_and_go_on_from_a_checkpoint_to_the_bit(framework: str, tmp_path: Path) -> None:
    needs(framework)
    script = ROOT / "tests" / "launched" / "local_integrations.py"
    done = launch("torchrun-2", script, framework, str(tmp_path), seconds=90, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout[-4000:]
