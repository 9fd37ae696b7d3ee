"""Tests of local steps, over torch.distributed and over Horovod."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from hvdcompress.engine.agreement import PeerError
from hvdcompress.local_steps import OUTER, LocalSteps
from hvdcompress.methods.topk import TopK
from hvdcompress.plan import plan_of
from tests.ranks.checks import FOLDER, logged

if os.environ.get("DRIVER") == "torch":
    import horovod.torch as hvd

    from tests.ranks.drivers.torch import PAIR

pytestmark = pytest.mark.drivers("torch", "ddp")

SMALL = {"min_elements": 10}
SETTINGS = {"method": "topk", "density": 0.1, **SMALL}


class Unregistered(TopK):
    """A method under development."""


class Training:
    """A net and its inner optimizer. By default, each rank has its own weights: LocalSteps broadcasts rank 0's."""

    def __init__(self, driver, seed=None, lr=0.05, momentum=0.9):
        self.rank = driver.rank
        torch.manual_seed(self.rank if seed is None else seed)
        layers = (torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)

    def local_steps(self, every, **settings):
        return LocalSteps(self.model, self.optimizer, every=every, **settings)

    def run(self, steps, after):
        """Train, and call ``after`` with the number of each step at its end."""
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            inputs, targets = torch.randn(16, 20, generator=generator), torch.randint(0, 3, (16,), generator=generator)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
            after(step)


def trained(driver, every, steps, folder=None, save_at=None, **settings):
    """Load from ``folder``, unless the steps begin at 0; train, and save there after step ``save_at``.

    Returns:
        the state of the model, and the LocalSteps.
    """
    training = Training(driver)
    with training.local_steps(every, **settings) as local:
        if steps.start:
            local.load(folder)

        def after(step):
            local.step()
            if step == save_at:
                local.save(folder)

        training.run(steps, after)
    return training.model.state_dict(), local


def assert_equal(got, want, tolerance=0.0):
    """Check that ``got`` has the tensors of ``want``."""
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023


def assert_same_on_all_ranks(driver, state):
    for other in driver.gather({name: tensor.clone() for name, tensor in state.items()}):
        assert_equal(other, state)


def diloco(driver, every, steps):
    """Train with DiLoCo, written as in its paper."""
    training = Training(driver, seed=0)
    parameters = list(training.model.parameters())
    anchors = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
    outer = torch.optim.SGD(anchors, **OUTER)
    buffers = {each: each.clone() for each in training.model.buffers() if each.is_floating_point()}

    def mean(tensor):
        return sum(driver.gather(tensor)) / driver.world_size

    @torch.no_grad()
    def exchange(step):
        if (step + 1) % every:
            return
        for parameter, anchor in zip(parameters, anchors, strict=True):
            anchor.grad = mean(anchor - parameter)
        outer.step()
        for parameter, anchor in zip(parameters, anchors, strict=True):
            parameter.copy_(anchor)
        for buffer, before in buffers.items():
            before -= mean(before - buffer)
            buffer.copy_(before)

    training.run(range(steps), exchange)
    return training.model.state_dict()


def test_local_steps_equal_diloco(driver):
    got, local = trained(driver, 3, range(9), method="none")
    assert_equal(got, diloco(driver, 3, 9), 0.0 if driver.world_size == 2 else 1e-5)  # more are added in another order
    assert_same_on_all_ranks(driver, got)
    assert local.compressors[0].ledger.steps == 3


def test_every_step_of_the_warm_up_averages_parameters(driver):
    """Uncompressed, and without the outer optimizer."""
    got, _ = trained(driver, 50, range(4), **SETTINGS, warmup=4)
    assert_equal(got, trained(driver, 1, range(4), method="none", outer=None)[0], 1e-5)


