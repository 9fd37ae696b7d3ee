"""A rank's figures as OpenMetrics text, and as scalars for TensorBoard."""

from __future__ import annotations

import math
from unittest.mock import Mock

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from tests.oracles.openmetrics import parse
from tests.unit.engine.helpers import trained


def test_openmetrics_are_the_figures_of_the_ledger() -> None:
    net = trained("gaussiank", density=0.05)  # it counts what it selects
    for rank in range(2):
        found = parse(net.openmetrics(rank))
        totals = {
            "steps": net.ledger.steps,
            "sent_bytes": net.ledger.bytes_sent(rank),
            "gradient_bytes": net.ledger.dense_bytes(rank),
            "wire_bytes": net.ledger.bytes_on_wire(rank),
            "collectives": net.ledger.collectives(rank),
            "codec_seconds": net.ledger.seconds(rank)["codec"],
            "method_events": sum(net.ledger.counters(rank).values()),
        }
        for name, total in totals.items():
            samples = [value for (sample, _), value in found.items() if sample == f"hvdcompress_{name}_total"]
            assert sum(samples) == pytest.approx(total) and total > 0, name
        assert all(("rank", str(rank)) in labels for _, labels in found)


def test_label_values_are_escaped() -> None:
    odd = 'a "b" \\ \n c, d="e"'
    found = parse(trained().openmetrics(job=odd))
    assert found and all(("job", odd) in labels for _, labels in found)


@pytest.mark.parametrize("name", ["0a", "a-b", "program", ""])
def test_malformed_and_reserved_label_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="label"):
        trained().openmetrics(**{name: "x"})


def scalars(net: Loopback, **options: int) -> dict[str, tuple[float, int]]:
    """Return {tag: (value, step)}, as a TensorBoard writer receives them."""
    writer = Mock(spec=["add_scalar"])
    net.log_to(writer, **options)
    found = {tag: (value, step) for tag, value, step in (call.args for call in writer.add_scalar.call_args_list)}
    assert all(isinstance(value, float) and math.isfinite(value) for value, _ in found.values())
    return found


def test_scalars_have_the_step_of_the_user_and_the_numbers_of_the_ledger() -> None:
    net = trained("scalecom", steps=4, density=0.05, rules=[{"match": {"name": "c"}, "method": "none"}])
    found = scalars(net)
    assert {step for _, step in found.values()} == {4}
    assert {step for _, step in scalars(net, step=70).values()} == {70}
    assert found["hvdcompress/ratio"][0] == net.ledger.compression_ratio(0)
    norm = pytest.approx(float(np.linalg.norm(net.residual("a", 0))), rel=1e-6)
    assert found["hvdcompress/scalecom density=0.05/residual_norm"][0] == norm
    assert found["hvdcompress/residual_norm"][0] == norm
    assert not any("none/residual_norm" in tag for tag in found), "uncompressed tensors have no residual"
    assert "hvdcompress/ratio" not in scalars(Loopback("topk", world_size=2)), "nothing was sent"
