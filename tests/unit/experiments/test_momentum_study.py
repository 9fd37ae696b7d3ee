"""The momentum study: contenders are read, results are kept and skipped, and the report says which gaps are closed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments import units
from experiments.report import results

torch = pytest.importorskip("torch")

from experiments.momentum import contenders, report, study  # noqa: E402
from experiments.momentum.tasks import TASKS, constant  # noqa: E402
from experiments.training import tasks  # noqa: E402
from experiments.training.loop import learning_rate  # noqa: E402
from experiments.training.models_torch import build, held_out_sums, loss_of  # noqa: E402

TINY = constant("fnn3", "tiny", 0.1, batch_size=4, steps=4)


@pytest.fixture(autouse=True)
def data(monkeypatch):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((40, 1, 28, 28), np.float32), random.integers(0, 10, 40)
    found = tasks.Images(x[:30], y[:30], x[30:], y[30:], classes=10)
    monkeypatch.setitem(tasks.TASKS, "tiny", tasks.Source(lambda: found, "fnn3", tasks.ACCURACY))
    monkeypatch.setitem(TASKS, "tiny", TINY)
    return found


def run(folder, names, steps=4):
    units.measure(study.units_of(["tiny"], names, [1, 2], steps), folder, 1)
    return units.kept(folder)


def train(task, contender):
    return study.train(task.model_dump(), contender, 2, 1)


def test_settings_of_a_contender():
    found = contenders.parse("topk@density=0.002,values=fp16,lr=2,mu=0.5:plain")
    assert found.settings == {"method": "topk", "density": 0.002, "values": "fp16"}
    assert (found.form, found.lr, found.momentum) == ("plain", 2.0, 0.5)
    assert contenders.parse("topk").form == "default"


def test_momentum_of_adamw_is_cancelled_in_the_optimizer():
    adamw = TINY.model_copy(update={"optimizer": "adamw"})
    names = ("topk", "topk:plain", "topk:cancelled")
    assert [contenders.parse(name, adamw).trained(adamw).momentum for name in names] == [0.9, 0.9, 0.0]


def test_optimizers_that_have_another_momentum_or_none():
    rmsprop = TINY.model_copy(update={"optimizer": "rmsprop", "learning_rate": 0.001})
    assert train(rmsprop, "topk@mu=0,lr=10")["status"] == "done"
    adagrad = TINY.model_copy(update={"optimizer": "adagrad", "momentum": 0.0})
    assert train(adagrad, "topk")["status"] == "done"
    with pytest.raises(ValueError, match="adagrad"):
        contenders.parse("topk@mu=0", adagrad)


def test_runs_are_kept_and_skipped(tmp_path, capsys):
    run(tmp_path, ["dense", "topk:cancelled"])
    assert "[4/4]" in capsys.readouterr().out
    frame = run(tmp_path, ["dense", "topk:cancelled", "topk:plain"])
    output = capsys.readouterr().out
    assert "4 of 6 results are kept" in output and "[2/2]" in output and len(frame) == 6
    run(tmp_path, ["dense"], steps=5)
    assert "kept" not in capsys.readouterr().out
    assert "### tiny: 4 steps, 2 ranks" in report.markdown(frame) and "topk:cancelled" in report.markdown(frame)


def test_a_run_that_diverges_has_no_score():
    found = train(TINY.model_copy(update={"learning_rate": 1e6, "steps": 40}), "dense")
    assert (found["status"], found["score"]) == ("diverged", None)


def test_dense_equals_training_on_the_mean_gradient(tmp_path, data):
    frame = run(tmp_path, ["dense"])
    found = frame[frame["seed"] == 1].iloc[0]
    torch.manual_seed(1)
    net = build("fnn3", data)
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
    (unit,) = study.units_of(["tiny"], ["dense"], [1], 100, decay=True)
    decaying = TINY.model_validate(unit.settings["task"])
    rates = [learning_rate(decaying, step) for step in range(100)]
    assert max(rates) == pytest.approx(0.1, rel=0.05) and rates[0] == pytest.approx(0.01) and rates[-1] < 1e-4
    assert np.argmax(rates) in (8, 9, 10) and {learning_rate(TINY, step) for step in (0, 3)} == {0.1}
    assert unit.labels["decays"] and unit.measure(**unit.settings)["status"] == "done"


def test_local_steps():
    plain = TINY.model_copy(update={"momentum": 0.0})
    averaged = "local@every=1,outer_lr=1,outer_momentum=0"
    found = {name: train(plain, name) for name in ("dense", averaged, "local@every=2,method=topk,warmup=2")}
    # without momentum, averaging parameters in every step is averaging gradients
    assert found[averaged]["evaluations"][0] == (4, pytest.approx(found["dense"]["evaluations"][0][1]))
    assert found["local@every=2,method=topk,warmup=2"]["ratio"] > 2
    with pytest.raises(ValueError, match="every=30"):
        contenders.parse("local@method=topk")