def test_outer_momentum_is_kept_unless_asked_otherwise(driver):
    """Also for rules with methods of their own, for plans, and for methods that are not registered."""
    kept, _ = trained(driver, 2, range(4), **SETTINGS)
    other = {"method": "none", "rules": [{"match": {"min_size": 0}, "method": "topk", "density": 0.1}]}
    plan = plan_of("topk", density=0.1, min_elements=10, optimizer_momentum="cancel")
    unregistered = Unregistered(density=0.1)
    for settings in ({**SETTINGS, "optimizer_momentum": "keep"}, {"method": plan}, {"method": {**other, **SMALL}}):
        assert_equal(trained(driver, 2, range(4), **settings)[0], kept)
    assert_equal(trained(driver, 2, range(4), method=unregistered, **SMALL)[0], kept)
    cancelled, _ = trained(driver, 2, range(4), **SETTINGS, optimizer_momentum="cancel")
    assert any(not torch.equal(cancelled[name], kept[name]) for name in kept)


#: Parameters of two fragments before each step, by (delay, mixing), of torchft at commit 7eb7087 (BSD licence):
#: test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_{0,1,3,4}.json
TORCHFT = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
}


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_parameters_are_those_of_torchft(driver, delay, mixing):
    """Two fragments, every 6 steps, outer rate 2 without momentum, inner rate 1, and gradients of 2.

    With a delay, torchft begins an exchange so much earlier, and applies it in the step in which we begin. So its step
    t is our step t + delay, and our first ``delay`` steps have gradients of 0 here.
    """
    model = torch.nn.ParameterList([torch.ones(1, 1), torch.ones(1, 1)])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = {"lr": 2.0, "momentum": 0.0}
    found = []
    settings = {"every": 6, "fragments": 2, "delay": delay, "mixing": mixing}
    with LocalSteps(model, sgd, method="none", outer=outer, **settings) as local:
        for step in range(16 + delay):
            found.append([each.item() for each in model])
            for each in model:
                each.grad = torch.full_like(each, 2.0 if step >= delay else 0.0)
            sgd.step()
            local.step()
    assert [list(each) for each in zip(*found[delay:], strict=True)] == list(map(list, TORCHFT[delay, mixing]))


@pytest.mark.parametrize("warmup,momentum,steps", [(0, 0.9, 9), (5, 0.0, 14), (6, 0.9, 7)])
def test_local_steps_equal_pytorchs_post_local_sgd(driver, warmup, momentum, steps):
    """PyTorch also averages after the first step without warm-up, so its warm-up is one step shorter.

    In the warm-up, PyTorch averages gradients, and LocalSteps averages parameters. So momentum, which is per rank here
    and equal on all ranks there, must be zero if steps within the warm-up are to be equal.
    """
    if driver.name == "torch":
        pytest.skip("PyTorch's local SGD needs torch.distributed")
    ours, theirs = Training(driver, momentum=momentum), Training(driver, seed=0, momentum=momentum)
    with ours.local_steps(4, method="none", outer=None, warmup=warmup + 1) as local:
        ours.run(range(steps), lambda step: local.step())
    want = dict(theirs.model.named_parameters())
    theirs.model = DistributedDataParallel(theirs.model)
    state = PostLocalSGDState(None, None, warmup, post_local_gradient_allreduce=False)
    theirs.model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(4, warmup_steps=warmup)
    theirs.optimizer = PostLocalSGDOptimizer(theirs.optimizer, averager)
    theirs.run(range(steps), lambda step: None)
    assert_equal(dict(ours.model.named_parameters()), want, 1e-5)


@pytest.mark.parametrize(
    "every,saved,end,more", [(4, 9, 14, {}), (6, 12, 20, {"fragments": 2, "delay": 2, "mixing": 0.5})]
)
def test_training_continues_from_saved_state_to_the_bit(driver, every, saved, end, more):
    """Also with exchanges in flight."""
    folder, settings = FOLDER / f"local-{every}", {**SETTINGS, "warmup": 3, **more}
    want, _ = trained(driver, every, range(end), folder, save_at=saved, **settings)
    driver.meet()
    got, _ = trained(driver, every, range(saved + 1, end), folder, **settings)
    assert_equal(got, want)


