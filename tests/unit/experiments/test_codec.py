"""``bench codec``: it takes the drivers' way, measures every method at its real work, and says what was measured."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import nets
from experiments.bench import codec, codec_report
from experiments.bench.codec import Asked
from experiments.bench.devices import Cost, Cpu, Tensors
from experiments.bench.draws import Draws
from experiments.bench.side import Side, Spent
from hvdcompress import available, cli, load
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
        given = [[on_host.empty(spec.size) for spec in SPECS] for _ in range(side.world_size)]
        draws.fill(given)
        gradients = [[device.array(each.copy()) for each in tensors] for tensors in given]
        spent = side.step(gradients)
        yield given, [[device.fetch(each) for each in tensors] for tensors in gradients], spent


@pytest.mark.parametrize("id", available())
def test_a_step_is_the_drivers(id):
    """What is timed is the real thing: it gives the same numbers as a driver, bucket by bucket and step by step."""
    plan = load({**next(iter(codec.asked_for([id]).values())), "min_elements": 100, **short(id)})
    side, net = Side(plan, SPECS, 3, Cpu()), Loopback(plan, world_size=3)
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


# -- gradients, time and memory ------------------------------------------------------------------------


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


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
def test_peers_compute_what_they_say():
    import torch

    from experiments.bench import peers

    x, y = np.float32([3, 1, -4, 2]), np.float32([0, 1.5, 0, 0])
    step = peers.grace_topk(torch, 2, world_size=2)
    assert step(torch.from_numpy(x)).tolist() == [3, 0, -4, 0]
    assert step(torch.from_numpy(y)).tolist() == [0, 2.5, 0, 2], "what was held back comes later"
    g = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 7))
    low_rank = peers.ddp_powersgd(torch, (4, 6), torch.ones(6, 1))
    assert torch.allclose(low_rank(g.view(-1)), g, rtol=1e-5)


# -- figures -------------------------------------------------------------------------------------------


def records(asked, *groups):
    return [table.records() for table, _ in codec_report.sections(asked, groups)]


# -- the command ---------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_the_command_measures_in_processes_of_their_own(tmp_path):
    page = tmp_path / "docs" / "page.md"
    words = ["--method", "topk", "-m", "fp16", "--elements", 5000, "--runs", 1, "--world-size", 3, "--no-peers"]
    result = invoke("codec", *words, "--format", "json", "--write", page)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    assert [row["method"] for row in found["rows"]] == ["topk", "fp16"]
    assert "One tensor of 70 × 71: 4,970 elements; 3 ranks, cpu" in found["title"]
    assert "| topk |" in page.read_text() and "What a rank computes" in page.read_text()
