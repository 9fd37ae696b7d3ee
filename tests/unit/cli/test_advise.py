"""``hvdcompress advise`` in one process: the statistics, the decision, and the user's functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.installed import needs

needs("torch")

import torch  # noqa: E402

from hvdcompress.cli.advise import measure, verdict  # noqa: E402
from hvdcompress.cli.advise.losses import Curve, Trial, gap_of  # noqa: E402
from hvdcompress.cli.advise.measure import Measured, Measurements  # noqa: E402
from hvdcompress.cli.advise.ranks import ALONE, DENSE, AdviseError, Contender, Ranks, Training, contenders  # noqa: E402
from hvdcompress.cli.advise.workload import UserError, Workload  # noqa: E402
from hvdcompress.cli.numbers import bits_of  # noqa: E402

SECONDS = 10.0


def curve(end, steps=200, start=3.0, seed=0, noise=0.02):
    """A loss that falls from ``start`` to ``end`` in ten seconds, in steps of equal duration."""
    done = np.arange(1, steps + 1) / steps
    losses = end + (start - end) * (1 - done) ** 2 + noise * np.random.default_rng(seed).standard_normal(steps)
    return Curve((SECONDS * done).tolist(), losses.tolist())


def diverging(steps=50):
    return Curve([SECONDS * (at + 1) / 200 for at in range(steps)], [2.0] * (steps - 1) + [math.nan])


def trial(curves, seeds=3):
    return Trial("topk", SECONDS, [curve(1.0, seed=seed) for seed in range(seeds)], curves)


def measured(label, *medians, found=None, plan=None):
    """A contender with one median duration per round."""
    [contender] = contenders(plan) if plan else [Contender(label)]
    return Measured(contender, [[0.98 * each, each, each, 1.02 * each] for each in medians], trial=found)


def field(topk=(0.5, 0.51, 0.49), fp16=(0.95, 0.97, 0.96), own=(0.99, 1.0, 1.0), alone=(0.2, 0.2, 0.2), tried=None):
    """All contenders, whose steps take these parts of a dense step in three rounds."""
    return [
        measured(ALONE, *alone),
        measured(DENSE, 1.0, 1.02, 0.98),
        measured("DDP's own fp16", *own),
        measured("topk", *topk, found=tried, plan="topk"),
        measured("fp16", *fp16, plan="fp16"),
    ]


def decide(found, untrained=""):
    best = verdict.choose(found)
    return best.label, verdict.explain(found, best, untrained)


@pytest.mark.parametrize("alone,is_far", [(0.2, True), (0.4, False)])
def test_local_steps_are_suggested_where_the_best_step_is_still_long(alone, is_far):
    found = field(topk=[0.5] * 3, alone=[alone] * 3)
    best = verdict.choose(found)
    assert best.label == "topk" and verdict.is_far(found, best) == is_far
    words = verdict.local_steps(found, best, seconds=0.4)
    assert f'every={round(0.4 / 0.05 / alone)}, method="qsgd")' in words and "An exchange took 400 ms" in words


# -- losses after the same seconds -------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("worse", [0.05, 0.3, 1.9])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_faster_per_step_and_worse_per_second_is_never_recommended(ratio, worse, seeds):
    """However much shorter its steps are, and however many more of them it takes."""
    steps = int(200 / ratio)
    lost = trial([curve(1.0 + worse, steps, seed=10 + seed) for seed in range(seeds)], seeds)
    label, words = decide(field(topk=[ratio] * 3, tried=lost))
    assert lost.lost and label == DENSE and words.startswith("do not compress") and "is worse than dense" in words


def test_a_method_that_arrives_sooner_is_recommended_and_says_when():
    for seeds in (1, 3):
        won = trial([curve(0.5, 400, seed=10 + seed) for seed in range(seeds)], seeds)
        label, words = decide(field(tried=won))
        assert not won.lost and label == "topk" and words.startswith("compress with topk: a step takes 500 ms")
        reached = [one.reached(dense.loss) for one, dense in zip(won.curves, won.dense, strict=True)]
        assert all(5 < each < SECONDS for each in reached) and " of 10 s" in words


def test_a_method_that_diverges_is_not_recommended():
    lost = trial([curve(0.5), diverging(), curve(0.5)])
    label, words = decide(field(tried=lost))
    assert lost.diverged and label == DENSE and "became NaN or Inf" in words


def test_losses_that_say_nothing_are_said_to():
    flat = [curve(2.3, start=2.3, seed=seed) for seed in range(3)]
    still = Trial("topk", SECONDS, flat, [curve(2.3, start=2.3, seed=9 + seed) for seed in range(3)])
    assert not still.lost and not still.learns
    label, words = decide(field(tried=still))
    assert label == "topk" and "if its loss keeps up" in words and "say nothing" in words
    dense_fails = Trial("topk", SECONDS, [diverging()], [curve(0.5)])
    assert not dense_fails.lost and "diverged" in dense_fails.conclusion()
    equal = trial([curve(1.0, seed=9 + seed) for seed in range(3)])
    assert not equal.lost and equal.learns


def test_intervals_are_those_of_students_t():
    assert gap_of([1.0, 2.0, 3.0])[1:] == pytest.approx((2 - 2.920 / 3**0.5, 2 + 2.920 / 3**0.5), rel=1e-3)
    assert gap_of([1.0]).mean == 1 and all(map(math.isnan, gap_of([1.0])[1:])) and math.isnan(gap_of([]).mean)


# -- the decision ------------------------------------------------------------------------------------------


def test_without_trainings_the_verdict_says_so():
    label, words = decide(field(), untrained="--optimizer is not given")
    assert label == "topk" and "if its loss keeps up" in words and "--optimizer is not given" in words


def test_simpler_ways_come_first():
    """Dense within 5 % of a step; the framework's own 16 bits and then ours within 5 % of the fastest."""
    assert decide(field(topk=[0.96] * 3))[0] == DENSE
    assert decide(field(topk=[0.5] * 3, own=[0.52] * 3, fp16=[0.5] * 3))[0] == "DDP's own fp16"
    assert decide(field(topk=[0.5] * 3, own=[0.9] * 3, fp16=[0.51] * 3))[0] == "fp16"
    label, words = decide(field(topk=[1.3] * 3, fp16=[1.2] * 3, own=[1.1] * 3))
    assert label == DENSE and "10 % longer" in words and "80 % of a dense step" in words


