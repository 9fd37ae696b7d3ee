"""The momentum study: contenders are read, results are kept and skipped, and the report says which gaps are closed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from experiments.report import jsonl, results

torch = pytest.importorskip("torch")

from experiments.momentum import contenders, report, study, tasks  # noqa: E402
from experiments.training.models_torch import held_out_sums, loss_of  # noqa: E402
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
    failed = study.run(study.units_of(["tiny"], names, [1, 2], steps), folder)
    return failed, pd.DataFrame(jsonl.read(folder / "results.jsonl"))


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


def test_runs_are_kept_and_skipped(tmp_path, capsys):
    failed, _ = run(tmp_path, ["dense", "topk:cancelled"])
    assert not failed and "[4/4]" in capsys.readouterr().out
    _, frame = run(tmp_path, ["dense", "topk:cancelled", "topk:plain"])
    output = capsys.readouterr().out
    assert "4 of 6 results are kept" in output and "[2/2]" in output and len(frame) == 6
    run(tmp_path, ["dense"], steps=5)
    assert "kept" not in capsys.readouterr().out
    assert "### tiny: 4 steps, 2 ranks" in report.markdown(frame) and "topk:cancelled" in report.markdown(frame)


def test_a_run_that_fails_has_no_result(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.DATA, "tiny", lambda: 1 / 0)
    failed = study.run(study.units_of(["tiny"], ["dense"], [1]), tmp_path)
    assert failed == ["tiny dense seed 1: ZeroDivisionError: division by zero"]
    assert not (tmp_path / "results.jsonl").exists()


def test_dense_equals_training_on_the_mean_gradient(tmp_path):
    _, frame = run(tmp_path, ["dense"])
    found = frame[frame["seed"] == 1].iloc[0]
    torch.manual_seed(1)
    net, data = tasks.mlp(width=16), tasks.DATA["tiny"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    shares = [data.batches(rank, 2, 1, 4) for rank in range(2)]
    for _ in range(4):
        optimizer.zero_grad()
        loss = sum(loss_of(net, next(share)) for share in shares) / 2
        loss.backward()
        optimizer.step()
    assert found["evaluations"] == [[4, pytest.approx(TINY.metric.value(*held_out_sums(net, data.held_out(0, 1))))]]


def summary(scores, diverged=()):
    about = {"task": "tiny", "steps": 1500, "ranks": 2, "decays": False, "unit": "%", "ratio": 1.0, "seconds": 1.0}
    runs = [
        {**about, "contender": name, "seed": seed, "score": score, "status": "done"}
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]
    runs += [{**about, "contender": name, "seed": 9, "score": None, "status": "diverged"} for name in diverged]
    return report.summary(pd.DataFrame(runs)).set_index("contender")


def test_a_gap_is_closed_by_its_mean_and_its_upper_bound():
    scores = {
        "dense": [87.0, 87.2, 86.8],
        "close": [86.8, 87.0, 86.7],
        "far": [85.0, 85.1, 85.2],
        "noisy": [88.0, 86.0, 86.8],
        "once": [87.0],
    }
    found = summary(scores)
    assert [found.closed[name] for name in ("close", "far", "noisy", "once")] == [True, False, False, None]
    gap = found.loc["close"]
    assert gap.gap == pytest.approx(0.5 / 3)
    assert gap.high - gap.gap == pytest.approx(2.919986 * 0.057735 / 3**0.5, rel=1e-4)  # t of 2 degrees, 95 %
    assert summary(scores, ["close"]).closed["close"] is False


def test_contenders_at_their_best_rates():
    scores = {"dense": [87.0, 87.2], "topk:plain": [85.0, 85.0], "topk@lr=0.5:plain": [86.0, 86.0], "dgc": [80.0, 80.0]}
    found = summary({**scores, "dgc@lr=2": [86.9]}, ["dgc@lr=2"]).reset_index()
    best = report.at_best_rates(found).set_index("contender")
    assert best.rate.to_dict() == {"dense": 1.0, "topk:plain": 0.5, "dgc": 1.0}  # dgc@lr=2 diverged on a seed
    assert best.gap["topk:plain"] == pytest.approx(1.1)


def test_the_published_results():
    found = report.summary(results.load("momentum"))
    row = found[(found.task == "mlp") & (found.steps == 1500) & (found.contender == "topk:plain")].iloc[0]
    assert (row.gap, row.low, row.high) == pytest.approx((1.63, 1.37, 1.88), abs=0.006) and row.closed is False


def test_a_rate_that_decays():
    decaying = dataclasses.replace(TINY, decays=True)
    rates = [decaying.rate_at(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(0.1, rel=0.05) and rates[0] == pytest.approx(0.01) and rates[-1] < 1e-4
    assert np.argmax(rates) in (8, 9, 10) and {TINY.rate_at(step, 100) for step in (0, 50)} == {0.1}
    ((_, task, *_),) = study.units_of(["tiny"], ["dense"], [1], 10, decay=True)
    assert task.decays and study.train(task, contenders.parse("dense"), 1, 10)["status"] == "done"
