"""``experiments bench`` and ``codec``: configurations, order of turns, records, a killed rank, steps in lockstep."""

from __future__ import annotations

import importlib.util
import json
import os
import signal

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import nets
from experiments.__main__ import app
from experiments.bench import codec, report, run
from experiments.bench.config import Bench
from experiments.bench.lockstep import Cpu, Lockstep, Tensors, warm_steps
from experiments.bench.ranks import Group, RankError
from hvdcompress import available, load_plan
from hvdcompress.cli.numbers import HEADERS
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME, PlanError
from hvdcompress.testing import numbers
from tests import ROOT
from tests.installed import needs

SMALL = {"sets": [{"net": "resnet32", "label": "tiny", "only": ["layer1.0.*"]}], "methods": ["topk"]}
#: but saved.yaml, whose gradients have to be saved first, and files for other commands
CONFIGS = [
    file
    for file in sorted((ROOT / "configs" / "bench").glob("*.yaml"))
    if "sets:" in file.read_text() and file.stem != "saved"
]


@pytest.mark.parametrize(
    ("net", "tensors", "elements"),
    [
        ("alexnet", 16, 61_100_840),
        ("vgg16", 32, 138_357_544),
        ("resnet32", 95, 464_154),
        ("resnet50", 161, 25_557_032),
        ("gpt2", 148, 124_439_808),
    ],
)
def test_nets_have_the_published_sizes(net, tensors, elements):
    found = nets.get(net)
    assert (len(found), nets.total(found)) == (tensors, elements)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"gradients": "nowhere.safetensors"}, "nowhere.safetensors does not exist"),
        ({"net": "resnet5"}, "no net 'resnet5'.*did you mean 'resnet50'"),
    ],
)
def test_unknown_gradients_are_named(gradients, message):
    with pytest.raises(PlanError, match=message):
        Bench.open({**SMALL, "sets": [{"label": "tiny", **gradients}]})


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_the_packaged_configurations(file):
    bench = Bench.open(file)
    again = Bench.open(bench.model_dump(exclude_none=True))
    assert bench.name == file.stem and list(map(str, again.turns())) == list(map(str, bench.turns()))


def test_each_round_begins_with_another_contender():
    contenders = {"none ring", "none ddp", "topk"}
    bench = Bench.open({**SMALL, "rounds": 3, "rates": ["1gbit"], "baselines": ["none ring", "none ddp"]})
    order = [turn.contender.label for turn in bench.turns()]
    assert {order[0], order[3], order[6]} == set(order[:3]) == contenders


# -- records ---------------------------------------------------------------------------------------


def turn(contender, round, *seconds, **more):
    split = {} if "ddp" in contender else {"encode": 0.1, "decode": 0.05, "blocked": 0.6}
    return {
        "rate": "100mbit",
        "set": "tiny",
        "contender": contender,
        "round": round,
        "kind": "dense" if "none" in contender else "baseline" if "fp16" in contender else "method",
        "link": "2 emulated hosts",
        "exchanges": [{"seconds": one, **split} for one in seconds],
        **({} if "ddp" in contender else {"sent": 100.0, "on_wire": 4_000_000.0, "calls": 3.0}),
        "interface": 5_000_000.0,
        **more,
    }


TURNS = [
    turn("none ring", 0, 9.0),
    turn("none ring", 1, 12.0),
    turn("none ddp", 0, 8.0),
    turn("none ddp", 1, 10.0),
    turn("fp16 ring", 0, 5.0),
    turn("fp16 ring", 1, 5.0),
    turn("topk", 0, 1.0, 1.2, 0.8),
    turn("topk", 1, 1.0, 2.0),
    turn("qsgd", 0, failed="rank 1: it is tired"),
]


def test_speed_up_is_against_the_fastest_dense_all_reduce():
    records = report.summarize(TURNS).set_index("contender")
    assert records.loc["none ddp", ["seconds", "least", "most", "exchanges"]].tolist() == [9.0, 8.0, 10.0, 2]
    up = records[["speed_up", "speed_up_least", "speed_up_most"]]
    assert up.loc["none ddp"].tolist() == [1, 1, 1], "fp16 is faster, but not dense"
    # Medians: 9/1; by rounds 8/1.0 and 10/1.5
    assert up.loc["topk"].tolist() == pytest.approx([9.0, 10 / 1.5, 9.0])
    assert up.loc["none ring"].tolist() == pytest.approx([9 / 10.5, 10 / 12, 8 / 9])
    assert "qsgd" not in records.index, "a failed turn has no figures"