def test_whatever_is_saved_can_be_loaded(driver):
    """A schedule is often a NumPy array. An object that would not be loaded is refused at saving, by its key."""
    training, folder = Training(driver), FOLDER / "numpy"
    with training.local_steps(2, method="none", outer={"lr": np.float64(0.7), "momentum": np.float32(0.9)}) as local:
        group = training.optimizer.param_groups[0]
        group["lr"], group["schedule"] = np.linspace(0.1, 0.01, 4)[1], [np.float32(1.0), (np.int64(2), True)]
        training.run(range(3), lambda step: local.step())
        local.save(folder)
        driver.meet()
        local.load(folder)
        assert group["lr"] == 0.07 and group["schedule"] == [1.0, (2, True)]
        training.optimizer.param_groups[0]["why"] = Training
        driver.must_raise(TypeError, ["optimizer['param_groups'][0]['why']", "Training"], lambda: local.save(folder))


@pytest.mark.parametrize("change", ["load_state_dict", "copy_", "on rank 1"])
def test_exchange_after_a_change_of_the_weights_averages_them(driver, change):
    """Without the outer optimizer, to which loaded weights would be progress. Afterwards it is used again."""
    training, every = Training(driver), 4
    weights = list(training.model.parameters())
    before = copy.deepcopy(training.model.state_dict())
    with training.local_steps(every, **SETTINGS) as local:
        for number in range(2):  # after some steps, and between two exchanges
            training.run(range(every * number + number), lambda step: local.step())
            if change == "load_state_dict":
                training.model.load_state_dict(before)
            elif change != "on rank 1" or driver.rank == 1:
                with torch.no_grad():
                    for each in weights:
                        each.copy_(each + 3.0)
            own = None
            for _ in range(2 * every):
                training.run(range(1), lambda step: None)
                own = torch.nn.utils.parameters_to_vector(weights)
                if local.step():
                    break
            mean = sum(driver.gather(own)) / driver.world_size
            torch.testing.assert_close(torch.nn.utils.parameters_to_vector(weights), mean, rtol=1e-5, atol=1e-6)
            assert_same_on_all_ranks(driver, training.model.state_dict())


def test_embedding_that_renormalizes_its_weight_is_trained_as_others(driver):
    """It does so in place, in the forward pass."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(30, 20, max_norm=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(model, sgd, every=2, method="topk", density=0.1, min_elements=10) as local, logged() as lines:
        for _ in range(4):
            sgd.zero_grad()
            model(torch.randint(0, 30, (16,))).sum().backward()
            sgd.step()
            local.step()
    assert local.compressors[0].ledger.compression_ratio() > 4
    assert not any("changed the weights" in each for each in lines)


def test_weights_that_are_swapped_and_restored_change_nothing(driver):
    """As for an evaluation of averaged weights, after ``synchronize()``."""
    results = []
    for swaps in (True, False):
        training = Training(driver)
        weights = list(training.model.parameters())
        with training.local_steps(3, **SETTINGS) as local, torch.no_grad():
            for step in range(8):
                with torch.enable_grad():
                    training.run(range(step, step + 1), lambda step: local.step())
                if step == 4:
                    local.synchronize()
                    kept = [each.clone() for each in weights]
                    for each, own in zip(weights, kept, strict=True) if swaps else ():
                        each.zero_()
                        each.copy_(own)
            results.append(training.model.state_dict())
    assert_equal(*results)


def test_checkpoint_is_written_in_the_warm_up(driver):
    settings = {**SETTINGS, "warmup": 20, "checkpoint": FOLDER / "warm-up"}
    want, _ = trained(driver, 4, range(9), **settings)
    driver.meet()
    assert trained(driver, 4, range(0), **settings)[1].steps == 8
    got, _ = trained(driver, 4, range(8, 9), settings["checkpoint"], **settings)
    assert_equal(got, want)


def test_synchronize_makes_ranks_equal(driver):
    """Before the first step, and with an exchange in flight. Another call changes nothing."""
    training = Training(driver)
    with training.local_steps(4, fragments=2, delay=1, mixing=0.5, **SETTINGS) as local:
        local.synchronize()
        training.run(range(7), lambda step: local.step())
        local.synchronize()
        once = {name: each.clone() for name, each in training.model.state_dict().items()}
        local.synchronize()
        assert_equal(training.model.state_dict(), once)
        assert_same_on_all_ranks(driver, once)


def test_nan_returns_all_ranks_to_the_last_exchange(driver):
    training = Training(driver, lr=1e-2, momentum=0.0)
    parameters = dict(training.model.named_parameters())
    with training.local_steps(2, **SETTINGS) as local:
        training.run(range(3), lambda step: local.step())
        anchor = {name: each.detach().clone() for name, each in local.fragments[0].anchors.items()}
        parameters["0.weight"].data[0, 0] = float("nan") if driver.rank == driver.world_size - 1 else 0.0
        with logged() as lines:
            training.run(range(3, 4), lambda step: local.step())
        assert_equal(parameters, anchor)
        assert driver.rank or any("go on from the last exchange" in line for line in lines)
        training.run(range(4, 6), lambda step: local.step())
        assert_same_on_all_ranks(driver, parameters)


class UnusualParameters(torch.nn.Module):
    """An embedding with sparse gradients, tied weights, a parameter without a gradient, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 20, sparse=True)
        self.body, self.head = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        self.head.weight = self.body.weight
        self.unused = torch.nn.Parameter(torch.randn(7))
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, inputs):
        return self.head(self.body(self.embedding(inputs))).square().mean()


