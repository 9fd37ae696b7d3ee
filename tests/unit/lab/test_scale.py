"""The cost model: bytes for any world against real ranks, the fit, its predictions, and the command."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import astuple, replace
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import hvdcompress
from hvdcompress import cli, registry
from hvdcompress.lab import nets
from hvdcompress.lab.scale import cost, imagined, prediction, report, workers
from hvdcompress.lab.scale import model as fitted_model
from hvdcompress.lab.scale.cost import Codec, Constants, Point, Work
from hvdcompress.lab.scale.points import points_of
from hvdcompress.lab.training.experiment import Experiment
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import load, plan_of
from hvdcompress.testing import numbers
from tests import ROOT

TRUTH = Constants(message=5e-5, link=1.06, byte=1e-9, call=2e-4, round=3e-3, codec=0.9)
SHAPES = {"conv": (16, 8, 3, 3), "matrix": (24, 40), "vector": (131,)}
#: variants of which the default says too little: other routes, codecs that are scattered, known components
VARIANTS = [
    *((id, {}) for id in registry.available() if id != "gradiveq"),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "matrix_rank": 1, "values": "qsgd8"}),
    *((id, {"route": "scatter"}) for id in ("qsgd", "signsgd", "terngrad")),
    ("terngrad", {"route": "gather"}),
    ("scalecom", {"select": "exact", "values": "qsgd4"}),
    ("powersgd", {"values": "bf16", "matrix_rank": 1}),
    ("topk", {"density": 0.1, "values": "rangefloat8"}),
    ("topk", {"bucket_elements": 2000}),
]


def names(value):
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


# -- bytes -----------------------------------------------------------------------------------------


def counted(plan, world):
    """What real ranks' ledger has of a step in the method's last phase: the most of any rank."""
    net, step = Loopback(plan, world), 0
    main = plan.program.main
    while main.phase_of(step) != imagined.last_phase(main):
        step += 1
    for number in range(step + 1):
        net.ledger.reset()
        net.allreduce_many([{n: numbers(s, rank, number) for n, s in SHAPES.items()} for rank in range(world)])
    ranks = range(world)
    return max(map(net.ledger.bytes_sent, ranks)), max(map(net.ledger.bytes_on_wire, ranks)), net.ledger.collectives()


@pytest.mark.parametrize("id,settings", VARIANTS, ids=names)
def test_bytes_are_those_of_real_ranks(id, settings):
    plan = plan_of(id, min_elements=1, **settings)
    for world in range(2, 9):
        said = cost.work(plan, SHAPES, world, driver=None)
        assert (round(said.sent), round(said.on_wire), said.calls) == counted(plan, world), f"{world} ranks"


@pytest.mark.parametrize("id,settings", VARIANTS, ids=names)
def test_what_is_carried_over_to_many_ranks_is_what_they_ask_for(id, settings):
    """The short cut (2, 3 and 5 ranks ask alike) says what a run among 64 does; its sum is what num_bytes says."""
    method = plan_of(id, **settings).program.main
    phase = imagined.last_phase(method)
    for shape in SHAPES.values():
        spec = TensorSpec("rehearsal", shape)
        if not method.suits(spec):
            continue
        found = imagined.imagine(method, phase, 64, spec)
        assert found == imagined.watch(method, phase, 64, spec, np.zeros(spec.size, np.float32))[0]
        several = (spec, 64) if len(method.phases) == 1 else (spec, 64, phase)
        total = max(sum(each[min(place, len(each) - 1)].num_bytes for each in found) for place in (0, 1))
        assert total == method.num_bytes(*several)


def test_thousands_of_workers_take_no_memory():
    hvdcompress.get("topk")
    cost.work(plan_of("topk"), {"w": (64, 64)}, 8)
    tracemalloc.start()
    gathered = cost.work(plan_of("topk", density=0.01), {"w": (1000, 500)}, 4096, driver=None)
    quantized = cost.work(plan_of("qsgd"), {"w": (1000, 500)}, 4096, driver=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6, "decoding 4096 payloads of 500 000 values would take 8 GB"
    assert gathered.on_wire == 4095 * gathered.sent and quantized.on_wire == 4095 * quantized.sent


def test_gathers_grow_and_sums_do_not():
    for id, settings in VARIANTS:
        plan = plan_of(id, min_elements=1, **settings)
        few, many = (cost.work(plan, SHAPES, p, driver=None) for p in (8, 512))
        collectives = {
            each[0].collective
            for bucket in plan.buckets(TensorSpec(n, s) for n, s in SHAPES.items())
            for each in imagined.imagine(plan.program.main, imagined.last_phase(plan.program.main), 8, bucket.spec)
            if plan.program.main.suits(bucket.spec)
        }
        if collectives == {"AllGather"} and id != "dgc":  # it sends vectors dense
            assert many.on_wire == pytest.approx(few.on_wire * 511 / 7)
        elif not collectives & {"AllGather", "AllToAll"} and id != "terngrad":  # its fields grow with the logarithm
            assert many.on_wire == pytest.approx(few.on_wire * (511 / 512) / (7 / 8))


def test_gtopks_line_is_longer_than_what_a_rank_sends():
    """Rank 0 receives k entries in each of log2(p) rounds, though none sends more than twice."""
    plan = plan_of("gtopk", density=0.01)
    one = cost.work(plan, {"w": (64, 64)}, 256, driver=None)
    width = plan.program.main.num_payload_bytes(4096)
    assert one.sent == 2 * width and one.on_wire == pytest.approx(width * (1 + 2 * 255 / 256))
    assert one.line == pytest.approx(width * (8 + 2 * 255 / 256)) and one.rounds == 9


def test_what_the_driver_adds():
    plan, tensors = plan_of("topk", bucket_elements=0), {"a": (2000,), "b": (3000,)}
    bare, horovod, mpi = (cost.work(plan, tensors, 4, driver=d) for d in (None, "horovod", "mpi4py"))
    assert horovod.sent - bare.sent == 2 * 8 + 8 * 8, "a placeholder for each tensor, and the status"
    assert mpi.sent - bare.sent == 2 * 8 * 8 and mpi.rounds == bare.rounds + 2, "a status before and after"
    assert (horovod.calls, bare.calls, horovod.rounds, bare.rounds) == (2 * 2 + 1, 2, 2, 1)
    riding = cost.work(plan_of("none"), {"a": (2000,), "b": (3000,)}, 4)
    assert riding.calls == 3, "a gradient that Horovod reduces itself needs no placeholder"


def test_fusion():
    assert cost.messages("AllReduce", [100] * 50, 4) == 2 * 3
    assert cost.messages("AllReduce", [cost.FUSED] * 3, 4) == 3 * 2 * 3
    assert cost.messages("AllGather", [100] * 50, 4) == 3
    assert cost.messages("AllGather", [cost.FUSED // 4] * 50, 4) == 50 * 3, "what all ranks gather must fit"
    assert cost.messages("AllToAll", [100] * 50, 4) == 50 * 3, "Horovod does not fuse them"
    assert cost.messages("AllToAll", [100] * 50, 64, 1) == 50, "and a rank that has one partner waits for one"


# -- the fit ---------------------------------------------------------------------------------------


def points(noise=0.0, seed=0, constants=TRUTH, worlds=(2, 3, 4)):
    rng = np.random.default_rng(seed)
    model = fitted_model.Model(constants, {})
    found = []
    for id in ("topk", "scalecom", "qsgd", "powersgd", "none"):
        for world in worlds:
            plan = plan_of(id)
            model.codecs[fitted_model.name_of(plan.program.main)] = Codec(1e-4, 2e-9, 1e-5, 1e-9)
            model.codecs[fitted_model.name_of(hvdcompress.get("none"))] = Codec(1e-5, 1e-9)
            done = cost.work(plan, nets.get("resnet32"), world, model.codec)
            for rate in (1e8, 1e9):
                seconds = constants.seconds(done, rate, max(1.0, world / 2)) * np.exp(noise * rng.normal())
                found.append(Point(id, "resnet32", rate, max(1.0, world / 2), float(seconds), done))
    return found


def test_fit_recovers_the_constants():
    found = cost.fit(points())
    for name, value in vars(TRUTH).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    assert cost.errors(found, points()).worst < 1e-9


def test_fit_with_noise_is_near_and_says_how_near():
    noisy = points(noise=0.05)
    found = cost.fit(noisy)
    assert found.link == pytest.approx(TRUTH.link, rel=0.2) and min(vars(found).values()) >= 0
    split = fitted_model.held_out(noisy)
    assert set(split) == {"a quarter, in turn", "a method, in turn", "4 hosts, from fewer"}, "there is one set only"
    twice = fitted_model.held_out([*noisy, *noisy])["a quarter, in turn"]
    assert twice.median == pytest.approx(split["a quarter, in turn"].median, rel=0.01), "twins are held out together"
    assert 0.01 < split["a quarter, in turn"].median < 0.1 and split["a quarter, in turn"].points == 30
    assert split["4 hosts, from fewer"].points == 10


def test_held_out_points_are_not_fitted_to():
    """One exchange that took ten times as long: its own prediction does not know of it."""
    good = points()
    bad = [replace(good[0], seconds=10 * good[0].seconds), *good[1:]]
    split = fitted_model.held_out(bad)["a quarter, in turn"]
    assert split.worst == pytest.approx(0.9, abs=0.01) and split.which == "topk on resnet32, 2 hosts, 100 Mbit/s"


def test_constants_are_never_negative_and_points_must_suffice():
    odd = [replace(point, seconds=point.seconds / (1 + point.work.rounds)) for point in points()]
    assert min(vars(cost.fit(odd)).values()) >= 0
    with pytest.raises(ValueError, match="5 measured exchanges are too few for 6 constants"):
        cost.fit(points()[:5])
    with pytest.raises(ValueError, match="held out"):
        cost.errors(TRUTH, [])


def test_shared_processors_cost_processors_work_alone():
    one = points()[0].work
    alone, crowded = TRUTH.parts(one, 1e8), TRUTH.parts(one, 1e8, shared=2.0)
    for name in ("message", "link", "round"):
        assert crowded[name] == alone[name]
    for name in ("byte", "call", "codec"):
        assert crowded[name] == 2 * alone[name] > 0


def test_codec_times_grow_with_what_is_read():
    codec = fitted_model.time_codec(hvdcompress.get("qsgd"))
    small, large = codec.seconds(1 << 12, 2, 2 * 2100), codec.seconds(1 << 20, 2, 2 * 530_000)
    assert 0 < small < large < codec.seconds(1 << 20, 8, 8 * 530_000) < 1.0


# -- where points come from -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A benchmark's folder with two rounds of three contenders, of which stock gloo is not for us."""
    here = tmp_path / "bench-small"
    here.mkdir()
    (here / "config.yaml").write_text(
        "name: small\nhosts: 4\nrates: [100mbit]\nrounds: 2\n"
        "sets: [{net: resnet32, label: some, only: ['layer1.0.*']}]\n"
        "methods: [{method: topk, label: my topk, density: 0.05}]\nbaselines: [none ring, none gloo]\n"
    )
    lines = []
    for round in (0, 1):
        for label, seconds in (("none ring", 0.5), ("none gloo", 0.4), ("my topk", 0.125)):
            turn = {"rate": "100mbit", "set": "some", "contender": label, "round": round}
            lines.append({**turn, "exchanges": [{"seconds": seconds + round}, {"seconds": seconds + 0.5 + round}]})
    lines.append({"rate": "loopback", "set": "some", "contender": "my topk", "round": 0, "exchanges": []})
    lines.append({"rate": "1gbit", "set": "some", "contender": "my topk", "round": 0, "failed": "it did"})
    (here / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (here / "launch.json").write_text(json.dumps({"command": "hvdcompress bench small", "machine": {"cores": 2}}))
    return here


def test_points_of_a_benchmark(folder):
    found, source = points_of(folder, lambda method: Codec(tensor=1.0))
    assert [(point.label, point.seconds, point.rate, point.shared) for point in found] == [
        ("none ring", 1.25, 1e8, 2.0), ("my topk", 0.875, 1e8, 2.0),
    ]  # fmt: skip
    tensors = {n: s for n, s in nets.get("resnet32").items() if n.startswith("layer1.0.")}
    assert found[0].work == cost.stock(tensors, 4)
    assert found[1].work == cost.work(load({"method": "topk", "density": 0.05}), tensors, 4, lambda m: Codec(1.0))
    assert found[1].work.codec < len(tensors), "small ones are joined"
    assert source["command"] == "hvdcompress bench small"


def test_points_of_a_file(tmp_path):
    file = tmp_path / "links.jsonl"
    head = {"command": "python -m hvdcompress.lab.scale.links", "machine": {"cores": 2}}
    file.write_text("\n".join(json.dumps(each) for each in (head, points()[0].to_dict())))
    found, source = points_of(file, lambda method: Codec())
    assert found == points()[:1] and source["command"].startswith("python")
    file.write_text(json.dumps({"rate": 1}))
    with pytest.raises(ValueError, match="not a measured exchange"):
        points_of(file, lambda method: Codec())
    with pytest.raises(ValueError, match="no benchmark"):
        points_of(tmp_path, lambda method: Codec())
    with pytest.raises(FileNotFoundError):
        points_of(tmp_path / "nowhere", lambda method: Codec())


def test_bare_collectives_among_more_ranks_than_processors_are_left_out(tmp_path):
    bare = Work(2, 8, 8, 8, 0, 0, 2)
    mpi = [Point("MPI AllReduce 8 B", "mpi", 1e8, shared, 1e-4 * 99 * (shared > 1) + 1e-4, bare) for shared in (1, 2)]
    file = tmp_path / "all.jsonl"
    file.write_text("\n".join(json.dumps(point.to_dict()) for point in [*points(), *mpi]))
    model = fitted_model.model_from([file])
    assert len(model.points) == 31 and model.constants.message == pytest.approx(TRUTH.message, rel=0.01)
    assert model.held_out["a quarter, in turn"].points == 30, "nor is it they that are to be predicted"


def test_a_model_survives_its_file(tmp_path):
    model = fitted_model.Model(
        TRUTH, {"topk density=0.01": Codec(1.0)}, {}, [{"file": "x", "points": 30}], points(), "today"
    )
    model.held_out = fitted_model.held_out(model.points)
    model.save(tmp_path / "fit.json")
    assert fitted_model.Model.open(tmp_path / "fit.json") == model
    (tmp_path / "fit.json").write_text("{}")
    with pytest.raises(ValueError, match="no fitted model"):
        fitted_model.Model.open(tmp_path / "fit.json")


def test_the_fit_that_comes_along():
    """Its constants are those of its points, and so are its errors on what was held out."""
    model = fitted_model.Model.open(ROOT / "configs" / "bench" / "fit.json")
    assert astuple(cost.fit(model.points)) == pytest.approx(astuple(model.constants), rel=1e-6)
    again = fitted_model.held_out(model.points)
    assert again.keys() == model.held_out.keys()
    for split, found in model.held_out.items():
        assert again[split][:2] == pytest.approx(found[:2], rel=1e-6) and again[split].points == found.points
    assert model.held_out["a quarter, in turn"].median < 0.5


# -- predictions -----------------------------------------------------------------------------------


def entries(*methods):
    return Experiment.open({"name": "x", "tasks": ["digits"], "methods": list(methods)}).methods


MODEL = fitted_model.Model(TRUTH)


def test_predictions_grow_with_workers_and_shrink_with_the_rate():
    rows = prediction.predict(
        MODEL, entries("topk", "scalecom", "qsgd", "powersgd", "fp16"), nets.get("resnet32"), ["10mbit", "1gbit"]
    )
    assert len(rows) == 2 * 6 and [row.is_dense for row in rows[:2]] == [True, False]
    for row in rows:
        for table in (row.seconds, row.on_wire):
            assert list(table) == sorted(table) == list(prediction.WORKERS)
            assert list(table.values()) == sorted(table.values()), row.label
        assert row.seconds == {p: pytest.approx(sum(parts.values())) for p, parts in row.parts.items()}
    for slow, fast in zip(rows[:6], rows[6:], strict=True):
        assert all(slow.seconds[p] > fast.seconds[p] for p in prediction.WORKERS) and slow.on_wire == fast.on_wire


def test_where_a_method_loses():
    dense = {2: 1.0, 4: 1.5, 8: 1.8}
    for at, words in (([], "never"), ([4, 8], "from 4"), ([2, 4, 8], "always"), ([2], "up to 2"), ([2, 8], "2, 8")):
        seconds = {p: 2.0 if p in at else 0.1 for p in dense}
        row = prediction.Row("1gbit", "x", "", seconds, {}, {}, loses=at)
        assert report.loses(row) == words
    rows = prediction.predict(
        MODEL, entries("topk", "scalecom"), {"w": (1000, 1000)}, ["100mbit"], prediction.WORKERS[:-1]
    )
    assert [row.loses for row in rows] == [[], [256, 1024], []], "it gathers 1.4 % of dense from each worker"
    (scalecom,) = prediction.predict(MODEL, entries("scalecom"), {"w": (1000, 1000)}, ["100mbit"], [4096])[1:]
    assert scalecom.loses == [4096], "its two rounds are 16 380 messages: latency, not bytes"
    assert scalecom.parts[4096]["message"] > 0.9 * scalecom.seconds[4096]


def test_what_is_refused():
    with pytest.raises(ValueError, match="not a rate"):
        prediction.predict(MODEL, entries("topk"), {"w": (64, 64)}, ["fast"])
    with pytest.raises(ValueError, match="2 at least"):
        prediction.predict(MODEL, entries("topk"), {"w": (64, 64)}, ["1gbit"], [1, 2])


def test_sets(tmp_path):
    assert prediction.tensors_of("resnet50") == nets.get("resnet50")
    for count in (1, 17, 1_000_000, 25_000_000):
        found = prediction.tensors_of(str(count))
        assert nets.total(found) == count
    assert prediction.tensors_of("1_000_000") == {"tensor0": (1000, 1000)}
    file = tmp_path / "net.yaml"
    file.write_text("a: [3, 4]\nb: [5]\n")
    assert prediction.tensors_of(str(file)) == {"a": (3, 4), "b": (5,)}
    file.write_text("a: [3, -4]\n")
    with pytest.raises(ValueError, match=r"a: \[3, -4\] is not a shape"):
        prediction.tensors_of(str(file))
    file.write_text("- 3\n")
    with pytest.raises(ValueError, match="names and shapes"):
        prediction.tensors_of(str(file))
    with pytest.raises(ValueError, match="did you mean 'resnet50'"):
        prediction.tensors_of("resnet5")
    with pytest.raises(FileNotFoundError):
        prediction.tensors_of("nowhere.yaml")


# -- the command -----------------------------------------------------------------------------------


def invoke(*words, columns=200):
    return CliRunner().invoke(cli.app, ["scale", *map(str, words)], env={"COLUMNS": str(columns)})


@pytest.fixture
def fitted(tmp_path):
    file = tmp_path / "measured.jsonl"
    file.write_text("\n".join(json.dumps(point.to_dict()) for point in points()))
    return file


def test_the_command_fits_predicts_and_writes(fitted, tmp_path):
    words = ("--set", "resnet32", "--methods", "topk 0.5 %,scalecom 100x", "--constants", tmp_path / "fit.json")
    done = invoke(*words, "--fit", fitted, "--rate", "10mbit,1gbit", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for text in ("link", "1.06", "at 10 Mbit/s: resnet32, 95 tensors, 464 154 elements", "at 1 Gbit/s", "4096"):
        assert text in done.output
    assert "30 measured points" in done.output and "Held out (a quarter, in turn; 30 exchanges)" in done.output
    assert "Beyond 4 workers nothing was measured" in done.output.replace("\n", " ")
    written = json.loads((tmp_path / "out" / "scale.json").read_text())
    assert [row["label"] for row in written["rows"]] == ["dense (stock Horovod)", "scalecom 100x", "topk 0.5 %"] * 2
    assert written["rows"][2]["loses"] == [1024, 4096]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "s\\* |" in table and "**Bytes on the wire" in table
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 4 + 3 and "topk 0.5 %" in page  # two plots a rate, and the legend's lines
    for rate in ("10mbit", "1gbit"):
        plot = ElementTree.parse(tmp_path / "out" / f"seconds-{rate}.svg").getroot()  # a file of its own, well-formed
        texts = "".join(plot.itertext())
        assert "scalecom 100x" in texts and "--c1:" in texts
    again = invoke(*words, "--workers", "2,64", "--out", tmp_path / "fitted")
    assert again.exit_code == 0 and "64" in again.output and "4096" not in again.output
    far = invoke(*words, "--workers", "2,64", "--latency", "1ms", "--out", tmp_path / "far")
    assert far.exit_code == 0 and "464 154 elements, 1ms per message" in far.output
    near, slow = (json.loads((tmp_path / out / "scale.json").read_text())["rows"][0] for out in ("fitted", "far"))
    assert slow["seconds"]["64"] == pytest.approx(near["seconds"]["64"] + 2 * 63 * (1e-3 - TRUTH.message))


@pytest.mark.parametrize(
    "words,text",
    [
        (["--over", "mpi4py"], "fit.json has the constants of horovod, and --over asks for mpi4py: leave out --over"),
        (["--constants", "nowhere.json"], "nowhere.json does not exist: `hvdcompress scale --fit RESULTS` makes it"),
        (["--set", "resnet5"], "no net 'resnet5'"),
        (["--rate", "quick"], "'quick' is not a rate"),
        (["--latency", "soon"], "'soon' is not a time"),
        (["--workers", "two"], "'two' is not a number of workers"),
        (["--workers", "1"], "2 at least"),
        (["--methods", "topkk"], "no method 'topkk'"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["--fit", "nowhere"], "nowhere"),
    ],
)
def test_what_the_command_refuses(words, text, fitted, tmp_path, monkeypatch):
    fitted_model.Model(TRUTH, {}, {}, [], points(), "today").save(tmp_path / "fit.json")
    if "--constants" not in words:
        words = ["--constants", tmp_path / "fit.json", *words]
    done = invoke(*(["--methods", "topk 0.5 %"] if "--methods" not in words else []), *words)
    assert done.exit_code == 2 and text in done.output.replace("\n", " ")


# -- scripts ---------------------------------------------------------------------------------------


def test_real_workers_bytes_are_the_models():
    lines = workers.bytes_table([2, 9]).markdown().splitlines()  # it exits where they differ
    assert len(lines) == 2 + 10 and lines[3].startswith("| scalecom | 832 B | 832 B |")


def test_training_script_learns():
    dense = workers.train({"method": "none"}, 4, 0.4, seed=0, steps=60)
    sparse = workers.train({"method": "scalecom", "density": 0.05, "beta": 1.0}, 4, 0.4, seed=0, steps=60)
    assert dense["loss"] < 0.2 and dense["accuracy"] > 90 and sparse["loss"] < 0.6
    assert sparse["wire"] < dense["wire"] / 8
