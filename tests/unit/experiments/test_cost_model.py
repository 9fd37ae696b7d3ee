"""The cost model: bytes for any world against real ranks, the fit, its predictions, and the command."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import hvdcompress
from experiments import nets
from experiments.__main__ import app
from experiments.bench.config import Bench
from experiments.configfile import MethodsFile
from experiments.cost_model import fitted, imagined, model, scale
from experiments.cost_model.fitted import Fitted
from experiments.cost_model.imagined import Request
from experiments.cost_model.model import Codec
from experiments.report import jsonl, results
from hvdcompress import registry
from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import IN_ORDER, plan_of
from hvdcompress.testing import numbers

WORLD_SIZE = 8  # ranks on several hosts
TRUTH = {"message": 5e-5, "link": 1.06, "byte": 1e-9, "call": 2e-4, "round": 3e-3, "codec": 0.9}
SHAPES = {"conv": (16, 8, 3, 3), "matrix": (24, 40), "vector": (131,)}
#: the default says too little about these: other routes, codecs of scattered values, known components
VARIANTS = [
    *((id, {}) for id in registry.available() if id not in ("gradiveq", "oktopk")),  # oktopk's lengths follow the data
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "matrix_rank": 1, "values": "qsgd8"}),
    *((id, {"route": "scatter"}) for id in ("qsgd", "signsgd", "terngrad")),
    ("terngrad", {"route": "gather"}),
    ("scalecom", {"select": "exact", "values": "qsgd4"}),
    ("powersgd", {"values": "bf16", "matrix_rank": 1}),
    ("topk", {"density": 0.1, "values": "rangefloat8"}),
    ("topk", {"bucket_elements": 2000}),
    ("topk", {"bucket_elements": 2000, "values": "qsgd4"}),
]


def names(value):
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


# -- bytes -----------------------------------------------------------------------------------------


class HostLinks(Observer):
    """Counts the bytes that leave and enter each host, message by message."""

    def __init__(self, local_size):
        self.local_size = local_size
        self.left = Counter()
        self.entered = Counter()

    def sent(self, rank, name, what):
        if what.inside_node:
            return
        index, count = what.group
        stride = self.local_size if count < WORLD_SIZE else 1  # between the owners of a bucket, or all ranks
        others = [rank + (other - index) * stride for other in range(count)]
        if what.collective == "AllToAll":
            pieces = what.splits or [what.num_bytes / count] * count
        else:
            ledger = Ledger(WORLD_SIZE)
            ledger.sent(rank, name, what)
            pieces = [0] * count
            pieces[(index + 1) % count] = ledger.tensors(rank)[name].on_wire  # a ring
        for other, num_bytes in zip(others, pieces, strict=True):
            if rank // self.local_size != other // self.local_size:
                self.left[rank // self.local_size] += num_bytes
                self.entered[other // self.local_size] += num_bytes

    @property
    def most(self):
        return max(*self.left.values(), *self.entered.values())


def exchanged(plan, world_size, local_size=1):
    """A loopback after a step in the method's last phase, and the bytes on the links of its hosts in that step."""
    net, step, main = Loopback(plan, world_size, grouping=IN_ORDER), 0, plan.program.main
    while main.phase_of(step) != imagined.last_phase(main):
        step += 1
    for number in range(step + 1):
        net.ledger.reset()
        links = HostLinks(local_size)
        for rank in net.ranks:
            rank.observers[1:] = [links]
        net.allreduce_many([{n: numbers(s, rank, number) for n, s in SHAPES.items()} for rank in range(world_size)])
    return net.ledger, links


def counted(plan, world_size):
    """What the ledger of real ranks has of a step in the method's last phase: the most of any rank."""
    ledger, _ = exchanged(plan, world_size)
    ranks = range(world_size)
    return max(map(ledger.bytes_sent, ranks)), max(map(ledger.bytes_on_wire, ranks)), ledger.collectives()


@pytest.mark.parametrize("id,settings", VARIANTS, ids=names)
def test_bytes_are_those_of_real_ranks(id, settings):
    plan = plan_of(id, min_elements=1, **settings)
    for world_size in (2, 3, 4, 8, 16):
        said, statuses = (model.work(plan, tensors, world_size, driver="mpi4py") for tensors in (SHAPES, {}))
        figures = said.sent - statuses.sent, round(said.on_wire - statuses.on_wire), said.calls - statuses.calls
        assert figures == counted(plan, world_size), f"{world_size} ranks"
        assert said.on_host == pytest.approx(said.line) and said.hops == 0, "each rank has a host of its own"