def test_parts_add_up_to_the_median():
    records = report.summarize(TURNS).set_index("contender")
    row = records.loc["topk"]  # 6.0 s in 5 exchanges; the median is 1.0 s
    assert row["encode"] == pytest.approx(0.1 * 5 / 6) and row["decode"] == pytest.approx(0.05 * 5 / 6)
    wire = 8 * (1 + HEADERS) * 4e6 / 1e8
    assert row["wire"] == pytest.approx(wire) and row["wait"] == pytest.approx(0.6 * 5 / 6 - wire)
    assert sum(row[part] for part in report.PARTS) == pytest.approx(1.0)
    assert records.loc["none ddp", list(report.PARTS)].isna().all(), "DDP's time cannot be split"


def test_resuming_continues_where_a_run_was_killed(tmp_path, monkeypatch):
    bench = Bench.open({**SMALL, "rates": ["loopback"], "rounds": 2, "baselines": ["none ring", "none ddp"]})
    turns = [{**turn(t.contender.label, t.round, 1.0), **t.key} for t in bench.turns()]
    run.prepare(tmp_path / "out", bench)
    (tmp_path / "out" / run.TURNS).write_text("\n".join(map(json.dumps, turns[:4])) + '\n{"rate": "cut o')
    remaining = iter(turns[4:])
    monkeypatch.setattr(run, "_take", lambda turn, *_: {k: v for k, v in next(remaining).items() if k not in turn.key})
    run.prepare(tmp_path / "out", bench)
    assert run.run(bench, tmp_path / "out") == 0 and not list(remaining)
    with pytest.raises(ValueError, match="measured with another rounds"):
        run.prepare(tmp_path / "out", bench.override(rounds=1))


@pytest.mark.timeout(120)
def test_a_killed_rank_is_named(tmp_path):
    needs("torch", "psutil")
    group = Group("ddp", 2, None, tmp_path / "log.txt", sleeps=False)
    given = {"net": None, "gradients": None, "label": "t", "only": [], "tensors": {"w": (50, 40)}}
    try:
        group.start()
        group.ask("prepare", set=given, contender={"how": "dense", "warm_up": 1})
        assert all(measured["end"] > measured["start"] for measured in group.ask("measure"))
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 ended without a message"):
            group.ask("check")
    finally:
        group.stop()


# -- codec -----------------------------------------------------------------------------------------

SPECS = [TensorSpec(name, shape) for name, shape in nets.get("resnet32").items()][:12]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@pytest.mark.parametrize("device", ["cpu", pytest.param("tensors", marks=needs_torch)])
@pytest.mark.parametrize("id", available())
def test_a_step_in_lockstep_equals_a_drivers(id, device):
    short = {"dense_steps": 2, "matrix_rank": 1} if id == "gradiveq" else {}
    plan = load_plan({**codec.plans([id])[id], "min_elements": 100, **short})
    at = Cpu() if device == "cpu" else Tensors("cpu")
    ranks, net = Lockstep(plan, SPECS, 3, at), Loopback(plan, world_size=3)
    exact = device == "cpu" or plan.program.main.exact
    for step in range(3):
        given = [{spec.name: numbers(spec.shape, rank, step) for spec in SPECS} for rank in range(3)]
        gradients = [[at.array(each.ravel().copy()) for each in one.values()] for one in given]
        ranks.step(gradients)
        expected = net.allreduce(given)
        for spec, out in zip(SPECS, gradients[1], strict=True):
            dense = plan.buckets([spec])[0].program.main.id == "none"  # left to Horovod: nobody reduces it here
            wanted = (given if dense else expected)[1][spec.name].ravel()
            tolerance = {"rtol": 0 if exact else 1e-3, "atol": 0 if exact else 1e-6}
            np.testing.assert_allclose(at.fetch(out), wanted, **tolerance, err_msg=spec.name)


def test_every_method_is_timed_in_its_compressed_phase():
    """DGC and PowerSGD send vectors dense, and GradiVeQ sends most tensors dense in its first steps."""
    spec = TensorSpec("w", (5000, 5000))
    for label, settings in codec.plans().items():
        plan = load_plan(settings)
        codec.check(plan, [spec])
        [bucket] = plan.buckets([spec], BY_NAME)
        method = bucket.program.at(warm_steps(plan))
        assert method.id == label and method.phase_of(warm_steps(plan)) == len(method.phases) - 1
    with pytest.raises(ValueError, match="sends these tensors dense"):
        codec.check(load_plan({"method": "topk"}), [TensorSpec("w", (10,))])


@pytest.mark.timeout(120)
def test_the_command_writes_records(tmp_path):
    words = ["codec", "-m", "topk", "-m", "fp16", "--set", "5000", "--runs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "codec.json").read_text())["records"]
    assert [row["method"] for row in rows] == ["topk", "fp16"]
