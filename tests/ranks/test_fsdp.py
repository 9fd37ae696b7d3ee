"""Tests of FSDP2 with two replicas, each sharded over half of the ranks. The shards of a replica reduce densely."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvdcompress import fsdp
from hvdcompress.loopback import Loopback
from tests.ranks.checks import EXACT, FOLDER, assert_close, state_of
from tests.ranks.torch_nets import gradients_of_nested

pytestmark = pytest.mark.drivers("ddp")

REPLICAS = 2
LAYERS = {"0": 40 * 60 + 60, "2": 60 * 31 + 31, "4": 31 * 10 + 10}  #: number of parameters of each module


@pytest.fixture
def mesh(driver):
    """The mesh of replicas and shards."""
    if driver.world_size % REPLICAS:
        pytest.skip("needs an even number of ranks")
    shape = (REPLICAS, driver.world_size // REPLICAS)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def new_net():
    torch.manual_seed(3)
    layers = (torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 31), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(31, 10))


def sharded(mesh):
    model = new_net()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def attached(method, mesh, lr=0.2, momentum=0.0, **settings):
    """Return a sharded net, its optimizer, and the Compressor that exchanges its gradients between replicas."""
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, optimizer, fsdp.attach(model, replicas=method, mesh=mesh["replicate"], **settings)


def loss_of(model, step):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))


def train(model, optimizer, steps):
    """Train; return this rank's shards."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return {name: p.to_local().detach().numpy().copy() for name, p in model.named_parameters()}


def test_cancelled_momentum_trains_as_an_optimizer_without_momentum(driver, mesh):
    """Each parameter of a module has its own momentum and rate."""
    results = []
    for with_momentum in (True, False):
        settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel"}
        model, _, _ = attached("topk", mesh, **settings)
        momenta = [0.1 * number for number in range(1, 10)]
        pairs = zip(model.parameters(), momenta, strict=False)
        groups = [
            {"params": [p], "momentum": m, "lr": 0.5 * (1 - m)} if with_momentum else {"params": [p], "lr": 0.5}
            for p, m in pairs
        ]
        results.append(train(model, torch.optim.SGD(groups), range(5)))
    assert_close(*results, (1e-5, 1e-5), "sharded")


def test_gradients_that_are_exchanged_twice_before_a_step_are_adapted_once(mesh):
    """FSDP adds up the gradients of two backward passes. Both are applied at once, as without momentum."""
    results = []
    for options in ({"lr": 0.05, "momentum": 0.9}, {"lr": 0.5}):
        settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel"}
        model, optimizer, _ = attached("topk", mesh, **options, **settings)
        for step in range(4):
            optimizer.zero_grad()
            for half in range(2):
                loss_of(model, 2 * step + half).backward()
            optimizer.step()
        results.append({name: p.to_local().detach().numpy().copy() for name, p in model.named_parameters()})
    assert_close(*results, (1e-4, 1e-5), "sharded")


@pytest.mark.parametrize("kind,levels", [("checkpoint", "0110"), ("checkpoint", "2112"), ("function", "1001")])
def test_backward_passes_inside_of_a_backward_pass(driver, mesh, kind, levels):
    def compress(net):
        for layer in net.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fsdp.attach(fully_shard(net, mesh=mesh["shard"]), replicas="topk", mesh=mesh["replicate"], density=0.05)
        return net, lambda: [parameter.grad.to_local() for parameter in net.parameters()]

    found, expected = (gradients_of_nested(driver.rank, kind, each, compress) for each in (levels, "0000"))
    torch.testing.assert_close(found, expected)


def test_accumulation_without_an_exchange(mesh):
    """After ``set_requires_all_reduce(False)``, gradients are added up, and exchanged once with the next ones."""
    grads, sent = [], []
    for waits in (True, False):
        model, _, compressor = attached("none", mesh)
        for step in range(4):
            model.set_requires_all_reduce(not waits or step in (2, 3))
            loss_of(model, step).backward()
        grads.append({name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()})
        sent.append(compressor.ledger.bytes_sent())
    assert_close(*grads, (1e-5, 1e-5), "accumulated")
    assert 0 < sent[0] < 0.6 * sent[1]


def test_uncompressed_gradients_are_those_of_one_big_batch(driver, mesh):
    plain = new_net()
    model, *_ = attached("none", mesh)
    for each in (model, plain):
        loss_of(each, 0).backward()
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(two.grad)
        torch.testing.assert_close(one.grad.full_tensor(), two.grad / driver.world_size, msg=name)


