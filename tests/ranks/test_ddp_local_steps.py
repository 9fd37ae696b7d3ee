"""Tests of ``ddp.attach(model, local_steps=…)``: parameters are those of LocalSteps on the bare module, to the bit."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hvdcompress import ddp
from hvdcompress._torch import local_steps
from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.fallback import Fallback, Verdict
from hvdcompress.local_steps import OUTER, LocalSteps
from tests.ranks.checks import FOLDER, logged

pytestmark = pytest.mark.drivers("ddp")

SETTINGS = {"method": "topk", "density": 0.1, "min_elements": 10}
EVERY, STEPS = 3, 11


class Net(torch.nn.Module):
    """A small net with batch normalization, and two branches, of which a step may use one.

    Args:
        reentrant: kind of the activation checkpointing of a layer; None for no checkpointing.
        branch: returns the branch that is used in a step.
    """

    def __init__(self, reentrant=None, branch=None):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40)
        self.middle, self.last = torch.nn.Linear(40, 40), torch.nn.Linear(40, 3)
        self.other = torch.nn.Linear(40, 3) if branch else None
        self.reentrant = reentrant
        self.branch = branch

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)).relu()
        if self.reentrant is None:
            hidden = self.middle(hidden)
        else:
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        return (self.other if self.branch and self.branch() else self.last)(hidden)


class Training:
    """A net, its optimizers, and local steps: by one line, or with calls in the loop.

    Args:
        make: makes the net.
        optimizers: makes the optimizers.
        options: of DistributedDataParallel.
        every: steps from one exchange to the next.
        settings: of local steps.
    """

    def __init__(self, driver, one_line, make=Net, optimizers=None, options=(), every=EVERY, **settings):
        self.rank, self.one_line, self.scaler = driver.rank, one_line, None
        torch.manual_seed(0 if one_line else driver.rank)  # both start with rank 0's weights
        self.net = make()
        self.model = DistributedDataParallel(self.net, **dict(options)) if one_line else self.net
        of = optimizers or (lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)])
        self.optimizers = of(self.net)
        settings = {**(SETTINGS if "method" not in settings else {}), **settings}
        if one_line:
            self.local = ddp.attach(self.model, local_steps=every, **settings)
        else:
            self.local = LocalSteps(self.net, every=every, **settings)

    def loss(self, step, part=0):
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + self.rank)
        inputs, targets = torch.randn(16, 20, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        return torch.nn.functional.cross_entropy(self.model(inputs), targets)

    def no_sync(self):
        return self.model.no_sync() if self.one_line else contextlib.nullcontext()

    def take(self, step):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss(step).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self, steps=range(STEPS), take=None):
        for step in steps:
            (take or type(self).take)(self, step)
            if not self.one_line:
                self.local.step()
        return self

    def end(self):
        self.local.synchronize()
        self.local.close()
        return {name: each.clone() for name, each in self.net.state_dict().items()}


def accumulate(training, step):
    (optimizer,) = training.optimizers
    optimizer.zero_grad()
    with training.no_sync():
        for part in (1, 2):
            training.loss(step, part).backward()
    training.loss(step).backward()
    optimizer.step()


def with_closure(training, step):
    (optimizer,) = training.optimizers

    def closure():
        optimizer.zero_grad()
        loss = training.loss(step)
        loss.backward()
        return loss

    optimizer.step(closure)


def scaled(training, step):
    """A step that a GradScaler skips on one rank."""
    (optimizer,) = training.optimizers
    training.scaler = training.scaler or torch.amp.GradScaler("cpu", init_scale=2.0**10)
    overflows = step in (2, 4) and training.rank == 1
    optimizer.zero_grad()
    training.scaler.scale(training.loss(step) * (float("inf") if overflows else 1.0)).backward()
    training.scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(training.net.parameters(), 0.5)
    training.scaler.step(optimizer)
    training.scaler.update()


def evaluated(training, step):
    """Ranks evaluate equal models in the middle; one of them alone, too."""
    training.take(step)
    if step in (3, 7):
        with training.local.synchronized(), torch.no_grad():
            found = [each.clone() for each in training.net.parameters()]
            training.net.eval()
            training.model(torch.randn(4, 20))
            training.net.train()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        assert all(torch.equal(*pair) for other in everyone for pair in zip(other, found, strict=True))
        if training.rank == 0:
            with training.local.synchronized():
                training.net.state_dict()


def swaps_averages(training, step):
    training.take(step)
    if step == 4:
        with training.local.synchronized(), torch.no_grad():
            for each in training.net.parameters():
                each.zero_()


def two_optimizers(net):
    return [
        torch.optim.AdamW([*net.first.parameters(), *net.norm.parameters()], lr=0.01),
        torch.optim.SGD([*net.middle.parameters(), *net.last.parameters()], lr=0.05),
    ]


def two_groups(net):
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.05)
    optimizer.add_param_group({"params": [*net.norm.parameters(), *net.middle.parameters(), *net.last.parameters()]})
    return [optimizer]


def in_turn():
    """Return a function that tells which branch a step of this rank takes."""
    calls = []
    return lambda: calls.append(0) or (len(calls) + dist.get_rank()) % 2


SITUATIONS = {
    "plain": {},
    "fragments": {"fragments": 2, "delay": 1, "mixing": 0.5},
    "warm-up": {"warmup": 4},
    "averages": {"outer": None, "method": "none"},
    "accumulation": {"take": accumulate},
    "closure": {"take": with_closure},
    "GradScaler": {"take": scaled},
    "evaluation": {"take": evaluated},
    "swapped weights": {"take": swaps_averages},
    "checkpointing": {"make": partial(Net, False)},
    "reentrant checkpointing": {"make": partial(Net, True)},
    # DDP gives a parameter that another rank has used a gradient of zero, which momentum would turn into a step
    "unused parameters": {
        "make": lambda: Net(branch=in_turn()),
        "options": {"find_unused_parameters": True},
        "optimizers": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05)],
    },
    "static graph": {"make": partial(Net, True), "options": {"static_graph": True}},
    "bucket views": {"options": {"gradient_as_bucket_view": True}},
    "fused AdamW": {"optimizers": lambda net: [torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)]},
    "two optimizers": {"optimizers": two_optimizers},
    "parameter groups": {"optimizers": two_groups},
}


@pytest.mark.also("three ranks")
@pytest.mark.parametrize(
    "situation",
    [
        "plain",
        "fragments",
        "warm-up",
        "averages",
        "accumulation",
        "closure",
        "GradScaler",
        "evaluation",
        "swapped weights",
        "checkpointing",
        "reentrant checkpointing",
        "unused parameters",
        "static graph",
        "bucket views",
        "fused AdamW",
        "two optimizers",
        "parameter groups",
    ],
)
def test_one_line_trains_as_calls_in_the_loop(driver, situation):
    settings = dict(SITUATIONS[situation])
    take = settings.pop("take", None)
    got, want = (Training(driver, one_line, **settings).run(take=take).end() for one_line in (True, False))
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    for other in driver.gather(got):
        assert all(torch.equal(other[name], got[name]) for name, _ in Net().named_parameters())


def test_compiled_model_is_counted(driver):
    """Parameters are exchanged; compiled kernels may round in another way."""
    training = Training(driver, True)
    whole = training.model
    training.model = torch.compile(whole, backend="eager")
    got = training.run().end()
    want = Training(driver, True).run().end()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


def test_a_model_in_evaluation_mode_is_trained(driver):
    """As for fine-tuning with fixed statistics of batch normalization. Exchanges may be a step late."""
    training = Training(driver, True, method="none")
    training.net.eval()
    training.run(range(STEPS))
    assert training.local.steps >= STEPS - 2
    training.end()


def test_evaluation_between_exchanges_is_warned_about(driver):
    def warnings(lines):
        return [line for line in lines if "synchronized()" in line]

    training = Training(driver, True)
    with logged() as lines:
        training.run(range(2))
        with training.local.synchronized():
            training.net.state_dict()
            copy.deepcopy(training.net)
        training.local.save(FOLDER / "quiet")
        assert not warnings(lines)
        training.model.state_dict()
        with torch.no_grad():
            training.model.eval()(torch.randn(2, 20))
    assert len(warnings(lines)) == 2
    with logged() as lines:
        training.local.synchronize()
        training.net.state_dict()
        training.local.close()
    assert not warnings(lines)


def test_loaded_weights_are_averaged(driver):
    """Without the outer optimizer. Weights that are clipped after every step are trained."""
    training = Training(driver, True)
    before = copy.deepcopy(training.net.state_dict())
    with logged() as lines:
        training.run(range(4))
        training.model.module.load_state_dict(before)
        training.run(range(4, 7))
    assert driver.rank or sum("changed the weights" in line for line in lines) == 1
    training.end()

    def clipped(training, step):
        training.take(step)
        with torch.no_grad():
            for each in training.net.parameters():
                each.clamp_(-0.2, 0.2)

    with logged() as lines:
        Training(driver, True).run(take=clipped).end()
    assert driver.rank or sum("changed the weights" in line for line in lines) == 1


@pytest.mark.parametrize("save_at", [4, 5, 6])
@pytest.mark.parametrize("optimizers", ["one", "two"])
def test_training_continues_to_the_bit(driver, save_at, optimizers):
    """Each rank's optimizers keep their own moments."""
    folder = FOLDER / f"one-line-{save_at}-{optimizers}"
    make = two_optimizers if optimizers == "two" else None
    first = Training(driver, True, optimizers=make).run(range(save_at))
    first.local.save(folder)
    driver.meet()
    want = first.run(range(save_at, STEPS)).end()
    second = Training(driver, True, optimizers=make)
    second.local.load(folder)
    got = second.run(range(save_at, STEPS)).end()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_state_inside_of_synchronized_is_that_of_the_rank(driver):
    training = Training(driver, True).run(range(4))
    before = training.local.state_dict()
    with training.local.synchronized(), training.local.synchronized():
        assert training.local.state_dict() == before
        found = [each.clone() for each in training.net.parameters()]
        assert all(torch.equal(*pair) for other in driver.gather(found) for pair in zip(other, found, strict=True))
    assert training.local.state_dict() == before
    own = copy.deepcopy(list(training.net.parameters()))
    with training.local.synchronized():
        training.local.load_state_dict(before)
    assert all(torch.equal(*pair) for pair in zip(training.net.parameters(), own, strict=True))
    training.local.close()


