"""What made a saved state, and what is said of it where it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.origin import differences, made_by
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD
from hvdcompress.plan import plan_of

HERE = made_by("MPI", SGD(0.9, nesterov=True).read, ["w"])


def said(before: dict, now: dict, **saved: object) -> str:
    return differences({"plan": plan_of(before).to_dict(), "made_by": HERE, **saved}, plan_of(now), HERE)


def test_what_is_noted() -> None:
    assert HERE["driver"] == "MPI" and HERE["momentum"] == "0.9 (Nesterov)"
    assert HERE["versions"]["numpy"] == np.__version__
    assert made_by("MPI", lambda name: None, ["w"])["momentum"] == ""


def test_only_what_matters_is_a_difference() -> None:
    scheduled = {"method": "topk", "schedule": {"density": {"steps": {0: 0.1, 10: 0.01}}}}
    assert said(scheduled, scheduled) == ""
    assert said({"method": "topk"}, {"method": "topk", "watchdog": False, "end_after": 7, "cosine_every": 3}) == ""
    assert said({"method": "topk"}, {"method": "topk", "density": 0.5}) == "density was 0.01, is 0.5"
    other = said({"method": "topk", "warmup": {"steps": 3}}, {"method": "powersgd"})
    assert other == "method was topk, is powersgd; warmup was {'steps': 3}, is not set"
    assert said({"method": "topk"}, {"method": "topk", "optimizer_momentum": "keep"}).startswith(
        "optimizer_momentum was"
    )


def test_a_key_that_an_earlier_version_did_not_have_has_its_default() -> None:
    earlier = {key: value for key, value in plan_of("topk").to_dict().items() if key != "optimizer_momentum"}
    assert differences({"plan": earlier}, plan_of("topk"), HERE) == ""


@pytest.mark.parametrize(
    "broken", [None, 3, [], {"versions": 7}, {"momentum": {}}, {"versions": {"hvdcompress": None}}]
)
def test_whatever_is_saved_there_nothing_fails(broken: object) -> None:
    assert said({"method": "topk"}, {"method": "topk"}, made_by=broken) == ""
    assert "method was ['no', 'method']" in said(
        {"method": "topk"}, {"method": "topk"}, plan={"method": ["no", "method"]}
    )


def test_a_file_is_described(tmp_path: Path) -> None:
    net = Loopback("topk", world_size=2, min_elements=1)
    net.allreduce([np.ones(100, np.float32)] * 2, name="w")
    path = checkpoint.save(net.ranks[1].state_dict(), tmp_path)
    about = yaml.safe_load(checkpoint.describe(path))
    assert yaml.safe_load(checkpoint.describe(tmp_path)) == about
    assert (about["file"], about["step"], about["rank"], about["world"]) == (str(path), 1, 1, 2)
    assert about["plan"] == json.loads(net.plan.source) and about["made_by"]["driver"] == "loopback"
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError):
        checkpoint.describe(tmp_path / "other")
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no state saved by hvdcompress"):
        checkpoint.describe(path)
