"""Tests of the DDP driver alone: options of DDP, kinds of parameters, names, steps that fail, process groups, nodes."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import os
import pickle
import time
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.engine.fallback import SPREAD, Verdict
from hvdcompress.local_steps import LocalSteps
from hvdcompress.loopback import Loopback
from tests.ranks.checks import (
    EXACT,
    FOLDER,
    assert_close,
    assert_same_on_all_ranks,
    assert_same_state,
    logged,
    state_of,
    summed,
)
from tests.ranks.ddp_model import SHAPES, assert_equals_loopback, backward, wrapped
from tests.ranks.drivers.ddp import DdpDriver, DdpHandle, Net
from tests.ranks.promises.test_together import check_all_features
from tests.ranks.torch_nets import Nested, TwoLayers, gradients_of_nested
from tests.unit.house.pages import run_blocks

pytestmark = pytest.mark.drivers("ddp")


def test_blocks_of_the_guides(driver):
    """A GAN's step does not change the state of its discriminator's Compressor."""
    model = DistributedDataParallel(Net(SHAPES))
    names = {"ddp": ddp, "model": model}
    run_blocks("docs/guides/nodes.md", names)
    backward(model, driver.gradients(0, SHAPES))
    nets = {name: torch.nn.Linear(64, 64) for name in ("generator", "discriminator")}
    names |= {f"{name}_optimizer": torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    discriminator = DistributedDataParallel(nets["discriminator"])
    names |= {"generator": DistributedDataParallel(nets["generator"]), "discriminator": discriminator}
    names |= {"discriminator_compressor": ddp.attach(discriminator, "topk", density=0.05)}
    names |= {"noise": torch.ones(4, 64), "real_labels": torch.ones(4, 64), "loss": torch.nn.functional.mse_loss}
    run_blocks("docs/guides/ddp.md", names)
    assert not names["discriminator_compressor"].residual("weight").any()
    run_blocks("docs/guides/speed.md", names)
    for name in ("compressor", "discriminator_compressor"):
        names[name].close()


# -- options of DDP, kinds of parameters, names ----------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.004, "find_unused_parameters": True},
        {"bucket_cap_mb": 25, "static_graph": True},
        {"bucket_cap_mb": 0.004, "batched_grad_copy": True},
        {"bucket_cap_mb": 0.004, "lazy_bucket_allocation": True},
        {"bucket_cap_mb": 0.004, "lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    ],
)
def test_buckets_and_options_of_ddp_do_not_change_results(driver, options):
    """With one parameter, some or all parameters in a bucket. DDP forms the buckets again at the second step."""
    if missing := options.keys() - inspect.signature(DistributedDataParallel).parameters.keys():
        pytest.skip(f"PyTorch {torch.__version__} has no {', '.join(missing)}")
    assert_equals_loopback(driver, DistributedDataParallel(Net(SHAPES), **options), "scalecom", density=0.02)


def test_the_program_may_finalize_the_backward_pass(driver):
    if not hasattr(DistributedDataParallel, "finalize_backward"):
        pytest.skip(f"PyTorch {torch.__version__} has no finalize_backward(): since 2.15")
    found = []
    for manual in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 40))
        model = DistributedDataParallel(net, bucket_cap_mb=0.004)
        model.require_manual_backward_finalization = manual
        with ddp.attach(model, "topk", density=0.05):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((3, 40), 1.0 + step + driver.rank)).square().mean().backward()
                if manual:
                    model.finalize_backward()
                optimizer.step()
        found.append({name: each.detach().numpy() for name, each in model.module.named_parameters()})
    assert_same_on_all_ranks(found[1], driver.gather, "finalized by the program")
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)


@pytest.mark.slow  # each compiles for seconds
@pytest.mark.parametrize("compiled", ["model", "DDP", "step", "DDP, step"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_compiled_models_and_optimizers_train_as_eager_ones(driver, compiled, optimizer):
    def train(compiled):
        torch.manual_seed(0)
        torch._dynamo.reset()
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
        net = torch.nn.Sequential(*layers)
        options = {"static_graph": True, "gradient_as_bucket_view": True} if "DDP" in compiled else {}
        # torch.compile refuses buckets smaller than DDP's first one, of 1 MB
        model = DistributedDataParallel(torch.compile(net) if "model" in compiled else net, bucket_cap_mb=1, **options)
        with ddp.attach(model, "topk", density=0.01):
            call = torch.compile(model) if "DDP" in compiled else model
            if optimizer == "SGD":
                made = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            else:  # with a smaller eps, rounding decides on whole steps where a gradient is near zero
                made = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
            step = torch.compile(made.step) if "step" in compiled else made.step
            random = torch.Generator().manual_seed(driver.rank)
            for _ in range(6):
                made.zero_grad()
                call(torch.randn(8, 256, generator=random)).square().mean().backward()
                step()
        return {name: each.detach().numpy() for name, each in net.named_parameters()}

    eager, found = train(""), train(compiled)
    assert_same_on_all_ranks(found, driver.gather, compiled)
    for name, array in eager.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("settings", [{}, {"bucket_elements": 0}])
def test_unused_parameters_keep_their_residuals(driver, settings):
    """Parameter "c" is used on no rank in step 2. Parameter "a" is used on rank 0 alone in step 3: it takes part."""
    model = DistributedDataParallel(Net(SHAPES), find_unused_parameters=True)
    compressor = ddp.attach(model, "topk", density=0.05, min_elements=1, **settings)
    for step, unused in enumerate(("", "", "c", "a" if driver.rank else "")):
        before = {name: compressor.residual(name) for name in "abc"}
        gradients = {name: array for name, array in driver.gradients(step, SHAPES).items() if name != unused}
        got = backward(model, gradients)
        changed = "".join(name for name in "abc" if not torch.equal(before[name], compressor.residual(name)))
        assert changed == ("ab" if step == 2 else "abc"), step
        assert ("c" in got) == (step != 2)
    compressor.close()


def test_nan_on_one_rank_undoes_the_step_if_ddp_looks_for_unused_parameters(driver):
    model = DistributedDataParallel(Net(SHAPES), find_unused_parameters=True)
    compressor = ddp.attach(model, "topk", density=0.05)
    gradients = driver.gradients(0, SHAPES)
    gradients["a"][0, 0] = np.nan if driver.rank == 1 else 0.0
    assert all(np.isnan(array).all() for array in backward(model, gradients).values())
    assert compressor.ledger.steps == 0 and not compressor.residual("a").any()
    compressor.close()


def test_residuals_of_unused_parameters_wait_when_compression_is_given_up(driver, monkeypatch):
    """For the next gradient, for so many steps. The buckets hold several parameters."""
    monkeypatch.setattr("hvdcompress.engine.state.PATIENCE", SPREAD + 20)
    model = DistributedDataParallel(Net(SHAPES), find_unused_parameters=True)
    compressor = ddp.attach(model, "topk", density=0.05, min_elements=1, fallback=True)
    fallback = compressor.rank_state.fallback
    fallback.note = lambda began, ended: None
    total, exact = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    with logged() as lines:
        for step in range(30 + SPREAD):
            if step == 8:
                fallback.verdict = Verdict.FLUSH
            unused = {"a"} if 8 <= step < 12 + SPREAD else set()  # used again in time
            unused |= {"c"} if step >= 8 else set()
            everyone = [{n: g for n, g in one.items() if n not in unused} for one in driver.everyone(step, SHAPES)]
            got = backward(model, everyone[driver.rank])
            for name in everyone[0]:
                total[name] += got[name]
                exact[name] += sum(one[name] for one in everyone) / driver.world_size
    assert fallback.verdict is Verdict.DENSE and not any(compressor.residual(name).any() for name in SHAPES)
    for name in SHAPES.keys() - {"c"}:
        np.testing.assert_allclose(total[name], exact[name], rtol=1e-4, atol=1e-4, err_msg=name)
    assert f"rank {driver.rank} drops the residuals of 'c':" in lines[-1]
    compressor.close()


def test_several_dtypes_and_frozen_parameters(driver):
    net = Net(SHAPES)
    net.a.data, net.c.data = net.a.data.half(), net.c.data.double()
    net.frozen = torch.nn.Parameter(torch.ones(9, 9), requires_grad=False)
    dtypes, half = {"a": np.float16, "c": np.float64}, {"a": (2e-3, 1e-3)}  # the loopback adds in float16
    model = DistributedDataParallel(net)
    compressor = assert_equals_loopback(driver, model, dtypes=dtypes, tolerances=half, density=0.05)
    assert sorted(compressor.parameters) == sorted(SHAPES)


def test_channels_last_and_transposed_parameters(driver):
    shapes = {"w": (16, 12, 3, 3), "t": (40, 50)}
    net = Net(shapes)
    net.w.data = net.w.data.to(memory_format=torch.channels_last)
    net.t.data = torch.zeros(50, 40).T
    assert_equals_loopback(driver, DistributedDataParallel(net), "powersgd", shapes, min_elements=1)


class Complex(torch.nn.Module):
    """Complex parameters and a real one. A backward pass makes the given gradients."""

    def __init__(self, dtype):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(40, 41, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(40, 43))
        channels_last = torch.zeros(8, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last)
        self.c = torch.nn.Parameter(channels_last)

    def forward(self, gradients):
        real = {name: torch.view_as_real(p) if p.is_complex() else p for name, p in self.named_parameters()}
        return sum((real[name] * torch.from_numpy(gradient)).sum() for name, gradient in gradients.items())


@pytest.mark.parametrize(
    "dtype,real,cap,method",
    [
        ("complex64", "float32", 25, "topk"),
        ("complex128", "float64", 0.001, "none"),
        ("complex64", "float32", 0.001, "powersgd"),
    ],
)
def test_complex_parameters_are_pairs_of_real_numbers(driver, dtype, real, cap, method):
    """In one DDP bucket and in several."""
    shapes = {"a": (40, 41, 2), "b": (40, 43), "c": (8, 3, 5, 5, 2)}
    tolerances = dict.fromkeys(shapes, (1e-3, 1e-3)) if method == "powersgd" and driver.world_size > 2 else {}
    model = DistributedDataParallel(Complex(getattr(torch, dtype)), bucket_cap_mb=cap)
    compressor = assert_equals_loopback(driver, model, method, shapes, {"a": real, "c": real}, tolerances)
    assert compressor.residual("a").shape == (40, 41, 2)


def test_wrappers_do_not_change_names(driver):
    """``torch.compile`` adds to names. DDP may be inside other modules, as in Fabric."""
    net = Net(SHAPES)
    compiled = torch.nn.ModuleDict({"_orig_mod": net})
    compiled.forward = net.forward
    model = DistributedDataParallel(compiled)
    rules = [{"match": {"name": "a"}, "method": "none"}]
    compressor = ddp.attach(torch.nn.ModuleDict({"module": model}), "topk", density=0.05, rules=rules)
    assert list(compressor.parameters) == list(SHAPES)
    backward(model, driver.gradients(0, SHAPES))
    assert not compressor.residual("a").any() and compressor.residual("b").any()
    assert compressor.ledger.steps == 1 and "topk" in compressor.describe()


def test_rules_that_match_no_parameter_are_logged_by_attach(driver):
    """Also a rule whose parameters an earlier rule has."""
    matches = [{"name": "a*"}, {"name": "A*", "ndim": 2}, {"name": "a"}]
    rules = [{"match": match, "method": "none"} for match in matches]
    with logged() as lines:
        ddp.attach(DistributedDataParallel(Net(SHAPES)), "topk", rules=rules).close()
    found = [line for line in lines if "applies to no tensor" in line]
    words = [] if driver.rank else ["match {name: A*, ndim: 2}", "match {name: a}"]
    assert len(found) == len(words) and all(w in line for w, line in zip(words, found, strict=True)), lines


def test_copies_of_a_model_are_not_compressed(driver):
    """DDP averages the gradients of copies. The steps of the model itself are as without copies."""
    exact, (alone, _) = Loopback("none", world_size=driver.world_size), wrapped(Net(SHAPES))
    models = [wrapped(Net(SHAPES), by_hook)[0] for by_hook in (False, True)]
    for step in range(2):
        mine, everyone = driver.gradients(step, SHAPES), driver.everyone(step, SHAPES)
        want, mean = backward(alone, mine), exact.allreduce(everyone)[driver.rank]
        for model, original in zip(models, (models[0], models[1].module), strict=True):  # DDP cannot copy such a hook
            assert_close(backward(model, mine), want, EXACT, f"step {step}")
            copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
            for copied in (*copies, torch.optim.swa_utils.AveragedModel(original).module):
                other = copied if isinstance(copied, DistributedDataParallel) else DistributedDataParallel(copied)
                assert_close(backward(other, mine), mean, summed(driver.world_size), f"copy at step {step}")
    ddp.attach(copy.deepcopy(models[0]), "topk").close()


# -- backward passes inside of backward passes -----------------------------------------------------


@pytest.mark.parametrize("kind", ["checkpoint", "function"])
@pytest.mark.parametrize("levels", ["0011", "1100", "1111", "0110", "1001", "0120", "2112"])
def test_inner_backward_passes_do_not_end_the_step(driver, kind, levels):
    """The first or the last gradients are computed in an inner pass. Each layer is in DDP buckets of its own."""

    def compress(net):
        model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
        ddp.attach(model, "topk", density=0.05)
        return model, lambda: [parameter.grad for parameter in net.parameters()]

    found, expected = (gradients_of_nested(driver.rank, kind, each, compress) for each in (levels, "0000"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("levels", ["1000", "1011", "2110"])
def test_error_in_an_inner_backward_pass_is_raised_in_its_step(driver, levels):
    """On the other ranks, too, although they would go on."""
    model = DistributedDataParallel(Nested("checkpoint", levels), bucket_cap_mb=1e-5)
    compressor = ddp.attach(model, "topk", density=0.05)
    x, fails = torch.ones(3, 40, requires_grad=True), driver.rank == 1
    model(x).sum().backward()
    loss = model(x).sum()
    model.module.error = MemoryError("made by the test") if fails else None
    words = "made by the test" if fails else "rank 1: a backward pass ended before"
    with pytest.raises(MemoryError if fails else ddp.PeerError, match=words):
        loss.backward()
    assert compressor.ledger.steps == 1
    compressor.close()


# -- steps that fail, are discarded or paused ------------------------------------------------------


def test_error_in_the_middle_of_a_backward_pass_is_an_error_on_all_ranks(driver):
    """The other ranks wait for gradients of rank 1. They are told, though rank 1 does nothing more."""
    model = DistributedDataParallel(TwoLayers(), bucket_cap_mb=1e-5)
    compressor = ddp.attach(model, "topk", density=0.05)
    x, fails = torch.ones(3, 40), driver.rank == 1
    model(x).backward()
    loss, began = model(x, MemoryError("made by the test") if fails else None), time.monotonic()
    words = "made by the test" if fails else "rank 1: a backward pass ended before"
    with pytest.raises(MemoryError if fails else ddp.PeerError, match=words):
        loss.backward()
    if fails:
        with pytest.raises(RuntimeError, match="Expected to have finished"):  # DDP itself does not continue
            model(x)
    assert time.monotonic() - began < 10
    assert compressor.ledger.steps == 1


def test_losses_with_backward_passes_of_their_own_are_refused(driver):
    """The first pass ends without all buckets, which aborts the step. The bucket of the second pass finds no step."""
    model = DistributedDataParallel(Net(SHAPES), bucket_cap_mb=1e-5)
    compressor = ddp.attach(model, "topk", density=0.05)
    gradients = driver.gradients(0, SHAPES)
    backward(model, gradients)  # DDP forms its buckets
    losses = [model.module({name: gradients[name]}) for name in reversed(gradients)]
    model(gradients)
    with pytest.raises((RuntimeError, ddp.PeerError), match="a backward pass ended before"):
        for loss in losses:
            loss.backward()
    compressor.close()


def test_new_model_after_a_backward_pass_that_failed(driver):
    """As ``find_executable_batch_size`` does. The watchdog no longer watches the failed step, and its Compressor can be
    closed."""
    failed = []
    for fails in (True, True, False):
        model = DistributedDataParallel(TwoLayers(), bucket_cap_mb=1e-5)
        compressor = ddp.attach(model, "topk", density=0.05, end_after=3)
        model(torch.ones(3, 40)).backward()
        if fails:
            loss = model(torch.ones(3, 40), MemoryError("made by the test"))
            with pytest.raises(MemoryError):
                loss.backward()
            failed.append(compressor)
    for _ in range(16):  # longer than end_after
        model(torch.ones(3, 40)).backward()
        time.sleep(0.25)
    began = time.monotonic()
    for one in failed:
        one.close()
    assert time.monotonic() - began < 5


def test_dropped_models_leave_no_file_descriptors_and_threads(driver):
    """Without ``close()``, as in a search of hyper-parameters."""
    found = []
    for _ in range(6):
        model, _ = wrapped(TwoLayers())
        for _ in range(2):
            model(torch.ones(3, 40)).backward()
        del model
        gc.collect()
        found.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
    for before, after in zip(found[1], found[-1], strict=True):  # by the second, what the process has once is there
        assert after < before + 10, found  # each left five file descriptors and three threads


def test_forked_process_may_collect_a_dropped_model(driver):
    """As a DataLoader's worker does at any moment. The process group of the dropped model is the parent's."""
    gc.collect()
    gc.disable()
    try:
        model, _ = wrapped(TwoLayers())
        model(torch.ones(3, 40)).backward()
        del model, _
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(20)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0, child.exitcode
    finally:
        gc.enable()


def test_two_models_in_one_backward_pass(driver):
    """As in a GAN: the generator's loss goes through the discriminator, whose gradients are discarded."""
    generator, judge = (DistributedDataParallel(torch.nn.Linear(40, 40)) for _ in range(2))
    own, discarded = (ddp.attach(model, "topk", density=0.05, min_elements=0) for model in (generator, judge))
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(driver.rank))
    for step in range(2):
        judge(x).square().mean().backward()
        before = state_of(discarded)
        judge(generator(x)).square().mean().backward()
        discarded.discard()
        assert_same_state(state_of(discarded), before, f"step {step}")
        with pytest.raises(RuntimeError, match="no step to discard"):
            discarded.discard()
    assert own.ledger.steps == 2