def test_where_there_is_nothing_to_gain_noise_is_not_taken_for_a_gain():
    label, words = decide(field(topk=[0.9] * 3, alone=[0.97] * 3))
    assert label == DENSE and "nothing to gain" in words
    label, words = decide(field(topk=[0.5, 1.2, 0.8]))
    assert label == DENSE and "vary by more" in words
    assert decide(field(topk=[0.5, 1.2, 0.8], fp16=[0.9] * 3))[0] == "fp16", "slower, but surely faster than dense"
    one_round = field(topk=[0.99])
    for each in one_round:
        each.rounds = each.rounds[:1]
    one_round[3].rounds = [[0.5, 0.9, 0.9, 1.5]]
    assert decide(one_round)[0] == DENSE


def test_predictions_for_another_link_are_computing_and_bytes():
    found = field()
    found[1].on_wire, found[3].on_wire, found[3].codec = 125e6, 1.25e6, 0.01
    predicted = verdict.predict(found, bits_of("1gbit"))
    assert predicted[DENSE] == pytest.approx(0.2 + 1 + 66 / 1448)
    assert predicted["topk"] == pytest.approx(0.2 + 0.01 + 0.01 * (1 + 66 / 1448))
    for text in ("fast", "1 mb", "0mbit"):
        with pytest.raises(ValueError, match="is not a rate"):
            bits_of(text)


