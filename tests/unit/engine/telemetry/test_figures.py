"""A rank's figures by program: those of the ledger, and the norms of residuals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.loopback import Loopback
from tests.unit.engine.helpers import trained

SHAPES = {"a": (40, 50), "b": (300, 20), "c": (3,)}


def test_figures_are_those_of_the_ledger_and_the_residuals() -> None:
    rules = [{"match": {"name": "b"}, "method": "powersgd"}]
    net = trained("scalecom", shapes=SHAPES, density=0.05, rules=rules)
    by_method = {each.now: each for each in net.figures(1)}
    for now, name in (("powersgd", "b"), ("scalecom density=0.05", "a"), ("none", "c")):
        each, entry = by_method.pop(now), net.ledger.tensors(1)[name]
        assert (each.tensors, each.elements, each.totals) == (1, math.prod(SHAPES[name]), entry)
        assert each.ratio == entry.dense / entry.sent
        norm = None if now == "none" else pytest.approx(np.linalg.norm(net.residual(name, 1).astype(float)), rel=1e-12)
        assert each.residual == norm
    assert not by_method
    assert sum(each.totals.seconds for each in net.figures(1)) == pytest.approx(net.ledger.seconds(1)["codec"])


def test_norms_of_residuals_do_not_overflow_float32() -> None:
    net = Loopback("topk", world_size=1, density=1e-5)
    net.allreduce([np.full(300_000, 3e18, np.float32)])
    (only,) = net.figures()
    assert only.residual == pytest.approx(3e18 * math.sqrt(300_000 - 3), rel=1e-6)


@pytest.mark.parametrize("steps,now", [(1, "none"), (3, "topk density=0.05")])
def test_a_program_has_one_line_in_all_its_stages(steps: int, now: str) -> None:
    net = trained("topk", steps=steps, shapes=SHAPES, density=0.05, warmup={"steps": 2})
    each = next(each for each in net.figures() if "from step 2" in each.program)
    assert each.now == now and each.program == "none; from step 2: topk density=0.05"


def test_traffic_that_belongs_to_no_tensor_has_its_own_line() -> None:
    net = trained(shapes=SHAPES)
    net.ledger.sent(0, "status", Sent("AllReduce", None, 56))
    *_, last = net.figures()
    assert (last.program, last.tensors, last.totals.sent) == ("agreement", 0, 56)
    assert sum(each.totals.sent for each in net.figures()) == net.ledger.bytes_sent(0)
