"""What one sees of a Compressor: the summary's table, OpenMetrics, TensorBoard's scalars, and the log of rounds."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest

from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.observer import Completed, Observer, Sent
from hvdcompress.engine.telemetry.summary import scaled
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers
from tests.oracles.openmetrics import parse

SHAPES = {"a": (40, 50), "b": (300, 20), "c": (3,)}
SETTINGS = {"density": 0.05, "rules": [{"match": {"name": "b"}, "method": "powersgd"}]}


def trained(steps: int = 4, method: str = "scalecom", **settings: object) -> Loopback:
    net = Loopback(method, world_size=2, **{**SETTINGS, **settings})
    for step in range(steps):
        net.allreduce_many([{n: numbers(s, rank, step) for n, s in SHAPES.items()} for rank in range(2)])
    return net


def scalars_of(net: Loopback, **options: int) -> dict[str, tuple[float, int]]:
    found: dict[str, tuple[float, int]] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            assert isinstance(value, float) and math.isfinite(value)
            found[tag] = value, step

    net.log_to(Writer(), **options)
    return found


# -- figures ---------------------------------------------------------------------------------------------


def test_figures_are_the_ledgers_and_the_residuals() -> None:
    net = trained()
    by_method = {each.now: each for each in net.figures(1)}
    assert set(by_method) == {"powersgd", "scalecom density=0.05", "none"}
    for now, name in (("powersgd", "b"), ("scalecom density=0.05", "a"), ("none", "c")):
        each, entry = by_method[now], net.ledger.tensors(1)[name]
        assert (each.tensors, each.elements, each.totals) == (1, math.prod(SHAPES[name]), entry)
        assert each.ratio == entry.dense / entry.sent
        if now == "none":
            assert each.residual is None
        else:
            assert each.residual == pytest.approx(np.linalg.norm(net.residual(name, 1).astype(float)), rel=1e-12)
    assert sum(each.account.seconds for each in by_method.values()) == pytest.approx(net.ledger.seconds(1)["codec"])


def test_the_norm_of_a_long_residual_is_added_in_float64() -> None:
    net = Loopback("topk", world_size=1, density=1e-6)
    net.allreduce([np.full(3_000_000, 3e18, np.float32)])  # the squares' sum is beyond float32
    (only,) = net.figures()
    assert only.residual == pytest.approx(3e18 * math.sqrt(3_000_000 - 3), rel=1e-6)


def test_a_program_has_one_line_in_all_its_stages() -> None:
    for steps, now in ((1, "none"), (3, "topk density=0.05")):
        net = trained(steps, "topk", warmup={"steps": 2})
        each = next(each for each in net.figures() if "from step 2" in each.program)
        assert each.now == now and each.program == "none; from step 2: topk density=0.05"


def test_what_ranks_say_beside_tensors_has_a_line_of_its_own() -> None:
    net = trained()
    net.ledger.sent(0, "status", Sent("AllReduce", None, 56))
    *_, last = net.figures()
    assert (last.program, last.tensors, last.account.sent) == ("agreement", 0, 56)
    assert sum(each.account.sent for each in net.figures()) == net.ledger.bytes_sent(0)


# -- the table -------------------------------------------------------------------------------------------


def test_the_table_is_within_80_columns_and_its_total_is_the_ledgers() -> None:
    net = Loopback("gaussiank", world_size=2, density=0.0123456, values="rangefloat16m7", warmup={"steps": 2})
    for step in range(3):
        net.allreduce_many([{n: numbers(s, rank, step) for n, s in SHAPES.items()} for rank in range(2)])
    net.ledger._tensors[0, "a"].seconds = 123456.7
    net.ledger.begun(0, "a", 10**15)
    lines = net.summary().splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    assert len({len(line) for line in lines[:-1]}) == 1, "columns stand below each other"
    head, total = lines[0].split(), lines[-2].split()
    assert head == ["method", "tensors", "gradients", "sent", "ratio", "residual", "codec"]
    assert total[:2] == ["total", "3"] and f"{net.ledger.compression_ratio(0):.4g}" in total
    assert "rank 0 of 2, 3 steps" in lines[-1]


def test_the_table_before_the_first_step() -> None:
    net = Loopback("topk", world_size=2)
    assert net.summary().splitlines()[1].split()[:2] == ["total", "-"]


def test_a_warm_up_shows_where_it_leads() -> None:
    assert "none > topk density" in trained(1, "topk", warmup={"steps": 2}).summary()


# -- OpenMetrics -----------------------------------------------------------------------------------------


def test_openmetrics_are_the_ledgers_figures() -> None:
    net = trained(method="gaussiank")  # it counts what it selects
    for rank in range(2):
        found = parse(net.openmetrics(rank))
        whole = {name: sum(v for (n, _), v in found.items() if n == f"hvdcompress_{name}") for name in NAMES}
        assert whole["steps_total"] == net.ledger.steps == 4
        assert whole["sent_bytes_total"] == net.ledger.bytes_sent(rank) > 0
        assert whole["gradient_bytes_total"] == net.ledger.dense_bytes(rank)
        assert round(whole["wire_bytes_total"]) == net.ledger.bytes_on_wire(rank)
        assert whole["collectives_total"] == net.ledger.collectives(rank)
        assert whole["codec_seconds_total"] == pytest.approx(net.ledger.seconds(rank)["codec"])
        assert whole["method_events_total"] == sum(net.ledger.counters(rank).values()) > 0
        assert all(("rank", str(rank)) in labels for _, labels in found)


NAMES = [
    f"{name}_total"
    for name in (
        "steps", "sent_bytes", "gradient_bytes", "wire_bytes", "collectives", "codec_seconds", "method_events",
    )
]  # fmt: skip


def test_openmetrics_is_what_prometheus_reads() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = trained().openmetrics(job='a "b" \\ \n c')
    theirs = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert theirs == parse(text), "our grammar reads what Prometheus' client reads"


def test_labels_are_escaped_or_refused() -> None:
    odd = 'a "b" \\ \n c, d="e"'
    found = parse(trained(1).openmetrics(job=odd))
    assert found and all(("job", odd) in labels for _, labels in found)
    for name in ("0a", "a-b", "program", ""):
        with pytest.raises(ValueError, match="label"):
            trained(1).openmetrics(**{name: "x"})


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE a counter\na_total{} 1\n",  # no end
        "# TYPE a counter\na{} 1\n# EOF\n",  # a counter without _total
        "# TYPE a gauge\n# TYPE a gauge\n# EOF\n",
        '# TYPE a gauge\na{x="1"} 1\na{x="1"} 2\n# EOF\n',
        '# TYPE a gauge\na{x="1} 1\n# EOF\n',
        "# TYPE a_s gauge\n# UNIT a_s seconds\n# EOF\n",
        "# TYPE a gauge\na{} one\n# EOF\n",
        "# TYPE a gauge\n# TYPE b gauge\na{} 1\n# EOF\n",  # outside of its block
    ],
)
def test_the_grammar_refuses(text: str) -> None:
    with pytest.raises(AssertionError):
        parse(text)


# -- TensorBoard -----------------------------------------------------------------------------------------


def test_scalars_have_the_users_step_and_the_ledgers_numbers() -> None:
    net = trained()
    found = scalars_of(net)
    assert {step for _, step in found.values()} == {4}
    assert {step for _, step in scalars_of(net, step=70).values()} == {70}
    assert found["hvdcompress/ratio"][0] == net.ledger.compression_ratio(0)
    assert found["hvdcompress/scalecom density=0.05/residual_norm"][0] == pytest.approx(
        float(np.linalg.norm(net.residual("a", 0))), rel=1e-6
    )
    norms = [each.residual for each in net.figures() if each.residual is not None]
    assert found["hvdcompress/residual_norm"][0] == pytest.approx(math.hypot(*norms))
    assert not any("none/residual_norm" in tag for tag in found), "dense tensors keep nothing"
    assert "hvdcompress/ratio" not in scalars_of(Loopback("topk", world_size=2)), "nothing was sent"


def test_torchs_writer_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    net = trained()
    with SummaryWriter(str(tmp_path)) as writer:
        net.log_to(writer)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars("hvdcompress/ratio")
    assert (event.step, event.value) == (4, pytest.approx(net.ledger.compression_ratio(0)))


# -- the log ---------------------------------------------------------------------------------------------


class Answers(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def completed(self, rank: int, name: str, what: Completed) -> None:
        assert what.seconds >= 0
        self.seen.append((rank, name, what.method, what.round, what.collective, what.num_bytes))


def test_every_round_is_an_event() -> None:
    net, answers = Loopback("scalecom", world_size=2, density=0.05), Answers()
    net.watch(answers)
    net.allreduce([numbers((40, 50), rank) for rank in range(2)], name="w")
    for rank in range(2):
        mine = [event for event in answers.seen if event[0] == rank]
        assert [(e[1], e[2], e[3], e[4]) for e in mine] == [
            ("w", "scalecom", 0, "Broadcast"),
            ("w", "scalecom", 1, "AllReduce"),
        ]
        assert sum(event[-1] for event in mine) == net.ledger.bytes_sent(rank)


def test_the_variable_makes_a_line_a_round(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(log.VARIABLE, "debug")
    net = Loopback("scalecom", world_size=2, density=0.05)
    monkeypatch.setenv(log.VARIABLE, "")
    quiet = Loopback("scalecom", world_size=2, density=0.05)
    with caplog.at_level(logging.DEBUG, "hvdcompress"):
        for each in (net, quiet):
            each.allreduce([numbers((40, 50), rank) for rank in range(2)], name="w")
    assert len(caplog.messages) == 4, "two rounds on two ranks, and none of the other Compressor"
    assert any(
        line.startswith("rank 1: tensor 'w', method scalecom, round 1, AllReduce, 400 bytes, ") and line.endswith(" ms")
        for line in caplog.messages
    ), caplog.messages


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "verbose")
    with pytest.raises(ValueError, match="HVDCOMPRESS_LOG.*debug"):
        Loopback("topk", world_size=2)


@pytest.mark.parametrize(
    "amount,text", [(0, "0 "), (999, "999 "), (1_000, "1.00 k"), (25_600_000, "25.6 M"), (987_654_321, "988 M")]
)
def test_amounts_have_three_digits(amount: float, text: str) -> None:
    assert scaled(amount) == text