def test_sparse_tied_unused_and_frozen_parameters(driver):
    torch.manual_seed(driver.rank)
    model = UnusualParameters()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, sgd, every=2, **SETTINGS)
    unchanged = {name: getattr(model, name).detach().clone() for name in ("unused", "frozen")}
    for _ in range(4):
        sgd.zero_grad()
        model(torch.randint(0, 30, (16,))).backward()
        sgd.step()
        local.step()
    assert model.head.weight is model.body.weight
    assert_same_on_all_ranks(driver, model.state_dict())
    assert_equal(model.state_dict(), unchanged)
    model.frozen.requires_grad_()
    local.step()
    driver.must_raise(ValueError, ["'frozen'", "make LocalSteps again"], local.step)
    local.close()
    local.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_parameters_of_any_dtype_are_averaged(driver, dtype):
    dtype = getattr(torch, dtype)
    if dtype.is_complex and driver.name == "torch":
        pytest.skip("Horovod has no complex numbers")
    model = torch.nn.ParameterDict({"w": torch.full((40, 30), driver.rank + 2.0, dtype=dtype)})
    step = 1j if dtype.is_complex else 1.0
    with LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, method="none", outer=None) as local:
        model["w"].data += step * driver.rank
        assert local.step()
    want = torch.full((40, 30), 2.0 + step * (driver.world_size - 1) / 2, dtype=dtype)  # all start from 2, of rank 0
    assert_equal({"w": model["w"].detach()}, {"w": want}, 1e-2)
    assert_same_on_all_ranks(driver, model.state_dict())


