"""``hvdcompress advise`` in one process: the statistics, the decision, and the user's functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.installed import needs

needs("torch")


from hvdcompress.cli.advise import measure, verdict  # noqa: E402
from hvdcompress.cli.advise.losses import Curve, Trial, gap_of  # noqa: E402
from hvdcompress.cli.advise.measure import Measured, Measurements  # noqa: E402
from hvdcompress.cli.advise.ranks import ALONE, DENSE, AdviseError, Contender, Ranks, Training, contenders  # noqa: E402
from hvdcompress.cli.advise.workload import UserError, Workload  # noqa: E402
from hvdcompress.cli.numbers import bits_of  # noqa: E402

SECONDS = 10.0


def curve(end, steps=200, start=3.0, seed=0):
    """A noisy loss that falls from ``start`` to ``end`` in ten seconds, in steps of equal duration."""
    done = np.arange(1, steps + 1) / steps
    losses = end + (start - end) * (1 - done) ** 2 + 0.02 * np.random.default_rng(seed).standard_normal(steps)
    return Curve((SECONDS * done).tolist(), losses.tolist())


def trial(*curves):
    """A trial of top-k against dense trainings whose loss falls to 1."""
    return Trial("topk", SECONDS, [curve(1.0, seed=seed) for seed in range(len(curves))], list(curves))


DIVERGING = Curve([SECONDS * at / 200 for at in range(1, 51)], [2.0] * 49 + [math.nan])


def measured(label, medians, tried=None, plan=None):
    """A contender with one median duration per round."""
    [contender] = contenders(plan) if plan else [Contender(label)]
    return Measured(contender, [[0.98 * each, each, each, 1.02 * each] for each in medians], trial=tried)


def decide(
    topk=(0.5, 0.51, 0.49), fp16=(0.95, 0.97, 0.96), own=(0.99, 1.0, 1.0), alone=(0.2,) * 3, tried=None, untrained=""
):
    """Choose among contenders whose steps take these parts of a dense step in three rounds."""
    found = [
        measured(ALONE, alone),
        measured(DENSE, (1.0, 1.02, 0.98)[: len(topk)]),
        measured("DDP's own fp16", own),
        measured("topk", topk, tried, plan="topk"),
        measured("fp16", fp16, plan="fp16"),
    ]
    best = verdict.choose(found)
    return best.label, verdict.explain(found, best, untrained), found, best


# -- losses after the same seconds -----------------------------------------------------------------


FLAT = [curve(2.3, start=2.3, seed=seed) for seed in (0, 1, 2, 9, 10, 11)]


@pytest.mark.parametrize(
    "part,tried,lost,label,words",
    [
        # worse per second is never recommended, however much shorter its steps are, and however many more it takes
        (0.05, trial(*(curve(1.3, 4000, seed=seed) for seed in (10, 11, 12))), True, DENSE, "is worse than dense"),
        (0.05, trial(*(curve(2.9, 4000, seed=seed) for seed in (10, 11))), True, DENSE, "is worse than dense"),
        (0.3, trial(curve(1.05, 666, seed=10)), True, DENSE, "is worse than dense"),
        (0.9, trial(curve(1.3, 222, seed=10)), True, DENSE, "is worse than dense"),
        (0.5, trial(curve(0.5), DIVERGING, curve(0.5)), True, DENSE, "became NaN or Inf"),
        (0.5, trial(curve(0.5, 400, seed=10)), False, "topk", "compress with topk: a step takes 500 ms"),
        (0.5, trial(*(curve(0.5, 400, seed=seed) for seed in (10, 11, 12))), False, "topk", " of 10 s"),
        (0.5, trial(*(curve(1.0, seed=seed) for seed in (9, 10, 11))), False, "topk", "compress with topk: a step"),
        # losses that say nothing
        (0.5, Trial("topk", SECONDS, FLAT[:3], FLAT[3:]), False, "topk", "if its loss keeps up"),
        (0.5, Trial("topk", SECONDS, FLAT[:3], FLAT[3:]), False, "topk", "hardly fell"),
        (0.5, Trial("topk", SECONDS, [DIVERGING], [curve(0.5)]), False, "topk", "Dense training diverged"),
    ],
)
def test_losses_after_the_same_seconds_decide(part, tried, lost, label, words):
    """``part``: the duration of a step with top-k as a part of a dense step."""
    chosen, explained, *_ = decide(topk=[part] * 3, tried=tried)
    assert (tried.lost, chosen) == (lost, label) and words in explained


@pytest.mark.parametrize("loss,seconds", [(4.5, 7), (1.5, 10), (1.4, None)])
def test_a_loss_is_reached_by_the_mean_over_a_fifth_of_the_steps(loss, seconds):
    assert Curve(seconds=range(1, 11), losses=range(10, 0, -1)).reached(loss) == seconds


def test_intervals_are_those_of_students_t():
    assert gap_of([1.0, 2.0, 3.0])[1:] == pytest.approx((2 - 2.920 / 3**0.5, 2 + 2.920 / 3**0.5), rel=1e-3)
    assert gap_of([1.0]).mean == 1 and all(map(math.isnan, gap_of([1.0])[1:])) and math.isnan(gap_of([]).mean)


# -- the decision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps,label,words",
    [
        # simpler ways come first: dense within 5 % of a step, then the framework's own 16 bits, then ours
        ({"topk": [0.96] * 3}, DENSE, ""),
        ({"own": [0.52] * 3, "fp16": [0.5] * 3}, "DDP's own fp16", ""),
        ({"own": [0.9] * 3, "fp16": [0.51] * 3}, "fp16", ""),
        ({"topk": [1.3] * 3, "fp16": [1.2] * 3, "own": [1.1] * 3}, DENSE, "10 % longer"),
        ({"topk": [1.3] * 3, "fp16": [1.2] * 3, "own": [1.1] * 3}, DENSE, "80 % of a dense step"),
        # noise is not taken for a gain
        ({"topk": [0.9] * 3, "alone": [0.97] * 3}, DENSE, "nothing to gain"),
        ({"topk": [0.5, 1.2, 0.8]}, DENSE, "vary by more"),
        ({"topk": [0.5, 1.2, 0.8], "fp16": [0.9] * 3}, "fp16", ""),  # slower, but surely faster than dense
        ({"untrained": "--optimizer is not given"}, "topk", "--optimizer is not given"),
        ({"untrained": "--optimizer is not given"}, "topk", "if its loss keeps up"),
    ],
)
def test_the_decision(steps, label, words):
    chosen, explained, *_ = decide(**{"topk": [0.5] * 3, **steps})
    assert chosen == label and words in explained


def test_noise_within_one_round_is_not_taken_for_a_gain():
    *_, found, _ = decide(topk=[0.9], fp16=[1.0], own=[1.0], alone=[0.2])
    found[3].rounds = [[0.5, 0.9, 0.9, 1.5]]
    assert verdict.choose(found).label == DENSE


@pytest.mark.parametrize("alone,is_far", [(0.2, True), (0.4, False)])
def test_local_steps_are_suggested_where_the_best_step_is_still_long(alone, is_far):
    *_, found, best = decide(topk=[0.5] * 3, alone=[alone] * 3)
    assert verdict.is_far(found, best) == is_far
    words = verdict.local_steps(found, best, seconds=0.4)
    assert f'every={round(0.4 / 0.05 / alone)}, method="qsgd")' in words and "An exchange took 400 ms" in words


def test_predictions_for_another_link_are_computing_and_bytes():
    *_, found, _ = decide()
    found[1].on_wire, found[3].on_wire, found[3].codec = 125e6, 1.25e6, 0.01
    predicted = verdict.predict(found, bits_of("1gbit"))
    wanted = (0.2 + 1 + 66 / 1448, 0.2 + 0.01 + 0.01 * (1 + 66 / 1448))
    assert (predicted[DENSE], predicted["topk"]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "label,plan,driver,words",
    [
        ("x", "topk density=0.02 values=fp16", "DDP", "ddp.attach(model, \"topk\", density=0.02, values='fp16')"),
        ("x", "topk", "Horovod", 'hc.DistributedOptimizer(optimizer, model.named_parameters(), "topk")'),
        ("DDP's own fp16", None, "DDP", "fp16_compress_hook"),
        ("DDP's own fp16", None, "Horovod", "Compression.fp16"),
    ],
)
def test_the_lines_for_the_script(label, plan, driver, words):
    assert words in verdict.how_to(measured(label, [1.0], plan=plan), driver)


def test_contenders_are_methods_with_settings_or_plans(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("method: qsgd\nbits: 8\n")
    auto, topk, mine = contenders(f"auto, topk density=0.05 nodes=2,{file}")
    assert auto.settings == {"method": "auto"} and not auto.plan.fallback  # it would interfere with the measurement
    assert (topk.plan.program.main.density, topk.plan.nodes, mine.plan.program.main.bits) == (0.05, 2, 8)
    with pytest.raises(ValueError, match="did you mean 'topk'"):
        contenders("tokp")


# -- the user's functions, on one rank -------------------------------------------------------------

MINE = """
import torch

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

