"""``hvdcompress advise`` in one process: the decision, and the user's functions."""

from __future__ import annotations

import pytest

from tests.installed import needs

needs("torch")


from hvdcompress.cli.advise import measure, verdict  # noqa: E402
from hvdcompress.cli.advise.measure import Measured  # noqa: E402
from hvdcompress.cli.advise.ranks import ALONE, DENSE, AdviseError, Contender, Ranks, Training, contenders  # noqa: E402
from hvdcompress.cli.advise.workload import UserError, Workload  # noqa: E402
from hvdcompress.cli.numbers import bits_of  # noqa: E402


def measured(label, medians, plan=None):
    """A contender with one median duration per round."""
    [contender] = contenders(plan) if plan else [Contender(label)]
    return Measured(contender, [[0.98 * each, each, each, 1.02 * each] for each in medians])


def decide(topk=(0.5, 0.51, 0.49), fp16=(0.95, 0.97, 0.96), own=(0.99, 1.0, 1.0), alone=(0.2,) * 3):
    """Choose among contenders whose steps take these parts of a dense step in three rounds."""
    found = [
        measured(ALONE, alone),
        measured(DENSE, (1.0, 1.02, 0.98)[: len(topk)]),
        measured("DDP's own fp16", own),
        measured("topk", topk, plan="topk"),
        measured("fp16", fp16, plan="fp16"),
    ]
    best = verdict.choose(found)
    return best.label, verdict.explain(found, best), found, best


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
        ({}, "topk", "compress with topk: a step takes 500 ms instead of 1.00 s"),
        ({}, "topk", "Accuracy was not measured: read it from docs/which-method.md"),
    ],
)
def test_the_decision(steps, label, words):
    chosen, explained, *_ = decide(**{"topk": [0.5] * 3, **steps})
    assert chosen == label and words in explained


def test_noise_within_one_round_is_not_taken_for_a_gain():
    *_, found, _ = decide(topk=[0.9], fp16=[1.0], own=[1.0], alone=[0.2])
    found[3].rounds = [[0.5, 0.9, 0.9, 1.5]]
    assert verdict.choose(found).label == DENSE


def test_local_steps_are_suggested_where_they_are_faster():
    *_, found, best = decide(topk=[0.5] * 3, alone=[0.2] * 3)
    words = verdict.local_steps(found, best, "DDP")
    assert "takes about 227 ms" in words and "ddp.attach(model, local_steps=30)" in words  # 200 + 800 / 30
    assert "LocalSteps(model, every=30)" in verdict.local_steps(found, best, "Horovod")
    *_, found, best = decide(topk=[0.5] * 3, alone=[0.48] * 3)
    assert verdict.local_steps(found, best, "DDP") == ""


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
        ("advise_mine:make_it", "AttributeError: module 'advise_mine' has no attribute 'make_it'"),
        ("advise_mine:", "write MODULE:FUNCTION"),
        ("no_such_module:make", "No module named 'no_such_module'"),
    ],
)
def test_functions_that_do_not_exist(mine, name, words):
    with pytest.raises(UserError, match=words):
        Workload({"--model": name})


def test_ranks_have_the_same_weights_and_batches_of_their_own(mine):
    def start(rank):
        workload = mine()
        weight = workload.start(rank)[0][0].weight
        return weight, workload.batch()[0]

    (weight, batch), (same, other_batch) = start(0), start(1)
    assert weight.equal(same) and not batch.equal(other_batch)


def test_contenders_take_turns(mine, monkeypatch):
    monkeypatch.setattr(measure, "TURN", 0.01)
    started = []
    monkeypatch.setattr(
        OneRank, "wrap", lambda self, model, optimizer, one: started.append(one.label) or Training(model, optimizer)
    )
    found = measure.measure_steps(OneRank(), mine(), [Contender(ALONE), Contender(DENSE)], 2)
    assert started == [ALONE, DENSE, DENSE, ALONE]
    for one in found:
        assert len(one.rounds) == 2 and min(map(len, one.rounds)) >= measure.LEAST and one.seconds > 0
    elements = 4 * 8 + 8 + 8 + 8 + 8 * 3 + 3
    assert (found[0].sent, found[1].sent, found[1].dense_bytes) == (0, 4 * elements, 4 * elements)


def test_a_batch_that_is_missing_is_an_error_of_all_ranks(mine):
    with pytest.raises(AdviseError, match="batches must not end"):
        measure.measure_steps(OneRank(), mine(data="five"), [Contender(DENSE)], 2)
