"""What collectives take on links of a known rate."""

from __future__ import annotations

import pytest

from experiments.cluster import hosts
from experiments.cost_model import links


@pytest.mark.slow
def test_links_are_measured():
    if missing := hosts.problem():
        pytest.skip(missing)
    found = links.measure("100mbit")
    assert {record["label"].split()[1] for record in found} == set(links.COLLECTIVES)
    longest = max(found, key=lambda record: record["line"])
    bare = 8 * longest["line"] / 1e8
    # At full speed 1.05 of it; other programs on the machine may take their share
    assert bare < longest["seconds"] < 4 * bare, "the link is what takes the time"
    assert longest["world_size"] == 2
