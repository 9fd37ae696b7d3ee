"""What a user is told of a plan: after the first step, what is compressed, or that nothing is."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.describe import first_step
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
def test_what_the_first_step_did(settings: dict[str, object], expected: str) -> None:
    specs = [TensorSpec("a", (500, 500)), TensorSpec("b", (500, 10)), TensorSpec("c", (10,))]
    assert first_step(plan_of(settings).buckets(specs, BY_NAME), 1_020_000, 15_100) == expected


def test_a_fact_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log.info_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="hvdcompress"):
        log.info_once("this")
        log.info_once("this")
    assert caplog.text.count("this") == 1
    assert caplog.records[0].levelno == logging.INFO


def test_a_world_of_one_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    mpi = pytest.importorskip("hvdcompress.mpi", exc_type=ImportError)
    log.warn_once.cache_clear()
    compressor = mpi.Compressor("topk", mpi.compressor.MPI.COMM_SELF)
    compressor.allreduce(np.ones(10, np.float32), name="w")
    assert "there is only one rank" in caplog.text
    compressor.close()
