"""torch.distributed.checkpoint saves a Compressor with its model, and the same number of ranks loads it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.engine.saving import checkpoint
from hvdcompress.local_steps import LocalSteps
from tests import ROOT
from tests.ranks.checks import FOLDER
from tests.unit.house.pages import blocks

pytestmark = pytest.mark.drivers("ddp")

PAGE = ROOT / "docs" / "guides" / "checkpoints.md"


class Training:
    """A model with a Compressor."""

    def __init__(self):
        torch.manual_seed(0)
        layers = torch.nn.Linear(30, 40), torch.nn.Linear(40, 5)
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.compressor = ddp.attach(self.model, "topk", density=0.1, min_elements=10, optimizer_momentum="keep")

    def run(self, steps):
        for step in steps:
            torch.manual_seed(100 * step + dist.get_rank())
            self.sgd.zero_grad()
            self.model(torch.randn(8, 30)).square().mean().backward()
            self.sgd.step()
        return [each.clone() for each in self.model.state_dict().values()]

    def state(self):
        return {"model": self.model.state_dict(), "compressor": self.compressor}


def save_and_load(code, training, folder):
    """Run a block of the page: it saves or loads."""
    exec(code, {"model": training.model, "compressor": training.compressor, "folder": folder})


def blocks_of_the_page():
    return [code for code, _ in blocks(PAGE.read_text(), "python") if "dcp." in code]


def test_training_goes_on_to_the_bit(driver):
    """By the blocks of the guide, and without the planner."""
    saves, loads, copies = blocks_of_the_page()
    training = Training()
    training.run(range(3))
    folder = FOLDER / "dcp-same"
    save_and_load(saves, training, folder)
    want = training.run(range(3, 6))
    for planner in (False, True):
        other = Training()
        if planner:
            save_and_load(loads, other, folder)
        else:
            state = other.state()
            dcp.load(state, checkpoint_id=folder)
            other.model.load_state_dict(state["model"])
        torch.testing.assert_close(other.run(range(3, 6)), want, rtol=0, atol=0)
    if driver.rank == 0:
        exec(copies.replace("rank-0-of-2", f"rank-0-of-{driver.world_size}"), {"folder": folder})
        assert yaml.safe_load(checkpoint.describe(folder / "rank-0.safetensors"))["step"] == 3


def test_a_checkpoint_without_a_compressor(driver):
    training, folder = Training(), FOLDER / "dcp-without"
    state = training.state()
    del state["compressor"]
    dcp.save(state, checkpoint_id=folder)
    for planner, message in (
        (None, "Missing key"),
        (ddp.ReshardingPlanner(), "no state .* 'compressor'. To load the rest"),
    ):
        with pytest.raises(dcp.CheckpointException, match=message):
            dcp.load(training.state(), checkpoint_id=folder, planner=planner)
    dcp.load(training.state(), checkpoint_id=folder, planner=ddp.ReshardingPlanner(allow_partial_load=True))
    dcp.load(state, checkpoint_id=folder, planner=ddp.ReshardingPlanner())


def test_local_steps_are_saved_too(driver):
    results, folder = [], FOLDER / "dcp-local"
    for loads in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 40)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with LocalSteps(model, sgd, every=4, method="topk", density=0.1, min_elements=10) as local:
            if loads:
                dcp.load({"local": local}, checkpoint_id=folder)
            for step in range(local.steps, 10):
                torch.manual_seed(100 * step + driver.rank)
                sgd.zero_grad()
                model(torch.randn(8, 30)).square().mean().backward()
                sgd.step()
                local.step()
                if step == 5 and not loads:
                    dcp.save({"local": local}, checkpoint_id=folder)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_state_of_another_rank_is_refused(driver):
    training = Training()
    training.run(range(1))
    for_other = driver.gather(training.compressor.state_dict())[(driver.rank + 1) % driver.world_size]
    driver.must_raise(
        ValueError, ["states of all", "ranks are needed"], lambda: training.compressor.load_state_dict(for_other), False
    )