class Buffered(torch.nn.Module):
    """A mask with -inf, and a buffer that each forward pass replaces. Neither is saved."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.layer = torch.nn.Linear(20, 3)
        self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=False)
        self.register_buffer("seen", torch.full((2,), float(rank)), persistent=False)

    def forward(self, inputs):
        self.seen = self.seen + self.rank
        return self.layer(inputs)


def test_buffers_are_averaged_unless_they_are_equal(driver):
    """A NaN in a buffer returns all ranks to the last exchange."""
    training = Training(driver)
    model = training.model = Buffered(driver.rank)
    training.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.nn.ModuleDict({"_orig_mod": model})  # as torch.compile names it
    with LocalSteps(compiled, training.optimizer, every=2, **SETTINGS) as local:
        training.run(range(2), lambda step: local.step())
        average = [driver.world_size - 1.0] * 2
        assert model.seen.tolist() == average and model.mask.tolist() == [-torch.inf] * 3
        training.run(range(2, 3), lambda step: local.step())
        if driver.rank == driver.world_size - 1:
            model.seen = model.seen * float("nan")
        training.run(range(3, 4), lambda step: local.step())
        assert model.seen.tolist() == average


def test_ranks_join_and_leave_at_the_last_exchange(driver):
    """Fewer ranks write a checkpoint; all ranks continue from it; then fewer again."""
    if driver.name == "torch" and driver.world_size < 3:
        pytest.skip("Horovod's process set needs 3 ranks")
    fewer = PAIR if driver.name == "torch" else dist.new_group(list(range(1, driver.world_size)))
    included = PAIR.included() if driver.name == "torch" else driver.rank > 0
    settings = {**SETTINGS, "every": 4, "checkpoint": FOLDER / "join-and-leave"}

    def train_until(end, group, parameters):
        training = Training(driver)
        with training.local_steps(process_group=group, **settings) as local:
            assert_equal(dict(training.model.named_parameters()), parameters)
            training.run(range(local.steps, end), lambda step: local.step())
        assert local.steps == end
        return {name: each.detach().clone() for name, each in local.fragments[0].anchors.items()}

    first = driver.gather(train_until(8, fewer, {}) if included else {})[-1]
    second = train_until(14, None, first)  # the last exchange is in step 12
    if included:
        train_until(16, fewer, second)


@pytest.mark.parametrize(
    "wrong,words",
    [
        ({"every": 0}, ["every = 0"]),
        ({"every": "often"}, ["every = 'often'", '"auto"']),
        ({"every": "auto", "delay": 1}, ["delay"]),
        ({"fragments": 5}, ["fragments = 5"]),
        ({"delay": 4}, ["delay = 4"]),
        ({"mixing": 1.0}, ["mixing = 1.0"]),
        ({"driver": "mpi"}, ["driver = 'mpi'"]),
        ({"method": "topkk"}, ["topkk", "topk"]),
    ],
)
def test_wrong_arguments_are_refused(driver, wrong, words):
    driver.must_raise(ValueError, words, lambda: Training(driver).local_steps(**{"every": 4, **wrong}))


def test_wrong_models_and_optimizers_are_refused(driver):
    training = Training(driver)
    model, optimizer = training.model, training.optimizer
    empty = torch.nn.Sequential()
    driver.must_raise(ValueError, ["no parameter"], lambda: LocalSteps(empty, optimizer, every=4))
    if driver.name == "torch":
        words, optimizer = "plain optimizer", hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        words, model = "without it", DistributedDataParallel(model)
    driver.must_raise(ValueError, [words], lambda: LocalSteps(model, optimizer, every=4))


def test_folders_of_others_are_not_removed(driver):
    """A Compressor's checkpoints may be in folders of the same names, as in the guide to checkpoints."""
    folder = FOLDER / "shared"
    others = [folder / name for name in ("step-1", "step-1000", "step-final")]
    for other in others:
        (other / "mine").mkdir(parents=True, exist_ok=True)
    driver.meet()
    with Training(driver).local_steps(1, **SETTINGS, checkpoint=folder) as local:
        for _ in range(3):
            local.step()
    driver.meet()
    with Training(driver).local_steps(1, **SETTINGS, checkpoint=folder) as local:
        assert local.steps == 3
    assert all((other / "mine").is_dir() for other in others)


def test_load_without_a_checkpoint_is_an_error(driver):
    with Training(driver).local_steps(4) as local:
        words = ["no saved state"]
        driver.must_raise(FileNotFoundError, words, lambda: local.load(FOLDER / "nothing"))


def test_ranks_with_different_numbers_of_local_steps_are_named(driver):
    with Training(driver).local_steps(2 if driver.rank else 3, **SETTINGS) as local:
        driver.must_raise(
            PeerError, ["local_steps", "'every': 3", "'every': 2"], lambda: [local.step() for _ in range(3)]
        )