def test_the_line_for_the_script():
    topk, own = measured("x", 1.0, plan="topk density=0.02 values=fp16"), measured("DDP's own fp16", 1.0)
    assert verdict.how_to(topk, "DDP") == (
        "from hvdcompress import ddp\nddp.attach(model, \"topk\", density=0.02, values='fp16', optimizer=optimizer)"
    )
    assert "named_parameters" in verdict.how_to(topk, "Horovod")
    assert "fp16_compress_hook" in verdict.how_to(own, "DDP") and "Compression.fp16" in verdict.how_to(own, "Horovod")


def test_contenders_are_methods_with_settings_or_plans(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("method: qsgd\nbits: 8\n")
    auto, topk, mine = contenders(f"auto, topk density=0.05 nodes=2,{file}")
    assert auto.settings == {"method": "auto"} and not auto.plan.fallback  # it would interfere with the measurement
    assert (topk.plan.program.main.density, topk.plan.nodes) == (0.05, 2)
    assert mine.plan.program.main.bits == 8
    with pytest.raises(ValueError, match="did you mean 'topk'"):
        contenders("tokp")


# -- the user's functions, on one rank ---------------------------------------------------------------------

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

def single():
    return torch.randn(8, 4)

def unused():
    model = make_model()
    model.extra = torch.nn.Parameter(torch.zeros(2))
    return model
"""


class OneRank(Ranks):
    """Ranks of which there is one, which exchanges nothing."""

    def __init__(self, rank=0, world_size=1):
        self.driver, self.rank, self.world_size = "DDP", rank, world_size

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
def test_an_error_names_the_option_on_all_ranks(mine, functions, words):
    with pytest.raises(AdviseError, match=words):
        mine(**functions).check(OneRank())


def test_functions_that_do_not_exist(mine):
    for given, words in (("make_it", "has no function 'make_it'"), ("", "write MODULE:FUNCTION")):
        with pytest.raises(UserError, match=words):
            Workload({"--model": f"advise_mine:{given}"})
    with pytest.raises(UserError, match="importing no_such_module"):
        Workload({"--model": "no_such_module:make"})


def test_weights_depend_on_the_seed_and_batches_on_the_rank(mine):
    found = mine()
    weights, batches = [], []
    for rank, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        weights.append(found.start(OneRank(rank, 2), seed)[0][0].weight)
        batches.append([found.batch()[0] for _ in range(2)])
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2]) and weights[0].equal(weights[3])
    assert not batches[0][0].equal(batches[1][0]) and not batches[0][0].equal(batches[0][1])
    assert batches[0][1].equal(batches[3][1])


def test_trainings_are_paired_and_as_long_as_asked(mine):
    """Without an exchange, dense and the contender are the same training: equal losses, step by step."""
    here = Measurements(OneRank(), mine())
    dense, other = here.train(Contender(DENSE), 0.3, 0), here.train(Contender("topk"), 0.3, 0)
    count = min(len(dense.losses), len(other.losses))
    assert count > measure.WARM and dense.losses[:count] == other.losses[:count]
    assert dense.seconds[-1] >= 0.3 > dense.seconds[-2] and dense.seconds[measure.WARM - 1] == 0
    assert here.train(Contender(DENSE), 0.1, 1).losses[0] != dense.losses[0]
    found = here.trial(Contender("topk"), 0.1, 2, {0: dense})
    assert found.dense[0] is dense and len(found.curves) == len(found.dense) == 2


def test_a_batch_that_is_missing_during_a_training_ends_all_ranks(mine, monkeypatch):
    workload = mine()
    here = Measurements(OneRank(), workload)
    batches = iter([(torch.randn(8, 4), torch.zeros(8).long())] * 5)
    monkeypatch.setitem(workload._functions, "--data", lambda: next(batches))
    with pytest.raises(AdviseError, match="batches must not end"):
        here.train(Contender(DENSE), 10.0, 0)