@pytest.mark.parametrize(
    "method,settings",
    [
        ("scalecom", {"density": 0.05}),
        ("topk", {"density": 0.05}),
        ("qsgd", {"route": "scatter"}),
        ("powersgd", {}),
    ],
)
def test_results_and_bytes_equal_the_loopback(driver, mesh, method, settings, monkeypatch):
    reduce, seen = fsdp.Compressor._reduce, []

    def recording(self, name, gradient):
        before = gradient.numpy().copy()
        reduce(self, name, gradient)
        seen.append((name, before, gradient.numpy().copy()))

    monkeypatch.setattr(fsdp.Compressor, "_reduce", recording)
    model, optimizer, compressor = attached(method, mesh, **settings)
    weights = train(model, optimizer, range(3))
    assert len(seen) == 3 * len(LAYERS) == compressor.ledger.steps
    net = Loopback(method, world_size=REPLICAS, bucket_elements=0, **settings)
    replicas = [None] * REPLICAS
    dist.all_gather_object(replicas, (seen, weights), mesh["replicate"].get_group())
    for everyone in zip(*(calls for calls, _ in replicas), strict=True):
        name = everyone[0][0]
        want = net.allreduce([before for _, before, _ in everyone], name)
        assert all(len(before) >= LAYERS[name] * REPLICAS / driver.world_size for _, before, _ in everyone)
        assert_close({name: everyone[0][2]}, {name: want[0]}, EXACT, name)
    sent, wanted = compressor.ledger.tensors(), net.ledger.tensors(mesh["replicate"].get_local_rank())
    assert {name: sent[name].sent for name in LAYERS} == {name: wanted[name].sent for name in LAYERS}
    assert_close(*(weights for _, weights in replicas), EXACT, "replicas differ")


def test_training_continues_from_saved_state_to_the_bit(mesh):
    """Not without the state."""
    model, optimizer, compressor = attached("scalecom", mesh, density=0.02)
    middle = train(model, optimizer, range(3))
    saved = compressor.save(FOLDER / "fsdp")
    assert saved.parent.name == f"shard-{mesh['shard'].get_local_rank()}-of-{mesh['shard'].size()}"
    dist.barrier()
    want = train(model, optimizer, range(3, 6))
    for loads in (True, False):
        model, optimizer, compressor = attached("scalecom", mesh, density=0.02)
        for name, parameter in model.named_parameters():
            parameter.to_local().detach().copy_(torch.from_numpy(middle[name]))
        if loads:
            compressor.load(FOLDER / "fsdp")
        got = train(model, optimizer, range(3, 6))
        assert loads == all((got[name] == array).all() for name, array in want.items())


def test_unsupported_models_and_settings_are_refused(driver, mesh):
    for model, settings, words in (
        (new_net(), {}, ["no FSDPModule", "fully_shard"]),
        (sharded(mesh), {}, ["one dimension", "mesh['shard']"]),
        *((sharded(mesh["shard"]), {name: 9}, [name]) for name in ("bucket_elements", "verify_every")),
    ):
        given = {"mesh": mesh["replicate"], **settings}
        driver.must_raise(ValueError, words, lambda m=model, g=given: fsdp.attach(m, replicas="topk", **g))
    for given, words, error in (
        ({}, ["replicas="], ValueError),
        ({"replicas": "topk"}, ["mesh="], ValueError),
        ({"gradients": "blockwise", "mesh": mesh["replicate"]}, ["replicas=", "mesh="], ValueError),
        ({"parameters": "int9"}, ["int9", "int8"], ValueError),
        ({"gradients": "powersgd"}, ["powersgd", "blockwise"], ValueError),
        ({"gradients": "blockwise", "rotation": True}, ["rotation"], ValueError),
    ):
        driver.must_raise(error, words, lambda g=given: fsdp.attach(sharded(mesh["shard"]), **g))


def test_parameter_without_a_gradient_is_an_error(driver, mesh):
    model = new_net()
    model.register_parameter("idle", torch.nn.Parameter(torch.zeros(8, 8)))
    fully_shard(model, mesh=mesh["shard"])
    fsdp.attach(model, replicas="topk", mesh=mesh["replicate"])
    driver.must_raise(Exception, ["(root)", "have a gradient"], loss_of(model, 0).backward, same=False)


def test_error_in_one_replica_is_an_error_in_all_within_seconds(driver, mesh):
    model, optimizer, compressor = attached("topk", mesh)
    train(model, optimizer, range(1))

    def fails(*_):
        raise MemoryError("made by the test")

    if mesh["replicate"].get_local_rank() == 1:
        compressor._framework.vector = fails
    loss, began = loss_of(model, 2), time.monotonic()
    driver.must_raise(Exception, ["made by the test"], loss.backward, same=False)
    assert time.monotonic() - began < 5


def test_discarded_and_paused_steps_of_all_modules_leave_no_trace(driver, mesh):
    results, states = [], []
    for extra in (True, False):
        model, optimizer, compressor = attached("topk", mesh, momentum=0.9, density=0.05, min_elements=1)
        for step in range(4):
            if extra and step % 2:
                loss_of(model, 100 + step).backward()
                compressor.discard()
                with compressor.paused():
                    loss_of(model, 100 + step).backward()
            weights = train(model, optimizer, range(step, step + 1))
            driver.must_raise(RuntimeError, ["no step to discard"], compressor.discard)
        results.append(weights)
        states.append(state_of(compressor)["steps"])
    assert_close(*results, EXACT, "with and without discarded and paused steps")
    assert states[0] == states[1]
