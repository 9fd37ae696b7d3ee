"""What collectives take on links of a known rate."""

from __future__ import annotations

import json

import pytest

from experiments.cluster import hosts
from experiments.scale import links
from experiments.scale.cost import Point, Work


@pytest.mark.slow
def test_links_are_measured(tmp_path):
    if missing := hosts.problem():
        pytest.skip(missing)
    lines = [json.loads(line) for line in links.measure(2, "100mbit", 0.1)]
    found = [Point.from_dict(line) for line in lines]
    assert {point.label.split()[1] for point in found} == set(links.COLLECTIVES)
    longest = max(found, key=lambda point: point.work.line)
    bare = 8 * longest.work.line / 1e8
    # at full speed 1.05 of it; other programs on the machine may take their share
    assert bare < longest.seconds < 4 * bare, "the link is what takes the time"
    assert isinstance(longest.work, Work) and longest.work.world_size == 2
