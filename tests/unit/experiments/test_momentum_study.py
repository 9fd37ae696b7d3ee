"""The momentum study: contenders are read, results are kept and skipped, and the report says which gaps are closed."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

torch = pytest.importorskip("torch")

from experiments.momentum import contenders, report, study, tasks  # noqa: E402
from experiments.training.tasks import Images  # noqa: E402

TINY = tasks.Task("tiny", "tiny", "sgd", rate=0.1, momentum=0.9, batch=4)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((40, 1, 28, 28), np.float32), random.integers(0, 10, 40)
    monkeypatch.setitem(tasks.DATA, "tiny", lambda: Images(x[:30], y[:30], x[30:], y[30:], classes=10))
    monkeypatch.setitem(tasks.NETS, "tiny", lambda: tasks.mlp(width=16))
    monkeypatch.setitem(tasks.TASKS, "tiny", TINY)


def run(folder, names, steps=4):
    output = io.StringIO()
    units = study.units_of(["tiny"], names, [1, 2], steps)
    failed = study.run_all(units, folder, 1, Console(file=output, width=200))
    return failed, output.getvalue()


def test_settings_of_a_contender():
    found = contenders.parse("topk@density=0.002,values=fp16,lr=2,mu=0.5:plain")
    assert found.settings == {"method": "topk", "density": 0.002, "values": "fp16"}
    assert (found.form, found.lr, found.momentum, found.density) == ("plain", 2.0, 0.5, 0.002)
    assert contenders.parse("topk").form == "default"


def test_momentum_of_adamw_is_cancelled_in_the_optimizer():
    adamw = dataclasses.replace(TINY, optimizer="adamw")
    momenta = [contenders.parse(name, adamw).momentum_on(adamw) for name in ("topk", "topk:plain", "topk:cancelled")]
    assert momenta == [0.9, 0.9, 0.0]


def test_optimizers_that_have_another_momentum_or_none():
    rmsprop = dataclasses.replace(TINY, optimizer="rmsprop", rate=0.001)
    without = contenders.parse("topk@mu=0,lr=10", rmsprop)
    assert study.train(rmsprop, without, 1, 2)["status"] == "done"
    adagrad = dataclasses.replace(TINY, optimizer="adagrad", momentum=0.0)
    assert study.train(adagrad, contenders.parse("topk"), 1, 2)["status"] == "done"
    with pytest.raises(ValueError, match="adagrad"):
        contenders.parse("topk@mu=0", adagrad)


def test_runs_are_kept_and_skipped(tmp_path):
    failed, output = run(tmp_path, ["dense", "topk:cancelled"])
    assert not failed and "[4/4]" in output
    _, output = run(tmp_path, ["dense", "topk:cancelled", "topk:plain"])
    assert "4 of 6 results are kept" in output and "[2/2]" in output
    _, output = run(tmp_path, ["dense"], steps=5)
    assert "kept" not in output
    assert {len(record["losses"]) for record in study.records(tmp_path)} == {1}
    assert "| topk:cancelled | 2 |" in report.markdown(study.records(tmp_path))


def test_dense_equals_training_on_the_mean_gradient(tmp_path):
    run(tmp_path, ["dense"])
    found = next(record for record in study.records(tmp_path) if record["seed"] == 1)
    torch.manual_seed(1)
    net, data = tasks.mlp(width=16), tasks.DATA["tiny"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    shares = [data.batches(rank, 2, 1, 4) for rank in range(2)]
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = sum(tasks.loss_of(net, next(share)) for share in shares) / 2
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found["losses"] == pytest.approx([np.mean(losses)], rel=1e-5)


def group(task, scores):
    runs = {
        name: {seed: {"score": score, "status": "done"} for seed, score in enumerate(values)}
        for name, values in scores.items()
    }
    return report.Group("made up", task, 1500, runs)


def test_a_gap_is_closed_by_its_mean_and_its_upper_bound():
    scores = {
        "dense": [87.0, 87.2, 86.8],
        "close": [86.8, 87.0, 86.7],
        "far": [85.0, 85.1, 85.2],
        "noisy": [88.0, 86.0, 86.8],
    }
    found = group(TINY, scores)
    assert [found.closed(name) for name in ("close", "far", "noisy")] == [True, False, False]
    gap = found.gap("close")
    assert gap.mean == pytest.approx(0.5 / 3)
    assert gap.high - gap.mean == pytest.approx(2.919986 * 0.057735 / 3**0.5, rel=1e-4)  # t of 2 degrees, 95 %


def test_one_seed_is_not_enough_for_a_verdict():
    assert group(TINY, {"dense": [87.0], "topk": [87.0]}).closed("topk") is None


def test_a_rate_that_decays():
    decaying = dataclasses.replace(TINY, decays=True)
    rates = [decaying.rate_at(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(0.1, rel=0.05) and rates[0] == pytest.approx(0.01) and rates[-1] < 1e-4
    assert np.argmax(rates) in (8, 9, 10) and {TINY.rate_at(step, 100) for step in (0, 50)} == {0.1}
    (unit,) = study.units_of(["tiny"], ["dense"], [1], 10, decay=True)
    assert (
        unit.settings["task"]["decays"] and study.train(decaying, contenders.parse("dense"), 1, 10)["status"] == "done"
    )
