"""Benchmarks: shapes, configuration errors, figures from given results, and (marked) real exchanges."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import nets
from experiments.bench import files, results
from experiments.bench.config import BASELINES, Bench
from experiments.cluster import rates
from hvdcompress.plan import PlanError
from tests import ROOT

SMALL = {"sets": [{"net": "resnet32", "label": "tiny", "only": ["layer1.0.*"]}], "methods": ["topk"]}


# -- shapes ----------------------------------------------------------------------------------------


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
    assert all(extent > 0 for shape in found.values() for extent in shape)


def test_shapes_that_papers_name():
    resnet = nets.get("resnet50")
    small = sum(np.prod(shape) for shape in resnet.values() if shape[2:] == (3, 3))
    assert 0.43 < small / nets.total(resnet) < 0.45  # 3×3 windows: what GradiVeQ could compress
    convolutions = {name: shape for name, shape in nets.get("vgg16").items() if name.startswith("features")}
    assert nets.total(convolutions) == 14_714_688
    assert convolutions["features.0.weight"] == (64, 3, 3, 3) and convolutions["features.28.weight"] == (512, 512, 3, 3)
    assert nets.get("resnet32")["layer2.0.conv1.weight"] == (32, 16, 3, 3)
    with pytest.raises(ValueError, match="no net 'resnet5'.*did you mean 'resnet50'"):
        nets.get("resnet5")


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "bench").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_benchmarks_that_come_along(file):
    if "sets:" not in file.read_text():
        pytest.skip("no benchmark of times: it is for python -m experiments compare or scale")
    if missing := [path for path in re.findall(r"gradients: ([^,]+)", file.read_text()) if not Path(path).exists()]:
        with pytest.raises(PlanError, match=f"{missing[0]} does not exist"):
            Bench.open(file)
        return
    bench = Bench.open(file)
    assert bench.name == file.stem
    of_their_own = ("fit", "alexnet", "awake", "saved", "ddp_hooks", "ddp_cuda")
    assert bench.baselines == list(BASELINES) or file.stem in of_their_own
    again = Bench.open(bench.model_dump(exclude_none=True))
    assert [str(turn) for turn in again.turns(again.rates)] == [str(turn) for turn in bench.turns(bench.rates)]


def test_turns_are_taken_in_rounds():
    bench = Bench.open({**SMALL, "rounds": 3, "rates": ["1gbit"], "baselines": ["none ring", "none ddp"]})
    order = [turn.contender.label for turn in bench.turns(bench.rates)]
    assert [sorted(order[at : at + 3]) for at in (0, 3, 6)] == [["none ddp", "none ring", "topk"]] * 3
    assert {order[0], order[3], order[6]} == {"none ddp", "none ring", "topk"}, "each round begins with another"
    turn = bench.turns(bench.rates)[2]
    assert str(turn) == "topk on tiny at 1 Gbit/s, round 1"  # what errors are headed with


# -- figures ---------------------------------------------------------------------------------------


def turn(contender, round, *seconds, rate="100mbit", **more):
    split = {} if "ddp" in contender else {"encode": 0.1, "decode": 0.05, "blocked": 0.6}
    return {
        "rate": rate,
        "set": "tiny",
        "contender": contender,
        "round": round,
        "copy": 0.008,
        "exchanges": [{"seconds": one, **split} for one in seconds],
        "dense": 4000.0,
        **({} if "ddp" in contender else {"sent": 100.0, "on_wire": 4_000_000.0, "calls": 3.0}),
        "interface": [5_000_000.0, 5_000_000.0],
        **more,
    }


TURNS = [
    turn("none ring", 0, 9.0),
    turn("none ring", 1, 12.0),
    turn("none ddp", 0, 8.0),
    turn("none ddp", 1, 10.0),
    turn("fp16 ring", 0, 5.0),
    turn("fp16 ring", 1, 5.0),
    turn("topk", 0, 1.0, 1.2, 0.8, copy=0.005),
    turn("topk", 1, 1.0, 2.0, copy=0.013),
]


@pytest.fixture
def folder(tmp_path):
    bench = Bench.open({**SMALL, "hosts": 2, "rounds": 2, "baselines": ["none ring", "fp16 ring", "none ddp"]})
    bench.save(tmp_path / "config.yaml")
    link = {"rate": "100mbit", "link": "2 emulated hosts, 100 Mbit/s each", "reached": ["94 Mbit/s", "93 Mbit/s"]}
    (tmp_path / "launch.json").write_text(json.dumps({"machine": {"cores": 2, "cpu": "a chip"}, "links": [link]}))
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, TURNS)) + '\n{"cut off')
    return tmp_path


def test_speed_up_is_against_the_best_dense_one(folder):
    rows = {row.contender: row for row in results.read(folder).rows}
    assert rows["none ddp"].time == (9.0, 8.0, 10.0)
    assert rows["none ddp"].speed_up == (1, 1, 1), "the best dense one; fp16 is not dense, though faster"
    assert rows["topk"].time == (1.0, 0.8, 2.0)
    # medians: 9/1; by rounds 8/1.0 and 10/1.5
    assert rows["topk"].speed_up == pytest.approx((9.0, 10 / 1.5, 9.0))
    assert rows["none ring"].speed_up == pytest.approx((9 / 10.5, 10 / 12, 8 / 9))


def test_where_the_time_goes(folder):
    rows = {row.contender: row for row in results.read(folder).rows}
    parts = rows["topk"].parts  # 6.0 s in 5 exchanges; the median is 1.0 s
    assert parts["encode"] == pytest.approx(0.1 * 5 / 6) and parts["decode"] == pytest.approx(0.05 * 5 / 6)
    wire = 8 * (1 + rates.HEADERS) * 4e6 / 1e8
    assert parts["wire"] == pytest.approx(wire), "what the link needs for the bytes and their headers"
    assert parts["wait"] == pytest.approx(0.6 * 5 / 6 - wire)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert not rows["none ddp"].parts, "DDP does not tell"


def test_tables_and_page(folder):
    result = results.read(folder)
    written = files.write(result, folder)
    table = (folder / "table.md").read_text()
    assert "**tiny at 100 Mbit/s: 6 of 95 tensors, 4 672 elements, 0.0187 MB; others stopped, ranks pinned**" in table
    assert "| DDP none (best dense) | 9.00 s | 8.00 s – 10.0 s | 2 | 1.00 |" in table
    assert "| topk | 1.00 s | 800 ms – 2.00 s | 5 | 9.00 (6.67 – 9.00) |" in table
    assert "2 ranks share 2 cores (a chip)" in table and "94 Mbit/s" in table
    assert "One core copied 100 MB in 8.00 ms (5.00 ms to 13.0 ms), between the turns." in table
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rows"][-1]["speed_up"] == {"middle": 9.0, "least": pytest.approx(10 / 1.5), "most": 9.0}
    if len(written) == 3:
        page = (folder / "report.html").read_text()
        assert "Where the time goes" in page and page.count("<svg role") == 2 and "best dense" in page
