"""The momentum study: contenders, remedies against their papers' equations, trainings, and the gaps in the report."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments import units

torch = pytest.importorskip("torch")

from experiments.momentum import contenders, remedies, report, study  # noqa: E402
from experiments.momentum.contenders import TASKS, constant  # noqa: E402
from experiments.training import tasks  # noqa: E402
from experiments.training.models_torch import build, held_out_sums, loss_of  # noqa: E402
from hvdcompress.loopback import Loopback  # noqa: E402

TINY = constant("fnn3", "tiny", 0.1, batch_size=4, steps=4)
RANKS, STEPS, K = 2, 6, 10


@pytest.fixture
def data(monkeypatch):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((40, 1, 28, 28), np.float32), random.integers(0, 10, 40)
    found = tasks.Images(x[:30], y[:30], x[30:], y[30:], classes=10)
    monkeypatch.setitem(tasks.TASKS, "tiny", tasks.Source(lambda: found, "fnn3", tasks.ACCURACY))
    monkeypatch.setitem(TASKS, "tiny", TINY)
    return found


def train(task, contender):
    return study.train(task.model_dump(), contender, 2, 1)


# -- remedies --------------------------------------------------------------------------------------


def top(x, by):
    """Return x [ranks, n] with all but the K elements of largest magnitude of ``by`` set to 0, on each rank."""
    smallest = np.argsort(np.abs(by), axis=1)[:, :-K]
    kept = x.copy()
    np.put_along_axis(kept, smallest, 0, axis=1)
    return kept


def gmc(gradients):
    residuals, update = np.zeros((RANKS, 100)), np.zeros(100)
    for g in gradients:
        u = g + residuals + 0.9 * update
        sent = top(u, by=u)
        residuals = u - sent
        update = sent.mean(0)
        yield update


def regtopk(gradients):
    residuals, factors = np.zeros((RANKS, 100)), np.ones((RANKS, 100))
    for g in gradients:
        a = g + residuals
        sent = top(a, by=a * factors)
        residuals = a - sent
        with np.errstate(divide="ignore", invalid="ignore"):
            distortion = (sent.sum(0) - sent) / sent
        factors = np.where(sent != 0, np.tanh(np.abs(1 + distortion) / 2.0), 1.0)
        yield sent.mean(0)


def ef21_sgdm(gradients):
    averages, estimates = gradients[0], np.zeros((RANKS, 100))
    for g in gradients:
        averages = 0.7 * averages + 0.3 * g
        estimates = estimates + top(averages - estimates, by=averages - estimates)
        yield estimates.mean(0)


@pytest.mark.parametrize(
    "equations,settings",
    [
        (gmc, {"momentum": 0.9}),
        (regtopk, {"softness": 2.0, "optimizer_momentum": "keep"}),
        (ef21_sgdm, {"decay": 0.7}),
    ],
)
def test_remedies_follow_the_equations_of_their_papers(equations, settings):
    remedies.register()
    gradients = np.random.default_rng(1).standard_normal((STEPS, RANKS, 100)).astype(np.float32)
    net = Loopback({"method": equations.__name__, "density": K / 100, "min_elements": 1, **settings}, RANKS)
    for given, wanted in zip(gradients, equations(gradients.astype(np.float64)), strict=True):
        assert net.allreduce(list(given), name="w")[0] == pytest.approx(wanted, abs=1e-5)


# -- contenders and trainings ----------------------------------------------------------------------


def test_contenders_are_parsed():
    found = contenders.parse("topk@density=0.002,values=fp16,lr=2,mu=0.5:plain")
    assert found.settings == {"method": "topk", "density": 0.002, "values": "fp16"}
    assert (found.form, found.lr, found.momentum) == ("plain", 2.0, 0.5)
    adamw = TINY.model_copy(update={"optimizer": "adamw"})
    names = ("topk", "topk:plain", "topk:cancelled")
    assert [contenders.parse(name, adamw).trained(adamw).momentum for name in names] == [0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    "name,message", [("topk@beta1=0", "the task's optimizer is sgd"), ("local@method=topk", "every=30")]
)
def test_contenders_that_do_not_fit(name, message):
    with pytest.raises(ValueError, match=message):
        contenders.parse(name, TINY)


def test_dense_equals_training_on_the_mean_gradient(data, tmp_path):
    units.measure(study.units_of(["tiny"], ["dense", "topk:plain"], [1], 4), tmp_path, 1)
    frame = units.kept(tmp_path)
    assert "### tiny: 4 steps, 2 ranks" in report.markdown(frame)

    torch.manual_seed(1)
    net = build("fnn3", data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    shares = [data.batches(rank, 2, 1, 4) for rank in range(2)]
    for _ in range(4):
        optimizer.zero_grad()
        loss = sum(loss_of(net, next(share)) for share in shares) / 2
        loss.backward()
        optimizer.step()
    score = TINY.metric.value(*held_out_sums(net, data.held_out(0, 1)))
    assert frame.set_index(["contender", "seed"])["evaluations"]["dense", 1] == [[4, pytest.approx(score)]]


@pytest.mark.parametrize(
    "changed,contender,status",
    [
        ({"optimizer": "rmsprop", "learning_rate": 0.001}, "topk@mu=0,lr=10", "done"),
        ({"optimizer": "adagrad", "momentum": 0.0}, "topk", "done"),
        ({"learning_rate": 1e6, "steps": 40}, "dense", "diverged"),
    ],
)
def test_other_optimizers_train_and_divergence_is_reported(data, changed, contender, status):
    found = train(TINY.model_copy(update=changed), contender)
    assert found["status"] == status and (found["score"] is None) == (status == "diverged")


def test_local_steps(data):
    """Without momentum, averaging parameters in every step equals averaging gradients."""
    plain = TINY.model_copy(update={"momentum": 0.0})
    dense, averaged = (train(plain, name) for name in ("dense", "local@every=1,outer_lr=1,outer_momentum=0"))
    assert averaged["evaluations"][0] == (4, pytest.approx(dense["evaluations"][0][1]))


# -- the report ------------------------------------------------------------------------------------


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
        "dense": [87.0, 87.2, 86.8], "close": [86.8, 87.0, 86.7], "far": [85.0, 85.1, 85.2],
        "noisy": [88.0, 86.0, 86.8], "once": [87.0],
    }  # fmt: skip
    found = summary(scores)
    assert [found.closed[name] for name in ("close", "far", "noisy", "once")] == [True, False, False, None]
    half_width = 2.919986 * 0.057735 / 3**0.5  # t of 2 degrees, 95 %
    assert tuple(found.loc["close", ["gap", "high"]]) == pytest.approx((0.5 / 3, 0.5 / 3 + half_width), rel=1e-4)
    assert summary(scores, ["close"]).closed["close"] is False


def test_contenders_at_their_best_learning_rates():
    scores = {"dense": [87.0, 87.2], "topk:plain": [85.0, 85.0], "topk@lr=0.5:plain": [86.0, 86.0], "dgc": [80.0, 80.0]}
    found = summary({**scores, "dgc@lr=2": [86.9]}, ["dgc@lr=2"]).reset_index()
    best = report.at_best_rates(found).set_index("contender")
    assert best.rate.to_dict() == {"dense": 1.0, "topk:plain": 0.5, "dgc": 1.0}  # dgc@lr=2 diverged on a seed
    assert best.gap["topk:plain"] == pytest.approx(1.1)
