"""Benchmarks: shapes, configuration errors, figures from given results, and (marked) real exchanges."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hvdcompress import cli, get
from hvdcompress.lab import compare, nets
from hvdcompress.lab.bench import files, measure, ranks, report, results
from hvdcompress.lab.bench import run as benchmark
from hvdcompress.lab.bench.config import BASELINES, Bench, read_turns
from hvdcompress.lab.cluster import hosts, rates
from hvdcompress.lab.output import numbers
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


def test_tensorflow_lays_them_out_otherwise():
    torch, tensorflow = nets.get("resnet50"), nets.tensorflow_layout(nets.get("resnet50"))
    assert list(torch) == list(tensorflow) and nets.total(torch) == nets.total(tensorflow)
    assert torch["layer1.0.conv2.weight"] == (64, 64, 3, 3) and tensorflow["layer1.0.conv2.weight"] == (3, 3, 64, 64)
    assert tensorflow["conv1.weight"] == (7, 7, 3, 64) and tensorflow["fc.weight"] == (2048, 1000)
    assert tensorflow["bn1.weight"] == (64,)


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "bench").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_benchmarks_that_come_along(file):
    if "sets:" not in file.read_text():
        pytest.skip("no benchmark of times: it is for hvdcompress compare or scale")
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


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["sets: [resnet32]"], "methods: is missing"),
        (["sets: [resnet5]", "methods: [topk]"], "line 1: sets.0: there is no net 'resnet5'.*resnet50"),
        (["methods: [topk]", "sets:", "- {net: vgg16, only: [conv*]}"], r"line 3: sets.0: no tensor matches conv\*"),
        (["methods: [topk]", "sets:", "- {gradients: nowhere, label: x}"], "line 3: sets.0: nowhere does not exist"),
        (["methods: [topk]", "sets:", "- {net: vgg16, gradients: x}"], "line 3: sets.0: give either net or gradients"),
        (
            ["sets: [vgg16]", "methods: [topk]", "baselines: [none ddp]", "device: cuda"],
            "line 2: methods.0.over: must be ddp where device is cuda",
        ),
        (
            ["sets: [vgg16]", "methods: [{method: topk, over: ddp}]", "baselines: [none ring]", "device: cuda"],
            "line 3: baselines.0: must be over ddp where device is cuda",
        ),
        (["sets: [vgg16]", "methods: [topkk]"], "line 2: methods.0.*topkk.*did you mean"),
        (["sets: [vgg16]", "methods:", "- {method: topk, density: 7}"], "line 3: methods.0.density"),
        (["sets: [vgg16]", "methods:", "- {method: topk, over: ether}"], "line 3: methods.0.over.*'ether'"),
        (["sets: [vgg16]", "methods:", "- {method: topk, train: {momentum: 0}}"], "nothing is trained here"),
        (["sets: [vgg16]", "methods: [topk, topk]"], "methods.1: 'topk' is there twice"),
        (["sets: [vgg16]", "methods: [topk]", "rates: [fast]"], "line 3: rates.0: 'fast' is not a rate"),
        (
            ["sets: [vgg16]", "methods: [topk]", "baselines: [none rings]"],
            "line 3: baselines.0: unknown 'none rings'.*none ring",
        ),
        (["sets: [vgg16]", "methods: [topk]", "slow: [9=1mbit]"], "line 3: slow.0: there is no host9"),
        (["sets: [vgg16]", "methods: [topk]", "slow: [fast]"], "line 3: slow.0: 'fast': write HOST=RATE"),
        (["sets: [vgg16]", "methods: [topk]", "rounds: 0"], "line 3: rounds: 0"),
        (["sets: [vgg16]", "methods: [topk]", "awake: 1"], "line 3: awake: 1"),
        (["sets: [vgg16]", "methods: [topk]", "pin: maybe"], "line 3: pin: 'maybe'"),
        (["sets: [vgg16]", "methods: [topk]", "round: 1"], "line 3: round: unknown key.*did you mean 'rounds'"),
    ],
)
def test_errors_name_line_and_key(tmp_path, lines, words):
    file = tmp_path / "x.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(PlanError, match=words):
        Bench.open(file)


def test_the_command_refuses_before_it_starts_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("sets: [resnet32]\nmethods: [topk]\n")
    for words, message in (
        (["bench", "nowhere.yaml"], "nowhere.yaml"),
        (["bench", "x.yaml", "--rates", "fast"], "'fast' is not a rate"),
        (["bench", "x.yaml", "--methods", "topj"], "no method 'topj' (did you mean 'topk'?)"),
        (["bench", "x.yaml", "--sets", "x"], "no set 'x'"),
        (["bench", "x.yaml", "--resume", "--loopback"], "nothing to resume"),
    ):
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    monkeypatch.setattr(hosts, "problem", lambda: "Emulated hosts need root.")
    result = CliRunner().invoke(cli.app, ["bench", "x.yaml"])
    assert result.exit_code == 2 and "need root" in result.output and "--loopback" in result.output
    assert not Path("runs").exists()


def test_turns_are_taken_in_rounds():
    bench = Bench.open({**SMALL, "rounds": 3, "rates": ["1gbit"], "baselines": ["none ring", "none ddp"]})
    order = [turn.contender.label for turn in bench.turns(bench.rates)]
    assert [sorted(order[at : at + 3]) for at in (0, 3, 6)] == [["none ddp", "none ring", "topk"]] * 3
    assert {order[0], order[3], order[6]} == {"none ddp", "none ring", "topk"}, "each round begins with another"
    turn = bench.turns(bench.rates)[2]
    assert str(turn) == "topk on tiny at 1 Gbit/s, round 1"  # what errors are headed with


def test_saved_gradients_are_a_set(tmp_path):
    compare.save(tmp_path / "g.safetensors", [[{"a": np.ones((3, 2), np.float32)}]])
    bench = Bench.open({"sets": [{"gradients": str(tmp_path / "g.safetensors"), "label": "mine"}], "methods": ["topk"]})
    assert bench.sets[0].tensors() == {"a": (3, 2)}
    assert str(bench.sets[0]).startswith("mine: 1 tensors, 6 elements")


def test_a_set_says_what_it_leaves_out():
    words = str(Bench.open(SMALL).sets[0])
    assert words == "tiny: 6 of 95 tensors, 4 672 elements, 0.0187 MB"


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


@pytest.mark.parametrize(
    ("settings", "on_hosts", "without"),
    [
        ({}, "others stopped, ranks pinned", "others stopped"),
        ({"awake": True, "pin": False}, "others awake, ranks on any processor", "others awake"),
    ],
)
def test_titles_say_how_processors_were_shared(folder, settings, on_hosts, without):
    Bench.open({**Bench.open(folder / "config.yaml").model_dump(exclude_none=True), **settings}).save(
        folder / "config.yaml"
    )
    result = results.read(folder)
    assert report.heading(result, "tiny", "100mbit").endswith(f"0.0187 MB; {on_hosts}")
    assert report.heading(result, "tiny", "loopback").endswith(f"0.0187 MB; {without}")
    benchmark.prepare(folder, result.bench, False, resume=True)
    other = result.bench.model_copy(update={"awake": not result.bench.awake, "pin": not result.bench.pin})
    with pytest.raises(ValueError, match="measured with another awake, pin: resume"):
        benchmark.prepare(folder, other, False, resume=True)


@pytest.mark.parametrize("settings", [{}, {"awake": True, "pin": False}])
def test_who_is_stopped_and_pinned(monkeypatch, tmp_path, settings):
    bench = Bench.open({**SMALL, "hosts": 2, "baselines": ["none ring", "none gloo"], **settings})
    signals = []
    monkeypatch.setattr(ranks.Group, "_signal", lambda group, number: signals.append((group.name, number)))
    monkeypatch.setattr(ranks.Group, "launch", lambda group: None)
    monkeypatch.setattr(ranks.Group, "stop", lambda group: None)
    monkeypatch.setattr(ranks.Group, "join", lambda group: group._sleep())
    with measure._groups(bench.turns(bench.rates), bench, None, tmp_path / "log") as groups:
        with groups["ring"].awake():
            assert signals.pop() == ("ring", signal.SIGCONT)
        slept = [name for name, number in signals if number == signal.SIGSTOP]
    assert slept == ([] if bench.awake else ["ring", "gloo", "ring"])
    assert bench.hosts_at("1gbit").pin == bench.pin


def test_failures_are_told_and_tried_again(folder):
    with (folder / "results.jsonl").open("a") as stream:
        stream.write("\n" + json.dumps({**turn("topk", 1), "failed": "rank 1: ValueError: no"}) + "\n")
    result = results.read(folder)
    assert "topk on tiny, 100mbit: rank 1: ValueError: no" in result.notes
    assert [t["round"] for t in read_turns(folder) if t["contender"] == "topk" and "failed" not in t] == [0]


def test_loopback_claims_no_wire(folder):
    lines = [{**turn(t["contender"], t["round"], 1.0, rate="loopback"), "interface": None} for t in TURNS]
    for line in lines:
        del line["interface"]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row = results.read(folder).rows[-1]
    assert "wire" not in row.parts and row.parts["wait"] == pytest.approx(0.6)
    assert "tiny without a network" in report.markdown(results.read(folder))


def test_resuming_with_other_settings_is_refused(folder):
    bench = Bench.open(folder / "config.yaml")
    benchmark.prepare(folder, bench, False, resume=True)
    assert len(read_turns(folder)) == len(TURNS)
    other = bench.model_copy(update={"methods": [bench.methods[0].model_copy(update={"warm_up": 9})]})
    with pytest.raises(ValueError, match="measured with another topk"):
        benchmark.prepare(folder, other, False, resume=True)
    with pytest.raises(ValueError, match="measured on emulated hosts"):
        benchmark.prepare(folder, bench, True, resume=True)


def test_what_was_measured_earlier_stays_in_the_tables(folder):
    more = {**SMALL, "hosts": 2, "rates": ["1gbit"], "rounds": 1, "baselines": ["none ring"], "methods": ["fft"]}
    more = Bench.open(more)
    benchmark.prepare(folder, more, False, resume=True)
    both = Bench.open(folder / "config.yaml")
    assert [entry.label for entry in both.methods] == ["topk", "fft"] and both.baselines[-1] == "none ddp"
    assert {row.contender for row in results.read(folder).rows} == {"none ring", "none ddp", "fp16 ring", "topk"}


def test_dense_steps_that_were_not_measured_are_told(folder):
    """GradiVeQ: so many dense steps, then so many compressed ones, again and again."""
    settings = {"method": "gradiveq", "dense_steps": 3, "compressed_steps": 5, "alone": 3, "label": "gradiveq"}
    bench = Bench.open({**SMALL, "hosts": 2, "rounds": 2, "baselines": ["none ddp"], "methods": [settings]})
    bench.save(folder / "config.yaml")
    lines = [turn("none ddp", 0, 8.0), turn("gradiveq", 0, 2.0)]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = next(note for note in results.read(folder).notes if note.startswith("gradiveq on tiny, 100 Mbit/s"))
    dense = sum(get("gradiveq", dense_steps=3, compressed_steps=5).phase_of(age) != 2 for age in range(8))
    mean = (dense * 8.0 + (8 - dense) * 2.0) / 8
    assert f"Of 8 steps {dense} are not compressed" in said
    assert f"its mean is {numbers.seconds_of(mean)}, {numbers.number(8 / mean)} times as fast" in said


# -- real exchanges --------------------------------------------------------------------------------