def make_batch():
    x = torch.randn(8, 4)
    return x, x[:, :3].argmax(1)

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)

def fails():
    return 1 // 0

def ends():
    raise StopIteration

batches = iter([(torch.randn(8, 4), torch.zeros(8).long())] * 5)

def five():
    return next(batches)

def single():
    return torch.randn(8, 4)

def unused():
    model = make_model()
    model.extra = torch.nn.Parameter(torch.zeros(2))
    return model
"""


class OneRank(Ranks):
    """Ranks of which there is one, which exchanges nothing."""

    def __init__(self, rank=0):
        self.driver, self.rank, self.world_size = "DDP", rank, 1

    def share(self, value):
        return [value]

    def sums(self, *values):
        return list(values)

    def wrap(self, model, optimizer, contender):
        return Training(model, optimizer)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "advise_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)

    def workload(**functions):
        given = {"model": "make_model", "data": "make_batch", "optimizer": "make_optimizer", **functions}
        return Workload({f"--{option}": f"advise_mine:{name}" for option, name in given.items() if name})

    return workload


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"model": "fails"}, r"--model advise_mine:fails raised ZeroDivisionError: .*advise_mine.py, line 15"),
        ({"model": "make_batch"}, "--model advise_mine:make_batch must return a torch Module, not a tuple"),
        ({"data": "ends"}, "--data advise_mine:ends raised StopIteration.*batches must not end"),
        ({"data": "single"}, "give --loss"),
        ({"optimizer": "make_model"}, "--optimizer advise_mine:make_model raised TypeError"),
        ({"loss": "make_optimizer"}, "--loss advise_mine:make_optimizer raised"),
        ({"model": "unused"}, "'extra' gets no gradient"),
    ],
)
def test_an_error_in_a_function_names_its_option(mine, functions, words):
    with pytest.raises(AdviseError, match=words):
        mine(**functions).check(OneRank())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("advise_mine:make_it", "has no function 'make_it'"),
        ("advise_mine:", "write MODULE:FUNCTION"),
        ("no_such_module:make", "importing no_such_module"),
    ],
)
def test_functions_that_do_not_exist(mine, name, words):
    with pytest.raises(UserError, match=words):
        Workload({"--model": name})


def test_weights_depend_on_the_seed_and_batches_on_the_rank(mine):
    def start(rank, seed):
        workload = mine()
        weight = workload.start(OneRank(rank), seed)[0][0].weight
        return weight, workload.batch()[0]

    (weight, batch), (same, other_batch), (other, _) = start(0, 0), start(1, 0), start(0, 1)
    assert weight.equal(same) and not batch.equal(other_batch) and not weight.equal(other)


def test_trainings_are_paired_and_as_long_as_asked(mine):
    """Without an exchange, dense and the contender are the same training: equal losses, step by step."""
    here = Measurements(OneRank(), mine())
    dense, other = here.train(Contender(DENSE), 0.2, 0), here.train(Contender("topk"), 0.2, 0)
    count = min(len(dense.losses), len(other.losses))
    assert count > measure.WARM and dense.losses[:count] == other.losses[:count]
    assert dense.seconds[-1] >= 0.2 > dense.seconds[-2] and dense.seconds[measure.WARM - 1] == 0
    found = here.trial(Contender("topk"), 0.1, 2, {0: dense})
    assert len(found.curves) == 2 and found.dense[1].losses[0] != dense.losses[0], "another seed"


def test_a_batch_that_is_missing_during_a_training_is_an_error(mine):
    with pytest.raises(AdviseError, match="batches must not end"):
        Measurements(OneRank(), mine(data="five")).train(Contender(DENSE), 10.0, 0)
