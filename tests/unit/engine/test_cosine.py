"""The comparison of compressed gradients with the uncompressed average: ``cosine_every`` in the plan."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hvdcompress.engine.cosine import Product
from hvdcompress.loopback import Loopback
from hvdcompress.ops import fast
from tests.unit.engine.helpers import gradients, train, trained

SHAPES = {"a": (40, 50), "b": (30, 20), "c": (3,), "empty": (0,)}


def make(method: str = "topk", world_size: int = 2, **settings: Any) -> Loopback:
    return Loopback(method, world_size, **{"density": 0.05, "cosine_every": 1, **settings})


@pytest.mark.parametrize("op,dtype", [("average", "float16"), ("sum", "float32"), ("average", "float64")])
def test_uncompressed_gradients_have_a_cosine_of_one(op: Any, dtype: str) -> None:
    net = Loopback("none", 3, cosine_every=1)
    net.allreduce_many([{n: g.astype(dtype) for n, g in one.items()} for one in gradients(SHAPES, 0, 3)], op)
    found = net.ledger.last_compared()
    assert found is not None and (found.cosine, found.least) == pytest.approx((1, 1), abs=1e-6)


def test_steps_with_a_nan_or_zeros_or_in_a_pause_are_not_compared() -> None:
    net = make()
    bad = gradients(SHAPES)
    bad[1]["a"][3, 3] = np.nan
    net.allreduce_many(bad)
    net.allreduce([np.zeros(2000, np.float32)] * 2)
    with net.paused():
        train(net, [1], SHAPES)
    assert net.ledger.last_compared() is None


def test_the_product_of_two_vectors() -> None:
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    assert Product.of(zeros, ones, fast).cosine == 0
    assert Product.of(ones, -3 * ones, fast).cosine == pytest.approx(-1)
    assert np.isnan(Product.of(zeros, zeros, fast).cosine)
    # A framework has summed over 3 ranks, so this is 3 times the average
    assert Product.exact(6.0, 3.0) == Product(12.0, 36.0, 4.0)


def test_it_is_shown_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvdcompress"):
        net = trained("topk", shapes=SHAPES, density=0.05, cosine_every=3)
    found = net.ledger.last_compared()
    assert found is not None
    assert caplog.messages == [str(found)] and f"{found.cosine:.3f} in step 3" in str(found)
    assert str(found) in net.summary().replace("\n", " ")
    writer = Mock()
    net.log_to(writer)
    writer.add_scalar.assert_any_call("hvdcompress/cosine", found.cosine, 3)
    writer.add_scalar.assert_any_call("hvdcompress/least_cosine", found.least, 3)
    assert f'hvdcompress_cosine{{rank="0"}} {found.cosine!r}' in net.openmetrics()
    assert net.ledger.tensors()["cosine"].sent == 4 * (40 * 50 + 30 * 20 + 3)
    net.ledger.reset()
    assert net.ledger.last_compared() is None