def test_training_inside_of_synchronized_is_refused(driver):
    """Its changes would be lost. An evaluation with gradients in evaluation mode is none."""
    training = Training(driver, True).run(range(4))
    loop = Training(driver, False).run(range(4))
    before = [each.clone() for each in training.net.parameters()]
    for owner, call in (
        (training, partial(training.take, 4)),
        (training, training.local.synchronize),
        (loop, partial(loop.take, 4)),
        (loop, loop.local.step),
        (loop, loop.local.synchronize),
    ):
        with pytest.raises(RuntimeError, match="end the context first"), owner.local.synchronized():
            call()
    with training.local.synchronized():
        training.net.eval()
        training.loss(4)
        training.net.train()
    assert all(torch.equal(*pair) for pair in zip(training.net.parameters(), before, strict=True))
    training.run(range(4, STEPS)).end()
    loop.local.close()


def test_copies_of_the_model_take_no_local_steps(driver):
    training = Training(driver, True)
    for other in (copy.deepcopy(training.net), pickle.loads(pickle.dumps(training.net)), copy.deepcopy(training.model)):
        other(torch.randn(4, 20)).sum().backward()
    assert training.local.steps == 0
    training.local.close()


def test_buffers_are_not_broadcast_in_every_step(driver):
    training = Training(driver, True)
    assert not training.model.broadcast_buffers
    training.run(range(2))
    assert len({tuple(each.tolist()) for each in driver.gather(training.net.norm.running_mean)}) == driver.world_size
    training.end()
    assert len({tuple(each.tolist()) for each in driver.gather(training.net.norm.running_mean)}) == 1