def test_pause_on_one_rank_alone_is_refused(driver):
    """Promises try pauses of all ranks."""
    model, compressor = wrapped(TwoLayers())
    model(torch.ones(3, 40)).backward()
    before = state_of(compressor)
    with compressor.paused() if driver.rank == 0 else nullcontext():
        driver.must_raise(RuntimeError, ["ranks disagree", "'paused'"], model(torch.ones(3, 40)).backward)
    with compressor.paused():
        model(torch.ones(3, 40)).backward()
    assert_same_state(state_of(compressor), before, "after a pause")
    compressor.close()


def test_state_is_loaded_when_more_parameters_are_trained(driver):
    """With gradual unfreezing, the residuals of the saved parameters are loaded, and those of new ones are zero."""
    x, compressors = torch.randn(8, 40, generator=torch.Generator().manual_seed(driver.rank)), []
    for frozen in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        net[0].requires_grad_(not frozen)
        model = DistributedDataParallel(net)
        compressors.append(ddp.attach(model, "topk", density=0.05, min_elements=1))
        if not frozen:
            with logged() as lines:
                compressors[1].load_state_dict(compressors[0].state_dict())
            assert len([line for line in lines if "'0.bias', '0.weight'" in line]) == (driver.rank == 0), lines
            for name in ("1.weight", "1.bias"):
                saved, loaded = (compressor.residual(name) for compressor in compressors)
                assert saved.any() and torch.equal(saved, loaded), name
        for _ in range(2):
            model(x).square().mean().backward()
    assert state_of(compressors[1])["steps"] == {"0.weight": 2, "0.bias": 2, "1.weight": 4, "1.bias": 4}
    assert_same_on_all_ranks({n: p.grad.numpy() for n, p in net.named_parameters()}, driver.gather, "gradients")


