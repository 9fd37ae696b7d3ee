"""The saved state of a rank: what is refused, how it is re-sharded, and how it moves into other buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine.saving import snapshot
from hvdcompress.method import TensorSpec
from hvdcompress.testing import Trial, numbers
from tests.unit.engine.helpers import trained


def test_resharding_sums_residuals_and_keeps_other_state() -> None:
    head = {"world": 2, "steps": {"w": 3}, "merge": {"w": {"basis": "keep", "residual": "sum"}}}
    slots = {"basis": np.ones(3, np.float32), "residual": np.ones(3, np.float32)}
    (one,) = snapshot.reshard([{**head, "rank": rank, "state": {"w": slots}} for rank in range(2)], 1)
    assert one["state"]["w"]["basis"].tolist() == [1, 1, 1] and one["state"]["w"]["residual"].tolist() == [2, 2, 2]


def test_names_may_differ_in_a_prefix() -> None:
    """Keras changes the prefix of its paths when a model is saved. A name that could mean two tensors is kept."""
    saved = {table: {"net/a/w": 1, "net/b/w": 2, "c": 3} for table in snapshot.TABLES}
    renamed = snapshot.renamed(saved, ["a/w", "b/w", "c"])
    assert all(renamed[table] == {"a/w": 1, "b/w": 2, "c": 3} for table in snapshot.TABLES)
    back = snapshot.renamed(renamed, ["net/a/w", "net/b/w", "c"])
    assert all(back[table] == saved[table] for table in snapshot.TABLES)
    for names in (["w", "c"], ["x/net/a/w", "y/net/a/w", "net/b/w", "c"], [], ["aw", "bw"], list(saved["steps"])):
        assert snapshot.renamed(saved, names) == saved


@pytest.mark.parametrize("key", ["format", "plan", "world", "rank", "made_by", "metrics", "steps", "restarts", "merge"])
def test_a_state_without_a_key_is_refused(key: str) -> None:
    local = trained(world_size=1, steps=1).ranks[0]
    with pytest.raises(ValueError, match=key):
        local.load_state_dict({k: value for k, value in local.state_dict().items() if k != key})


@pytest.mark.parametrize(
    "table,entry", [("restarts", [1, 2]), ("restarts", [1, 2, -3]), ("restarts", 3), ("steps", -1), ("steps", True)]
)
def test_a_malformed_entry_is_refused_and_its_table_named(table: str, entry: Any) -> None:
    local = trained(world_size=1, steps=1).ranks[0]
    with pytest.raises(ValueError, match=f"'{table}'"):
        local.load_state_dict({**local.state_dict(), table: {"a": entry}})


def test_tensors_of_one_bucket_must_be_at_one_step() -> None:
    local = trained(world_size=1, min_elements=1, bucket_elements=10_000).ranks[0]
    saved = local.state_dict()
    saved["steps"]["b"] = 7
    with pytest.raises(ValueError, match="at different steps"):
        local.load_state_dict(saved, local.buckets)


def test_a_trigger_before_saving_restarts_the_phases_after_loading() -> None:
    """The state is saved after the step in which the ranks agreed on the trigger; it takes effect in the next one."""
    net, other = (Trial(hvdcompress.get_method("acpsgd"), 2) for _ in range(2))
    for step in range(9):
        if step == 8:
            net.trigger()
        net.allreduce([numbers((50, 80), rank, step) for rank in range(2)], "w")
    other.restore(net.saved(), [TensorSpec("w", (50, 80))])
    found, want = (one.allreduce([numbers((50, 80), rank, 9) for rank in range(2)], "w")[0] for one in (other, net))
    np.testing.assert_array_equal(found, want)