def test_ignored_parameters_stay_those_of_the_rank(driver):
    torch.manual_seed(driver.rank)
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["last.bias", "norm.running_var"])
    own = net.last.bias.detach().clone()
    model = DistributedDataParallel(net)
    with ddp.attach(model, local_steps=1) as local:
        local.synchronize()
        assert torch.equal(net.last.bias, own)
        assert all("last.bias" not in each.anchors for each in local.fragments)


@pytest.mark.parametrize("option", ["find_unused_parameters", "SyncBatchNorm"])
def test_options_that_communicate_in_every_step_are_named(driver, option):
    net = torch.nn.Linear(20, 3)
    if option == "find_unused_parameters":
        model = DistributedDataParallel(net, find_unused_parameters=True)
    else:
        model = DistributedDataParallel(torch.nn.Sequential(net))
        model.module.append(torch.nn.SyncBatchNorm(3, affine=False))  # DDP refuses it on the CPU
    with logged() as lines:
        ddp.attach(model, local_steps=2).close()
    assert driver.rank or any(option in line for line in lines)


def test_what_does_not_work_is_refused(driver):
    training = Training(driver, True, optimizers=lambda net: [torch.optim.LBFGS(net.parameters())])
    driver.must_raise(ValueError, ["LBFGS"], lambda: with_closure(training, 0))
    training.local.close()
    zero = lambda net: [ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)]  # noqa: E731
    training = Training(driver, True, optimizers=zero)
    driver.must_raise(ValueError, ["ZeroRedundancyOptimizer"], lambda: training.take(0))
    driver.must_raise(ValueError, ["already"], lambda: ddp.attach(training.model, local_steps=2))
    training.local.close()
    for wrong, words in (
        ({"local_steps": 0}, "0 must be 1 or more"),
        ({"local_steps": 2, "loss_scale": 2.0}, "loss_scale"),
    ):
        model = DistributedDataParallel(Net())
        driver.must_raise(ValueError, [words], lambda: ddp.attach(model, **wrong))  # noqa: B023