# -- process groups and nodes ----------------------------------------------------------------------


class Part(DdpDriver):
    """The ranks of a process group. A step has two backward passes, the first of them in ``no_sync()``."""

    num_nodes = 0  # one level

    def __init__(self, group, folder):
        self.group, self.folder = group, FOLDER / folder
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0):
        return DdpHandle(method, settings, shapes, dtype, op, loss_scale, self.group, passes=2)

    def meet(self):
        dist.barrier(self.group)


def test_no_sync_with_all_other_features(driver):
    check_all_features(Part(dist.group.WORLD, "no_sync"))


@pytest.mark.only("three ranks")
def test_process_group_with_all_other_features(driver):
    pair = dist.new_group([0, 2])
    if driver.rank in (0, 2):
        check_all_features(Part(pair, "group"))


@pytest.mark.only("three ranks")
def test_groups_after_a_group_of_some_ranks(driver):
    """PyTorch would name them by the number of groups, which differs by then: ranks would wait for each other."""

    def train(members):
        group = dist.new_group(members, timeout=timedelta(seconds=20))
        if driver.rank in (members or range(3)):
            model = DistributedDataParallel(torch.nn.Linear(8, 4), process_group=group)
            with ddp.attach(model, "topk", density=0.1):
                model(torch.ones(2, 8)).sum().backward()
            found = {name: each.grad.numpy() for name, each in model.module.named_parameters()}
            ranks = [None] * dist.get_world_size(group)
            dist.all_gather_object(ranks, float(sum(np.abs(each).sum() for each in found.values())), group=group)
            assert ranks[0] > 0 and len(set(ranks)) == 1

    for members in ([1, 2], None, [0, 2], [1, 2], [0, 1], None):
        train(members)


@pytest.mark.only("two levels")
def test_ddp_inside_nodes_and_local_steps_between_them(driver):
    """Averages over a node in every step, and over nodes in the last, are averages over all ranks."""
    ranks = np.arange(driver.world_size).reshape(driver.num_nodes, -1)
    here, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    shapes = {"a": (30, 40), "b": (7,)}
    net = Net(shapes)
    model = DistributedDataParallel(net, process_group=here)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(net, optimizer, every=3, method="none", outer=None, process_group=across) as local:
        for step in range(3):
            backward(model, driver.gradients(step, shapes))
            optimizer.step()
            local.step()
    found = {name: each.detach().numpy() for name, each in net.named_parameters()}
    for name, array in found.items():
        means = [np.mean([one[name] for one in driver.everyone(step, shapes)], axis=0) for step in range(3)]
        np.testing.assert_allclose(array, -0.1 * sum(means), rtol=1e-4, atol=1e-5)
    assert_same_on_all_ranks(found, driver.gather, "local steps between nodes")