@pytest.mark.parametrize("id,settings", VARIANTS, ids=names)
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_bytes_of_hosts_are_those_of_real_ranks(id, settings, num_nodes):
    nodes = Nodes(num_nodes, WORLD_SIZE // num_nodes)
    ranks = range(WORLD_SIZE)
    flat = plan_of(id, min_elements=1, **settings)
    one, status = (model.work(flat, x, WORLD_SIZE, None, "mpi4py", nodes.local_size) for x in (SHAPES, {}))
    _, links = exchanged(flat, WORLD_SIZE, nodes.local_size)
    assert one.on_host - status.on_host == pytest.approx(links.most)
    plan = plan_of(id, min_elements=1, nodes=num_nodes, **settings)
    two, status = (model.two_levels(plan, x, nodes, driver="mpi4py") for x in (SHAPES, {}))
    ledger, links = exchanged(plan, WORLD_SIZE, nodes.local_size)
    assert two.on_host - status.on_host == pytest.approx(links.most)
    of_a_node = [sum(map(ledger.bytes_on_wire, nodes.ranks_of_node(node))) for node in range(num_nodes)]
    if id != "gtopk" or num_nodes == 2:  # in its tree, the first node receives more than any node sends
        assert two.on_host - status.on_host == pytest.approx(max(of_a_node), abs=nodes.local_size / 2), "rounded"
    assert two.inside == max(map(ledger.bytes_inside_node, ranks))
    assert two.sent - status.sent == max(map(ledger.bytes_sent, ranks))
    assert round(two.on_wire - status.on_wire) == max(map(ledger.bytes_on_wire, ranks))


def test_messages_of_hosts():
    gathered, summed = ([(0, [Request.of(kind, "uint8", 800, 8)])] for kind in ("AllGather", "AllReduce"))
    everyone = [(0, [Request.of("AllToAll", "uint8", 800, 8)])]
    near, far = ([(0, [Request.of("AllToAll", "uint8", 100, 8, [0, *receives])])] for receives in ([100], [0, 100]))
    found = [model.work_of(begun, 8, local_size=2) for begun in (gathered, summed, everyone, near, far)]
    assert [(each.messages, each.hops) for each in found] == [(3, 4), (6, 8), (6, 1), (0, 1), (1, 0)]
    assert [each.on_host for each in found] == [7 * 800, 2 * 7 / 8 * 800, 2 * 6 / 8 * 800, 0, 100]
    alone = [model.work_of(begun, 8, local_size=8) for begun in (gathered, summed, everyone, near, far)]
    assert {(each.messages, each.on_host) for each in alone} == {(0, 0)}, "on one host there is no link"


def test_work_of_two_levels_is_that_of_the_owners():
    tensors = {name: (1000,) for name in "abcdefgh"}
    plan = plan_of("topk", bucket_elements=0, min_elements=1)
    codec = Codec(tensor=1.0)
    flat = model.work(plan, tensors, 8, lambda _: codec, "mpi4py", local_size=4)
    two = model.two_levels(plan, tensors, Nodes(2, 4), lambda _: codec, "mpi4py")
    one = model.work(plan, {"a": (1000,)}, 2, lambda _: codec, "mpi4py")
    bare = model.work(plan, {}, 2, driver="mpi4py")
    statuses = model.work(plan, {}, 8, driver="mpi4py", local_size=4)
    assert (flat.codec, two.codec) == (8.0, 2.0), "each rank owns two of eight tensors"
    assert two.calls == 2 + 2 + 2 * 8 and two.rounds == one.rounds + 2
    assert two.on_host - statuses.on_host == 8 * (one.on_host - bare.on_host), "all owners share the link"
    assert two.line - statuses.line == 2 * (one.line - bare.line)
    assert two.inside == 2 * (8 - 2) * 4000
    assert two.hops - statuses.hops == 2 * 3 * 8


@pytest.mark.parametrize("id,settings", VARIANTS, ids=names)
def test_64_ranks_send_what_num_bytes_says(id, settings):
    method = plan_of(id, **settings).program.main
    phase = len(method.phases) - 1
    for spec in (TensorSpec("rehearsal", shape) for shape in SHAPES.values()):
        if method.suits(spec):
            found = imagined.requests(method, 64, spec)
            total = max(sum(each[min(rank, len(each) - 1)].num_bytes for each in found) for rank in (0, 1))
            assert total == method.num_bytes(spec, 64, *([phase] if phase else []))


def test_thousands_of_ranks_take_no_memory():
    hvdcompress.get("topk")
    model.work(plan_of("topk"), {"w": (64, 64)}, 8)
    tracemalloc.start()
    gathered = model.work(plan_of("topk", density=0.01), {"w": (1000, 500)}, 4096, driver="mpi4py")
    quantized = model.work(plan_of("qsgd"), {"w": (1000, 500)}, 4096, driver="mpi4py")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6, "decoding 4096 payloads of 500 000 values would take 8 GB"
    for found in (gathered, quantized):
        assert found.on_wire == pytest.approx(4095 * found.sent, rel=1e-2), "but for the statuses"


def test_what_a_driver_adds():
    plan, tensors = plan_of("topk", bucket_elements=0), {"a": (2000,), "b": (3000,)}
    horovod, mpi = (model.work(plan, tensors, 4, driver=driver) for driver in ("horovod", "mpi4py"))
    bare = model.work(plan, tensors, 4, driver="mpi4py").sent - 2 * 8 * 8
    assert (horovod.sent - bare, mpi.sent - bare) == (2 * 8 + 8 * 8, 2 * 8 * 8), "placeholders and statuses"
    assert (horovod.calls, mpi.calls, horovod.rounds, mpi.rounds) == (2 * 2 + 1, 2 + 2, 2, 3)
    riding = model.work(plan_of("none"), {"a": (2000,), "b": (3000,)}, 4)
    assert riding.calls == 3, "a gradient that Horovod reduces itself needs no placeholder"


def test_fusion():
    assert model.turns("AllReduce", [100] * 50, 4) == 2
    assert model.turns("AllReduce", [model.FUSED] * 3, 4) == 3 * 2
    assert model.turns("AllGather", [100] * 50, 4) == 1
    assert model.turns("AllGather", [model.FUSED // 4] * 50, 4) == 50, "what all ranks gather must fit"
    each, one = (Request.of("AllToAll", "uint8", 100, p, receives) for p, receives in ((4, None), (64, [0, 100])))
    assert model.work_of([(0, [each])] * 50, 4).messages == 50 * 3, "Horovod does not fuse them"
    assert model.work_of([(0, [one])] * 50, 64).messages == 50, "a rank that has one partner waits for one"


# -- the fit ---------------------------------------------------------------------------------------


def points(noise=0.0, world_sizes=(2, 3, 4)):
    """Exchanges that take what the model says, up to noise."""
    random, found = np.random.default_rng(0), []
    for id in ("topk", "scalecom", "qsgd", "powersgd", "none"):
        for p in world_sizes:
            work = model.work(plan_of(id), nets.get("resnet32"), p, lambda method: Codec(1e-4, 2e-9, 1e-5, 1e-9))
            place = {"label": id, "set": "resnet32", "shared": max(1.0, p / 2)}
            found += [{**place, "rate": rate, **work._asdict()} for rate in (1e8, 1e9)]
    frame = pd.DataFrame(found)
    seconds = model.costs(TRUTH, frame).sum(axis=1)
    return frame.assign(seconds=seconds * np.exp(noise * random.normal(size=len(frame))))


def test_the_fit_recovers_the_constants():
    assert fitted.fit_constants(points()) == pytest.approx(TRUTH, rel=1e-6)
    with pytest.raises(ValueError, match="5 measured exchanges are too few"):
        fitted.fit_constants(points()[:5])
    odd = points()
    odd["seconds"] /= 1 + odd["rounds"]
    assert min(fitted.fit_constants(odd).values()) >= 0


def test_errors_are_those_of_exchanges_that_the_fit_had_not_seen():
    given = points()
    wrong = given["label"] == "qsgd"
    given.loc[wrong, "seconds"] *= 2
    found = fitted.hold_out(given)
    assert set(found) == {"a quarter, in turn", "a method, in turn", "4 hosts, from fewer"}, "there is one set only"
    assert found["a method, in turn"]["points"] == len(given) and found["a method, in turn"]["worst"] > 0.4
    assert max(split["worst"] for split in fitted.hold_out(points()).values()) < 1e-6


@pytest.mark.parametrize("driver", ["horovod", "mpi4py"])
def test_the_published_fit_is_that_of_its_points(driver):
    published = Fitted.open(driver)
    assert fitted.fit_constants(published.points) == pytest.approx(published.constants, rel=1e-9, abs=1e-12)
    again = fitted.hold_out(published.points)
    assert {name: one["which"] for name, one in again.items()} == {
        name: one["which"] for name, one in published.held_out.items()
    }


def test_a_fit_is_read_as_it_was_written(tmp_path):
    given = Fitted("mpi4py", TRUTH, {"topk": Codec(1e-4, 2e-9)}, fitted.hold_out(points()), points())
    given.save(tmp_path)
    read = Fitted.open("mpi4py", tmp_path)
    assert (read.constants, read.codecs) == (given.constants, given.codecs)
    assert fitted.fit_constants(read.points) == pytest.approx(TRUTH, rel=1e-5)
    with pytest.raises(FileNotFoundError):
        Fitted.open("horovod", tmp_path)


def test_a_fit_reads_the_exchanges_of_a_benchmark(tmp_path):
    sets = [{"net": "resnet32", "label": "tiny", "only": ["layer1.0.*"]}]
    bench = Bench.open({"sets": sets, "methods": ["fp16"], "hosts": 2, "baselines": ["none ring", "fp16 ring"]})
    bench.save(tmp_path / "config.yaml")
    for turn in bench.turns():
        one = {"kind": turn.contender.kind, "exchanges": [{"seconds": 0.5}], "interface": 1.0}
        jsonl.append(tmp_path / "turns.jsonl", {**turn.key, **one})
    found = fitted.fit([tmp_path, results.save("measured", points(), tmp_path)])
    own = found.points[found.points["set"] == "tiny"]
    assert sorted(own["label"]) == ["fp16", "fp16", "none ring", "none ring"], "fp16 ring is not modelled"
    assert (own["seconds"] == 0.5).all() and set(own["rate"]) == {1e8, 1e9} and "fp16" in found.codecs
    assert own[own["label"] == "none ring"]["sent"].unique() == [4 * nets.total(bench.sets[0].tensors())]


def test_a_codec_is_timed():
    codec = fitted.time_codec(plan_of("fp16").program.main)
    assert min(codec) >= 0 and 1e-5 < codec.tensor + (1 << 20) * codec.element < 1


# -- predictions -----------------------------------------------------------------------------------


def predicted(*rates, workers=(2, 64, 4096), **hosts):
    methods = ["none", "topk", {"method": "scalecom", "label": "sc"}]
    entries = MethodsFile.open({"name": "t", "tasks": ["any"], "methods": methods}).methods
    known = {fitted.name_of(entry.plan.program.main): Codec(1e-4, 2e-9, 1e-5, 1e-9) for entry in entries}
    given = Fitted("horovod", TRUTH, known, {}, points())
    return scale.predict(given, entries, nets.get("resnet32"), rates, workers, **hosts)


def test_gathers_grow_and_sums_do_not():
    frame = predicted("100mbit").set_index(["method", "workers"])
    assert frame["on_wire"]["topk", 4096] > 1000 * frame["on_wire"]["topk", 2]
    assert frame["on_wire"]["sc", 4096] < 3 * frame["on_wire"]["sc", 2]
    np.testing.assert_allclose(frame["seconds"], frame[list(model.CONSTANTS)].sum(axis=1))  # the parts add up
    text = scale.table(predicted("100mbit"), "100mbit")
    assert text.count(r"\*") >= 1 and r"\*" in next(line for line in text.splitlines() if "topk" in line)


def test_a_slower_link_takes_longer_and_as_many_bytes():
    frame = predicted("100mbit", "1gbit")
    slow, fast = (frame[frame["rate"] == rate].reset_index(drop=True) for rate in ("100mbit", "1gbit"))
    assert (slow["seconds"] > fast["seconds"]).all() and slow["on_wire"].equals(fast["on_wire"])
    notes = scale.notes(Fitted("horovod", TRUTH, {}, {}, points()), ["100mbit", "10gbit"])
    assert notes[-1].startswith("10gbit: beyond the fit")


def test_two_levels_gain_what_is_gathered_from_more_ranks():
    frame = predicted("1gbit", workers=(8, 64, 512), local_size=8).set_index(["levels", "method", "workers"])
    np.testing.assert_allclose(frame["seconds"], frame[[*model.CONSTANTS, "local"]].sum(axis=1))
    on_host, seconds, codec = frame["on_host"], frame["seconds"], frame["codec"]
    assert on_host[1, "topk", 512] / on_host[2, "topk", 512] == pytest.approx(511 / 63, rel=0.05), "and headers"
    assert on_host[1, "dense", 512] / on_host[2, "dense", 512] == pytest.approx((511 / 512) / (63 / 64), rel=0.02)
    assert seconds[1, "topk", 512] > seconds[2, "topk", 512]
    assert codec[1, "sc", 64] > 2 * codec[2, "sc", 64], "each rank encodes the buckets that it owns"
    assert (frame.query("workers == 8")[["on_host", "link", "byte"]] == 0).all(axis=None), "there is one host"


def test_the_link_inside_a_host_costs_what_it_carries():
    fast, slow = (predicted("1gbit", workers=(64,), local_size=8, inside=each) for each in ("80gbit", "800mbit"))
    both = fast.merge(slow, on=["levels", "method", "on_host", "link", "inside"])
    longer = (both["local_y"] - both["local_x"]).groupby(both["levels"])
    two = both[both["levels"] == 2]
    np.testing.assert_allclose(longer.get_group(2), 8 * two["inside"] * (1 / 8e8 - 1 / 8e10))
    one = both[both["levels"] == 1]
    line = one["link"] / (8 * TRUTH["link"] / 1e9)  # of rings, which are as fast as their slowest link
    np.testing.assert_allclose(longer.get_group(1), 8 * line / 8e8 - one["link"])
    with pytest.raises(ValueError, match="there must be 2 at least, and 8 on each host"):
        predicted("1gbit", workers=(8, 12), local_size=8)


def test_one_level_is_drawn_dashed_over_two():
    frame = predicted("1gbit", "100mbit", workers=(8, 16, 64), local_size=8)
    drawn = scale.draw(frame.assign(hosts=frame["workers"] // 8), "hosts")
    ax = drawn.axes[1]
    assert ax.get_title(loc="left") == "100mbit"
    lines = {(line.get_linestyle(), line.get_color()): line for line in ax.get_lines()}
    topk = next(line for line in ax.get_lines() if line.get_label() == "topk")
    rows = frame[(frame["method"] == "topk") & (frame["rate"] == "100mbit")].set_index("levels")
    for levels, style in ((1, "--"), (2, "-")):
        line = lines[style, topk.get_color()]
        assert list(line.get_xdata()) == [1, 2, 8] and list(line.get_ydata()) == list(rows["seconds"][levels])
    assert len(scale.draw(predicted("1gbit")).axes[0].get_lines()) == 4, "one level alone is solid"


def test_the_command_predicts_hosts_of_several_ranks(tmp_path):
    results.save("cost-model-horovod", points(), tmp_path, constants=TRUTH, held_out={}, codecs={})
    words = ["scale", "--set", "resnet32", "--methods", "fp16", "--per-host", "4", "--fitted", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--workers", "8,16", "--inside", "10gbit", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "1 level, by workers" in done.output and "2 levels, by workers" in done.output
    written = json.loads((tmp_path / "scale-nodes.json").read_text())
    assert (written["per_host"], written["inside"]) == (4, "10gbit")
    assert {(row["levels"], row["method"]) for row in written["records"]} == {
        (levels, method) for levels in (1, 2) for method in ("dense", "fp16")
    }
    bad = CliRunner().invoke(app, [*words, "--workers", "6"])
    assert bad.exit_code == 2 and "and 4 on each host" in bad.output + (bad.stderr or "")


def test_the_command_fits_predicts_and_writes(tmp_path):
    measured = results.save("measured", points(), tmp_path)
    words = ["scale", "--set", "resnet32", "--methods", "topk 0.5 %,scalecom 100x", "--rate", "10mbit,1gbit"]
    done = CliRunner().invoke(app, [*words, "--fit", str(measured), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for text in ("resnet32 at 10mbit", "resnet32 at 1gbit", "4096", "a quarter, in turn"):
        assert text in done.output
    assert "10mbit: beyond the fit" in done.output and (tmp_path / "scale-resnet32.svg").exists()
    written = json.loads((tmp_path / "scale-resnet32.json").read_text())
    assert {row["method"] for row in written["records"]} == {"dense", "scalecom 100x", "topk 0.5 %"}
    again = CliRunner().invoke(app, [*words, "--fitted", str(tmp_path), "--workers", "2,64", "--out", str(tmp_path)])
    assert again.exit_code == 0 and "64" in again.output and "4096" not in again.output
    bad = CliRunner().invoke(app, [*words, "--workers", "1"])
    assert bad.exit_code == 2 and "there must be 2 at least" in bad.output + (bad.stderr or "")
