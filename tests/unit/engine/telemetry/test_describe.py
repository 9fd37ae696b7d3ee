"""The line that is logged after the first step: which tensors are compressed."""

from __future__ import annotations

import pytest

from hvdcompress.engine.telemetry.reports import first_step
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME, plan_of


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"method": "topk"}, "topk density=0.01 on 2 of 3 tensors, 1.02 MB → 15.1 kB in the first step"),
        (
            {"method": "topk", "rules": [{"match": {"name": "b"}, "method": "fp16"}]},
            "topk density=0.01 on 1, fp16 on 1 of 3 tensors, 1.02 MB → 15.1 kB in the first step",
        ),
        ({"method": "none"}, ""),
        ({"method": "topk", "min_elements": 10**9}, ""),
    ],
)
def test_the_line_after_the_first_step(settings: dict[str, object], expected: str) -> None:
    specs = [TensorSpec("a", (500, 500)), TensorSpec("b", (500, 10)), TensorSpec("c", (10,))]
    assert first_step(plan_of(settings).buckets(specs, BY_NAME), 1_020_000, 15_100) == expected
