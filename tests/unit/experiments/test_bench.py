"""Benchmarks: shapes, configuration, turns, records from given turns, and a group whose rank is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pandas as pd
import pytest

from experiments import nets
from experiments.bench import report, run
from experiments.bench.config import BASELINES, Bench
from experiments.bench.ranks import Group, RankError
from hvdcompress.cli.numbers import HEADERS
from hvdcompress.plan import PlanError
from tests import ROOT
from tests.installed import needs

SMALL = {"sets": [{"net": "resnet32", "label": "tiny", "only": ["layer1.0.*"]}], "methods": ["topk"]}


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
    with pytest.raises(ValueError, match="no net 'resnet5'.*did you mean 'resnet50'"):
        nets.get("resnet5")


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "bench").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_packaged_benchmarks(file):
    if "sets:" not in file.read_text():
        pytest.skip("methods for another command")
    if missing := [path for path in re.findall(r"gradients: ([^,]+)", file.read_text()) if not Path(path).exists()]:
        with pytest.raises(PlanError, match=f"{missing[0]} does not exist"):
            Bench.open(file)
        return
    bench = Bench.open(file)
    again = Bench.open(bench.model_dump(exclude_none=True))
    assert bench.name == file.stem and list(map(str, again.turns())) == list(map(str, bench.turns()))
    assert set(bench.baselines) <= set(BASELINES)


def test_turns_interleave():
    bench = Bench.open({**SMALL, "rounds": 3, "rates": ["1gbit"], "baselines": ["none ring", "none ddp"]})
    order = [turn.contender.label for turn in bench.turns()]
    assert [sorted(order[at : at + 3]) for at in (0, 3, 6)] == [["none ddp", "none ring", "topk"]] * 3
    assert {order[0], order[3], order[6]} == {"none ddp", "none ring", "topk"}, "each round begins with another"


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
    {**turn("qsgd", 0), "exchanges": [], "failed": "rank 1: it is tired"},
]


@pytest.fixture
def records():
    return report.summarize(TURNS).set_index("contender")


def test_speed_up_is_against_the_best_dense_all_reduce(records):
    assert records.loc["none ddp", ["seconds", "least", "most", "exchanges"]].tolist() == [9.0, 8.0, 10.0, 2]
    up = records[["speed_up", "speed_up_least", "speed_up_most"]]
    assert up.loc["none ddp"].tolist() == [1, 1, 1], "fp16 is faster, but not dense"
    # Medians: 9/1; by rounds 8/1.0 and 10/1.5
    assert up.loc["topk"].tolist() == pytest.approx([9.0, 10 / 1.5, 9.0])
    assert up.loc["none ring"].tolist() == pytest.approx([9 / 10.5, 10 / 12, 8 / 9])
    assert "qsgd" not in records.index, "a failed turn has no figures"


def test_parts_add_up_to_the_median(records):
    row = records.loc["topk"]  # 6.0 s in 5 exchanges; the median is 1.0 s
    assert row["encode"] == pytest.approx(0.1 * 5 / 6) and row["decode"] == pytest.approx(0.05 * 5 / 6)
    wire = 8 * (1 + HEADERS) * 4e6 / 1e8
    assert row["wire"] == pytest.approx(wire) and row["wait"] == pytest.approx(0.6 * 5 / 6 - wire)
    assert sum(row[part] for part in report.PARTS) == pytest.approx(1.0)
    assert records.loc["none ddp", list(report.PARTS)].isna().all(), "DDP's time cannot be split"


def test_resuming_continues_where_a_run_was_killed(tmp_path, monkeypatch, capsys):
    bench = Bench.open({**SMALL, "rates": ["loopback"], "rounds": 2, "baselines": ["none ring", "none ddp"]})
    whole = [{**t.key, **turn(t.contender.label, t.round, 1.0), **t.key} for t in bench.turns()]
    folder = tmp_path / "out"
    run.prepare(folder, bench, resume=False)
    (folder / run.TURNS).write_text("\n".join(map(json.dumps, whole[:4])) + '\n{"rate": "cut o')
    taken = []

    def take(turn, *_):
        taken.append(turn.key)
        return {key: value for key, value in whole[0].items() if key not in turn.key}

    monkeypatch.setattr(run, "_take", take)
    run.prepare(folder, bench, resume=True)
    assert run.run(bench, folder) == 0
    assert taken == [t.key for t in bench.turns()[4:]]
    written = json.loads((folder / "bench-bench.json").read_text())
    assert [row["exchanges"] for row in written["records"]] == [
        2,
        2,
        2,
    ] and "tiny at loopback" in capsys.readouterr().out
    with pytest.raises(ValueError, match="measured with another rounds"):
        run.prepare(folder, bench.override(rounds=1), resume=True)


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_killed_rank_is_named(tmp_path):
    needs("torch", "psutil")
    group = Group("ddp", 2, None, tmp_path / "log.txt", sleeps=False)
    given = {"net": None, "gradients": None, "label": "t", "only": [], "tensors": {"w": (50, 40)}}
    try:
        group.start()
        group.ask("prepare", set=given, contender={"how": "dense", "warm_up": 1})
        first, second = group.ask("measure")
        assert first["end"] > first["start"] and second["end"] > second["start"]
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 ended without a message"):
            group.ask("check")
    finally:
        group.stop()


def test_the_picture_has_a_bar_for_each(tmp_path):
    drawn = report.speed_ups(report.summarize(TURNS))
    assert len(drawn.axes[0].patches) == 4
    assert isinstance(report.summarize([]), pd.DataFrame)
