"""``experiments codec``: it goes the way of the drivers, measures every method at its real work, and writes records."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import nets
from experiments.__main__ import app
from experiments.bench import codec
from experiments.bench.devices import Cpu, Tensors
from experiments.bench.lockstep import PARTS, WARM, Lockstep, draw, time_steps, warm_steps
from hvdcompress import available, load
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME

SPECS = [TensorSpec(name, shape) for name, shape in nets.get("resnet32").items()][:12]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def plan_of(id):
    short = {"dense_steps": 2, "matrix_rank": 1} if id == "gradiveq" else {}
    return load({**codec.plans([id])[id], "min_elements": 100, **short})


def steps_of(ranks, count=3):
    """The gradients of the ranks and what they became, step by step; equal on any device."""
    at, ends = ranks.device, np.cumsum([0, *(spec.size for spec in SPECS)])
    rows = draw(int(ends[-1]), count + ranks.world_size)
    for step in range(count):
        given = [
            [rows[step + rank][a:b] for a, b in zip(ends, ends[1:], strict=False)] for rank in range(ranks.world_size)
        ]
        gradients = [[at.array(each.copy()) for each in tensors] for tensors in given]
        spent = ranks.step(gradients)
        yield given, [[at.fetch(each) for each in tensors] for tensors in gradients], spent


@pytest.mark.parametrize("id", available())
def test_a_step_is_that_of_the_drivers(id):
    """What is timed is the real thing: the same numbers as a driver's, bucket by bucket and step by step."""
    plan = plan_of(id)
    ranks, net = Lockstep(plan, SPECS, 3, Cpu()), Loopback(plan, world_size=3)
    for given, reduced, spent in steps_of(ranks):
        named = [{spec.name: each.reshape(spec.shape) for spec, each in zip(SPECS, one, strict=True)} for one in given]
        expected = net.allreduce_many(named)
        for rank, out in enumerate(reduced):
            for spec, each in zip(SPECS, out, strict=True):
                # What is left to Horovod stays as it is: nobody reduces it here
                left = plan.buckets([spec])[0].program.main.id == "none"
                wanted = named[rank][spec.name] if left else expected[rank][spec.name]
                np.testing.assert_array_equal(each, wanted.ravel(), err_msg=spec.name)
        assert all(seconds > 0 for part, seconds in spent.items() if id != "none" or part == "encode")


@needs_torch
@pytest.mark.parametrize("id", available())
def test_a_step_on_tensors_is_the_same(id):
    plan = plan_of(id)
    both = [Lockstep(plan, SPECS, 2, device) for device in (Cpu(), Tensors("cpu"))]
    exact = plan.program.main.exact
    for (_, reduced, _), (_, on_tensors, _) in zip(*map(steps_of, both), strict=True):
        for mine, theirs in zip(reduced[1], on_tensors[1], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-6)


def test_every_method_does_its_real_work():
    """DGC and PowerSGD send vectors dense, and GradiVeQ most tensors, for its first steps: figures of nothing."""
    [(name, shape)] = nets.get("25000000").items()
    assert shape == (5000, 5000)
    for label, settings in codec.plans().items():
        plan = load(settings)
        codec.check(plan, [TensorSpec(name, shape)])
        [bucket] = plan.buckets([TensorSpec(name, shape)], BY_NAME)
        method = bucket.program.at(warm_steps(plan))
        assert method.id == label and method.phase_of(warm_steps(plan)) == len(method.phases) - 1
    assert warm_steps(load(codec.plans(["topk"])["topk"])) == WARM
    with pytest.raises(ValueError, match="sends these tensors dense"):
        codec.check(load({"method": "topk"}), [TensorSpec("w", (10,))])


def test_time_steps_times_so_many_runs():
    found = time_steps(load({"method": "topk", "min_elements": 1}), SPECS, 2, runs=3)
    assert list(found) == [*PARTS, "copy"] and len(found) == 3 and (found > 0).all(axis=None)


@pytest.mark.timeout(120)
def test_the_command_writes_records(tmp_path):
    words = ["codec", "-m", "topk", "-m", "fp16", "--set", "5000", "--runs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "codec.json").read_text())["records"]
    assert [row["method"] for row in rows] == ["topk", "fp16"]
    assert rows[0]["copies"] == pytest.approx(sum(rows[0][part] for part in PARTS), rel=0.01)