def test_join_is_refused(driver):
    training = Training(driver, True)
    with training.model.join():
        driver.must_raise(RuntimeError, ["join()"], lambda: training.loss(0))
    training.local.close()


def test_unfrozen_parameters_are_refused(driver):
    def make():
        net = Net()
        net.middle.requires_grad_(False)
        return net

    training = Training(driver, True, make=make)
    training.run(range(2))
    training.net.middle.requires_grad_(True)
    driver.must_raise(RuntimeError, ["middle.weight", "attach again"], lambda: training.loss(2))
    training.local.close()


def test_ranks_with_different_settings_are_named(driver):
    settings = {"outer": {"lr": 0.5 + driver.rank}}
    training = Training(driver, True, **settings)
    driver.must_raise(PeerError, ["local_steps"], training.run)
    training.local.close()


def test_the_summary_of_auto_estimates_local_steps(driver):
    model = DistributedDataParallel(Net())
    with ddp.attach(model, min_elements=10) as compressor:
        compressor.rank_state.fallback = Fallback(True, Verdict.COMPRESS, (0.5, 2.0))
        for _ in range(6):
            model(torch.randn(16, 20)).sum().backward()
        computing = compressor.ledger.mean_step().computing
        local = 1e3 * (computing + (2.0 - computing) / 30)
        assert f"local_steps = 30: about {local:.1f} ms" in compressor.summary()


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "both"])
def test_the_outer_optimizer_suits_the_inner_one(driver, kind):
    """By default, exchanges under Adam average the parameters; a given outer optimizer is kept."""
    makers = {
        "SGD": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05)],
        "AdamW": lambda net: [torch.optim.AdamW(net.parameters(), lr=0.01)],
        "both": two_optimizers,
    }
    plain = {"method": "none", "optimizers": makers[kind]}
    auto, averages, diloco = (
        Training(driver, True, **plain, **outer).run().end() for outer in ({}, {"outer": None}, {"outer": OUTER})
    )
    want, other = (diloco, averages) if kind == "SGD" else (averages, diloco)
    assert all(torch.equal(auto[name], tensor) for name, tensor in want.items())
    assert any(not torch.equal(auto[name], tensor) for name, tensor in other.items())


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(local_steps.time, "perf_counter", lambda: self.now)


@pytest.mark.also("three ranks")
@pytest.mark.parametrize(
    "exchange, outer, every", [(0.05, None, 10), (0.17, None, 17), (5.0, None, 30), (0.05, "auto", 30)]
)
def test_steps_between_exchanges_are_chosen_by_their_time(driver, monkeypatch, exchange, outer, every):
    """Exchanges take a tenth of the time of the steps, within bounds. A resumed training goes on with the number."""
    settings = {"make": lambda: torch.nn.Linear(20, 3), "every": "auto", "outer": outer}
    clock = Clock(monkeypatch)
    exchanged = []
    whole = local_steps.ParameterExchange._exchange

    def slow(local, fragment, compressed):
        whole(local, fragment, compressed)
        # Kernels are compiled in the first exchanges, and rank 1 waits
        clock.now += 10.0 if local.steps < 30 else exchange + (driver.rank == 1)
        exchanged.append(local.steps)

    monkeypatch.setattr(local_steps.ParameterExchange, "_exchange", slow)

    def take(training, step):
        clock.now += 0.1
        training.take(step)

    training = Training(driver, True, **settings)
    training.run(range(25), take)
    training.local.save(FOLDER / f"auto-{exchange}-{outer}")
    driver.meet()
    del exchanged[:]
    resumed = Training(driver, True, **settings)
    resumed.local.load(FOLDER / f"auto-{exchange}-{outer}")
    resumed.run(range(25, 80), take)
    assert resumed.local.every == every
    assert exchanged == [30, *(step for step in range(31, 80) if step % every == 0)]
    again = Training(driver, True, **settings)
    again.local.load_state_dict(resumed.local.state_dict())
    assert again.local.every == every
    for each in (training, resumed, again):
        each.local.close()
