"""``bench codec``: it takes the drivers' way, measures every method at its real work, and says what was measured."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os

import numpy as np
import pytest
from typer.testing import CliRunner

from hvdcompress import available, cli, load
from hvdcompress.lab import nets
from hvdcompress.lab.bench import codec, codec_report, devices
from hvdcompress.lab.bench.codec import Asked, Figures, Measured
from hvdcompress.lab.bench.devices import Cost, Cpu, Tensors
from hvdcompress.lab.bench.draws import Draws
from hvdcompress.lab.bench.peers import MAKERS
from hvdcompress.lab.bench.side import Side, Spent
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME

SPECS = [TensorSpec(name, shape) for name, shape in nets.get("resnet32").items()][:12]
HAS_TORCH = importlib.util.find_spec("torch") is not None


def invoke(*words):
    return CliRunner().invoke(cli.app, ["bench", *map(str, words)], env={"COLUMNS": "250"})


# -- the way that a step takes -------------------------------------------------------------------------


def steps_of(side, count=3):
    """The gradients that ranks had, and what they became, step by step; the same ones on any device."""
    on_host, device = Cpu(), side.device
    draws = Draws(sum(spec.size for spec in SPECS), on_host)
    for _ in range(count):
        given = [[on_host.empty(spec.size) for spec in SPECS] for _ in range(side.world)]
        draws.fill(given)
        gradients = [[device.array(each.copy()) for each in tensors] for tensors in given]
        spent = side.step(gradients)
        yield given, [[device.fetch(each) for each in tensors] for tensors in gradients], spent


@pytest.mark.parametrize("id", available())
def test_a_step_is_the_drivers(id):
    """What is timed is the real thing: it gives the same numbers as a driver, bucket by bucket and step by step."""
    plan = load({**next(iter(codec.asked_for([id]).values())), "min_elements": 100, **short(id)})
    side, net = Side(plan, SPECS, 3, Cpu()), Loopback(plan, world=3)
    for given, reduced, spent in steps_of(side):
        named = [{spec.name: each.reshape(spec.shape) for spec, each in zip(SPECS, one, strict=True)} for one in given]
        expected = net.allreduce_many(named)
        for rank, out in enumerate(reduced):
            for spec, each in zip(SPECS, out, strict=True):
                # what is left to Horovod stays as it is here: nobody reduces it
                here = side.plan.buckets([spec])[0].program.main.id == "none"
                wanted = named[rank][spec.name] if here else expected[rank][spec.name]
                np.testing.assert_array_equal(each, wanted.ravel(), err_msg=spec.name)
        assert all(cost.seconds > 0 for part, cost in spent.parts.items() if id != "none" or part == "encode")


def short(id):
    return {"dense_steps": 2, "matrix_rank": 1} if id == "gradiveq" else {}


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
@pytest.mark.parametrize("id", available())
def test_a_step_on_tensors_is_the_same(id):
    plan = load({**next(iter(codec.asked_for([id]).values())), "min_elements": 100, **short(id)})
    sides = [Side(plan, SPECS, 2, device) for device in (Cpu(), Tensors("cpu"))]
    exact = plan.program.main.exact
    for (_, reduced, _), (_, on_tensors, _) in zip(*map(steps_of, sides), strict=True):
        for mine, theirs in zip(reduced[1], on_tensors[1], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-6)


def test_small_tensors_are_joined_as_under_pytorch():
    plan = load({"method": "topk", "min_elements": 100})
    assert len(Side(plan, SPECS, 2, Cpu()).buckets) == len(plan.buckets(SPECS, BY_NAME)) < len(SPECS)


def test_a_mean_rank_is_told():
    """Of a broadcast one rank does the work: the figures are those of the mean rank."""
    calls = []

    def gauge(call, *arguments):
        calls.append(call)
        return call(*arguments), Cost(seconds=1.0, faults=2.0)

    side = Side(load({"method": "topk"}), [TensorSpec("w", (50, 50))], 4, Cpu())
    spent = side.step([[np.ones(2500, np.float32)] for _ in range(4)], gauge)
    assert spent.whole.seconds == len(calls) / 4 and spent.whole.faults == len(calls) / 2
    assert {part: cost.seconds for part, cost in spent.parts.items()} == {"encode": 1, "decode": 1, "apply": 2}


# -- gradients, time and memory ------------------------------------------------------------------------


def test_gradients_resemble_a_trainings():
    n, device = 200_000, Cpu()
    draws, first, then = Draws(n, device), [], []
    gradients = [[device.empty(n - 7), device.empty(7)] for _ in range(2)]
    for taken in (first, then):
        draws.fill(gradients)
        taken += [np.concatenate(each) for each in gradients]
    x = first[0].astype(np.float64)
    assert (x**4).mean() / (x**2).mean() ** 2 > 15, "heavy tails"
    for other in (first[1], then[0]):
        assert not np.array_equal(first[0], other)
    # elements that are large in one step are so in the next
    assert np.corrcoef(np.log(np.abs(first[0]) + 1e-9), np.log(np.abs(then[0]) + 1e-9))[0, 1] > 0.15


def test_fresh_memory_is_told():
    device = Cpu()

    def touch() -> None:  # an allocator may hand out memory that is there already; a new mapping never is
        with mmap.mmap(-1, 1 << 24) as fresh:
            fresh[::4096] = bytes(1 << 12)

    _, cost = device.timed(touch)
    assert cost.faults > 0 and cost.seconds > 0
    device.tracing(True)
    try:
        made, cost = device.traced(lambda: np.ones(1 << 20, np.float32) + np.ones(1 << 20, np.float32))
        _, none = device.traced(lambda: np.copyto(made, 2.0))
    finally:
        device.tracing(False)
    assert 8e6 < cost.fresh < 16e6, "what is held at once: two arrays of 4 MiB, of which the sum may reuse one"
    assert none.fresh < 1e5


def test_contenders_take_turns():
    order = []

    class Contender:
        def __init__(self, name):
            self.name = name

        def prepare(self):
            order.append(f"({self.name})")

        def take(self):
            order.append(self.name)
            return Spent({"call": Cost(seconds=len(order))})

    def copy():
        order.append("=")
        return len(order)

    taken = codec.take_turns([Contender(name) for name in "abc"], 2, copy)
    assert "".join(order) == "=(a)a=(b)b=(c)c=(b)b=(c)c=(a)a"
    seconds = [[spent.whole.seconds for spent in one] for one, _ in taken]
    assert seconds == [[3, 18], [6, 12], [9, 15]]
    assert [copies for _, copies in taken] == [[1, 16], [4, 10], [7, 13]], "the copy just before"


# -- what is measured ----------------------------------------------------------------------------------


def test_every_method_does_its_real_work():
    """DGC and PowerSGD send vectors dense, and GradiVeQ most tensors, for its first steps: figures of nothing."""
    asked = Asked(codec.asked_for(), elements=25_000_000)
    spec, _ = codec.specs_of(asked)
    assert spec.shape == (5000, 5000) and list(asked.methods) == available()
    for label, settings in asked.methods.items():
        plan = load(settings)
        codec.check(plan, spec, label)
        [bucket] = plan.buckets([spec], BY_NAME)
        method = bucket.program.at(codec.warm_steps(plan))
        assert method.id == label and method.phase_of(codec.warm_steps(plan)) == len(method.phases) - 1
    assert codec.warm_steps(load(asked.methods["topk"])) == codec.WARM >= 4
    assert codec.warm_steps(load(asked.methods["gradiveq"])) == 97


@pytest.mark.timeout(200)
def test_every_method_and_every_peer_is_in_the_tables(monkeypatch):
    few = {spec.name: spec.shape for spec in SPECS}
    monkeypatch.setattr(nets, "get", lambda name: few)
    methods = codec.asked_for()
    methods["gradiveq"] |= short("gradiveq")
    asked = Asked(methods, net="resnet32", runs=1)
    measured = [codec.measure(asked, label) for label in asked.methods]
    tables = [table for table, _ in codec_report.sections(asked, measured)]
    for table in (tables[0], tables[2]):
        assert [row["method"] for row in table.records()] == available()
    spec, _ = codec.specs_of(asked)
    peers: dict[str, list[str]] = {row["method"]: [] for row in tables[1].records()}
    for row in tables[1].records():
        peers[row["method"]].append(row["peer"])
        assert row["copies"] > 0 and row["seconds"] > 0
    assert set(peers) == (set(MAKERS) if HAS_TORCH else {"topk", "fft", "powersgd"})
    assert {"numpy.argpartition of |x|", "numpy.add(x, residual, out)"} < set(peers["topk"])
    if HAS_TORCH:
        assert {"top-k as GRACE publishes it", "torch.topk of |x|"} < set(peers["topk"])
    assert [row["at_most"] for row in tables[1].records() if "scipy" in row["peer"]] == [1.5]
    assert [row["at_most"] for row in tables[1].records() if "products" in row["peer"]] == [1.3]
    by_method = {row["method"]: row for row in tables[0].records()}
    assert by_method["topk"]["kept"] >= 2 * 4 * spec.size, "a residual and its second buffer"
    page = codec_report.markdown(asked, measured, "hvdcompress bench codec -x", "a chip")
    assert "Generated by `hvdcompress bench codec -x`" in page and "Machine: a chip." in page
    assert page.count("\n## ") == 3 and f"| {len(few)} |" in page


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
def test_peers_compute_what_they_say():
    import torch

    from hvdcompress.lab.bench import peers

    x, y = np.float32([3, 1, -4, 2]), np.float32([0, 1.5, 0, 0])
    step = peers.grace_topk(torch, 2, world=2)
    assert step(torch.from_numpy(x)).tolist() == [3, 0, -4, 0]
    assert step(torch.from_numpy(y)).tolist() == [0, 2.5, 0, 2], "what was held back comes later"
    g = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 7))
    low_rank = peers.ddp_powersgd(torch, (4, 6), torch.ones(6, 1))
    assert torch.allclose(low_rank(g.view(-1)), g, rtol=1e-5)


# -- figures -------------------------------------------------------------------------------------------


COPIES = [1e-3, 0.5e-3, 2e-3]  # seconds of the copies before three runs


def group(**more):
    """A tensor of 1000 × 1000."""
    parts = {"encode": [3e-3, 2e-3, 8e-3], "decode": [2e-3, 2e-3, 3e-3], "apply": [1e-3, 1e-3, 1e-3]}
    one = Figures("x", [6e-3, 5e-3, 12e-3], COPIES, parts, faults=12.0, fresh=2e6, kept=8e6, buckets=1)
    given = {"many": None, "peers": [], "elements": 1_000_000}
    return Measured("x", (1000, 1000), **{**given, "one": one, **more})


def records(asked, *groups):
    return [table.records() for table, _ in codec_report.sections(asked, groups)]


def test_figures_are_in_copies():
    asked = Asked({}, elements=1_000_000)
    [[row]] = records(asked, group())
    assert row["copies"] == pytest.approx(6), "the median of 6, 10 and 6"
    assert row["least"] == pytest.approx(10), "5 ms in 0.5 ms"
    assert (row["encode"], row["decode"], row["apply"]) == pytest.approx((4, 2, 1))
    assert row["copy"] == pytest.approx(8e9), "8 bytes per element, read and written"
    table, _ = codec_report.sections(asked, [group()])[0]
    assert "| x | 6.00 | 10.0 | 4.00 | 2.00 | 1.00 | 6.00 | 8.00 | 12 | 0.500 | 2.00 |" in table.markdown()


def test_what_may_not_be_exceeded_stands_out():
    peers = [
        Figures("slow", [5e-3, 4e-3, 10e-3], COPIES, at_most=1.3),
        Figures("fast", [4e-3, 4e-3, 8e-3], COPIES, at_most=1.3),
        Figures("any", [1e-3, 5e-3, 2e-3], COPIES),
        Figures("nothing", [1e-6] * 3, COPIES, at_most=1.0),
    ]
    table, _ = codec_report.sections(Asked({}), [group(peers=peers)])[1]
    times = [row["times"] for row in table.records()]
    assert times == [pytest.approx(1.2), pytest.approx(1.5), pytest.approx(6), None], "medians over rounds"
    column = next(column for column in table.columns if column.key == "times")
    assert [bool(column.marked(row)) for row in table.rows] == [False, True, False, False]


def test_a_nets_tensors_are_held_against_one_of_their_size():
    """By the element: the one tensor is a matrix, and a few elements smaller."""
    asked = Asked({}, net="resnet32")
    parts = dict.fromkeys(("encode", "decode", "apply"), [1e-3] * 3)
    many = Figures("x", [9e-3, 5e-3, 18e-3], COPIES, parts, buckets=7)
    _, [row] = records(asked, group(many=many, elements=464_154))
    size = 464_154 / 1_000_000
    assert row["times"] == pytest.approx(1.5 / size) and row["copies"] == pytest.approx(9 / size)
    assert row["exchanges"] == 7
    table, _ = codec_report.sections(asked, [group(many=many, elements=464_154)])[1]
    column = next(column for column in table.columns if column.key == "times")
    assert [bool(column.marked(row)) for row in table.rows] == [True]


def test_what_is_left_to_horovod_is_held_against_nothing():
    parts = dict.fromkeys(("encode", "decode", "apply"), [0.0] * 3)
    one, many = (Figures("none", [seconds] * 3, COPIES, parts) for seconds in (1e-6, 1e-4))
    assert "times" not in records(Asked({}, net="resnet32"), group(one=one, many=many))[1][0]


# -- the command ---------------------------------------------------------------------------------------


def test_methods_are_named_with_their_settings():
    asked = codec.asked_for(["topk", "topk density=0.001 values=fp16", "dgc,density=1e-3", "gradiveq matrix_rank=null"])
    assert asked["topk"] == {"method": "topk", "density": codec.DENSITY}
    assert asked["topk density=0.001 values=fp16"] == {"method": "topk", "density": 0.001, "values": "fp16"}
    assert load(asked["dgc density=1e-3"]).program.main.density == 0.001
    assert load(asked["gradiveq matrix_rank=null"]).program.main.matrix_rank is None
    assert codec.asked_for(["none"]) == {"none": {"method": "none"}}, "it has no density"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "topkk"], "unknown method 'topkk' (did you mean 'topk'?)"),
        (["-m", "topk densty=1"], "no hyper-parameter 'densty' (did you mean 'density'?)"),
        (["-m", "topk density=7"], "'topk density=7': density"),
        (["-m", "topk 0.1"], "write settings as KEY=VALUE, not '0.1'"),
        (["-m", ""], "unknown method ''"),
        (["-m", "topk", "--elements", "100"], "topk sends a tensor of shape [10, 10] dense"),
        (["--elements", "0"], "--elements"),
        (["--runs", "0"], "--runs"),
        (["--tensors", "12"], "no net has 12 tensors; known: 16 (alexnet)"),
        (["--tensors", "resnet5"], "no net 'resnet5' (did you mean 'resnet50'?)"),
        (["--tensors", "161", "--elements", "5000"], "leave out --elements"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_the_command_refuses_before_it_measures(monkeypatch, words, message):
    monkeypatch.setattr(codec, "apart", lambda *_: pytest.fail("it measured"))
    result = invoke("codec", *words)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_without_a_gpu_the_command_says_so(monkeypatch):
    if HAS_TORCH:
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("codec", "--device", "cuda")
    assert result.exit_code == 2 and "--device cuda" in result.output
    with pytest.raises(ValueError, match="known: cpu, cuda"):
        devices.device("tpu")


def test_a_count_of_tensors_names_a_net():
    assert codec.net_of("161") == codec.net_of("resnet50") == "resnet50"


def test_a_process_that_is_ended_is_told():
    with pytest.raises(ValueError, match="want of memory"):
        codec.apart(os._exit, 1)
    assert codec.apart(os.getenv, "OPENBLAS_NUM_THREADS") == "1" and codec.apart(os.getpid) != os.getpid()


@pytest.mark.timeout(120)
def test_the_command_measures_in_processes_of_their_own(tmp_path):
    page = tmp_path / "docs" / "page.md"
    words = ["--method", "topk", "-m", "fp16", "--elements", 5000, "--runs", 1, "--world", 3, "--no-peers"]
    result = invoke("codec", *words, "--format", "json", "--write", page)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    assert [row["method"] for row in found["rows"]] == ["topk", "fp16"]
    assert "One tensor of 70 × 71: 4,970 elements; 3 ranks, cpu" in found["title"]
    assert "| topk |" in page.read_text() and "What a rank computes" in page.read_text()


def test_a_file_needs_no_name_of_a_command():
    """`bench FILE` is what it was before there were several benchmarks."""
    for words in (["nowhere.yaml"], ["--loopback", "nowhere.yaml"], ["exchanges", "nowhere.yaml"]):
        result = invoke(*words)
        assert result.exit_code == 2 and "no file 'nowhere.yaml'" in result.output
    assert "codec" in invoke("--help").output
