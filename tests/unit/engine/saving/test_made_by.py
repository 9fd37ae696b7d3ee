"""The origin of a saved state, and the differences that are reported when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import differences, made_by
from hvdcompress.plan import plan_of
from tests.unit.engine.helpers import trained

HERE = made_by("MPI")


def compare(before: dict, now: dict, **saved: object) -> str:
    """Return the reported differences between the plan of a saved state and the plan here."""
    return differences({"plan": plan_of(before).to_dict(), "made_by": HERE, **saved}, plan_of(now))


def test_the_driver_and_versions_are_saved() -> None:
    assert HERE["driver"] == "MPI"
    assert HERE["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    "before,now,reported",
    [
        ({"schedule": {"density": {"steps": {0: 0.1, 9: 0.01}}}},) * 2 + ("",),
        ({}, {"watchdog": False, "end_after": 7}, ""),
        ({}, {"density": 0.5}, "density was 0.01, is 0.5"),
        ({}, {"optimizer_momentum": "keep"}, "optimizer_momentum was adapt, is keep"),
        (
            {"warmup": {"steps": 3}},
            {"method": "powersgd"},
            "method was topk, is powersgd; warmup was {'steps': 3}, is not set",
        ),
    ],
)
def test_only_settings_that_affect_results_are_reported(before: dict, now: dict, reported: str) -> None:
    assert compare({"method": "topk", **before}, {"method": "topk", **now}) == reported


def test_a_file_is_described(tmp_path: Path) -> None:
    net = trained(steps=1)
    path = checkpoint.save(net.ranks[1].state_dict(), tmp_path)
    about = yaml.safe_load(checkpoint.describe(path))
    assert yaml.safe_load(checkpoint.describe(tmp_path)) == about
    assert (about["file"], about["step"], about["rank"], about["world"]) == (str(path), 1, 1, 2)
    assert about["plan"] == json.loads(net.plan.source) and about["made_by"]["driver"] == "loopback"
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError):
        checkpoint.describe(tmp_path / "other")
    path.write_bytes(checkpoint.to_bytes(net.ranks[1].state_dict()))  # from another storage
    assert yaml.safe_load(checkpoint.describe(path)) == about
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a state saved by hvdcompress"):
        checkpoint.describe(path)


def test_a_folder_of_torch_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"pickled")
    with pytest.raises(FileNotFoundError, match=r"written by torch\.distributed\.checkpoint.*guides/checkpoints"):
        checkpoint.describe(tmp_path)
