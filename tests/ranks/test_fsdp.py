"""Tests of FSDP2: two replicas, each over half of the ranks, which reduce densely among themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvdcompress import fsdp
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD
from tests.ranks.checks import EXACT, FOLDER, assert_close
from tests.ranks.torch_ranks import gather, must_raise, rank, world_size

pytestmark = pytest.mark.drivers("ddp")

REPLICAS = 2
LAYERS = {"0": 40 * 60 + 60, "2": 60 * 31 + 31, "4": 31 * 10 + 10}


def mesh() -> DeviceMesh:
    if world_size() % REPLICAS:
        pytest.skip("needs an even number of ranks")
    shape = (REPLICAS, world_size() // REPLICAS)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = (torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 31), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(31, 10))


def sharded(over: DeviceMesh) -> torch.nn.Module:
    model = net()
    for layer in model[::2]:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def attached(
    method: str, both: DeviceMesh, lr: float = 0.2, momentum: float = 0.0, **settings: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, fsdp.Compressor]:
    """Return a sharded net, its optimizer, and the Compressor that exchanges its gradients between replicas."""
    model = sharded(both["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, optimizer, fsdp.attach(model, method, replicas=both["replicate"], optimizer=optimizer, **settings)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank()))
    return torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict:
    """Train; return this rank's shards."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return {name: p.to_local().detach().numpy().copy() for name, p in model.named_parameters()}


def test_a_sharded_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """The optimizer's momentum is cancelled in each module's flat vector, of whose parameters all have one."""
    both, results = mesh(), []
    for options in ({"lr": 0.05, "momentum": 0.9}, {"lr": 0.5}):
        settings = {"density": 0.05, "min_elements": 1, "optimizer_momentum": "cancel"}
        model, optimizer, compressor = attached("topk", both, **options, **settings)
        results.append(train(model, optimizer, range(5)))
        compressor.close()
    assert_close(*results, (1e-5, 1e-5), "sharded")
    groups = [{"params": [p], "momentum": 0.1 * number} for number, p in enumerate(model.parameters())]
    given = {"replicas": both["replicate"], "min_elements": 1, "optimizer": torch.optim.SGD(groups, lr=0.1)}
    must_raise(ValueError, ["different momentum", "optimizer_momentum"], lambda: fsdp.attach(model, "topk", **given))


def test_accumulation_without_an_exchange() -> None:
    """After set_requires_all_reduce(False) vectors wait, and are exchanged with the next ones, once."""
    both, grads, sent = mesh(), [], []
    for waits in (True, False):
        model, _, compressor = attached("none", both)
        for step in range(4):
            model.set_requires_all_reduce(not waits or step in (2, 3))
            loss_of(model, step).backward()
        grads.append({name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()})
        sent.append(compressor.ledger.bytes_sent())
        compressor.close()
    assert_close(*grads, (1e-5, 1e-5), "accumulated")
    assert 0 < sent[0] < 0.6 * sent[1]


def test_averages_are_those_of_all_ranks() -> None:
    """Sharded and uncompressed it is what one big batch gives."""
    both, plain = mesh(), net()
    model, *_ = attached("none", both)
    for each in (model, plain):
        loss_of(each, 0).backward()
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(two.grad)
        torch.testing.assert_close(one.grad.full_tensor(), two.grad / world_size(), msg=name)


def test_replicas_get_what_loopback_gives() -> None:
    """Results and bytes, also with momentum that is adapted."""
    both, reduce = mesh(), fsdp.Compressor.reduce
    group = both["replicate"].get_group()
    for method, settings in (
        ("scalecom", {"density": 0.05}),
        ("topk", {"density": 0.05}),
        ("qsgd", {"route": "scatter"}),
        ("powersgd", {}),
    ):
        seen: list[tuple] = []

        def noting(self, name, gradient, seen=seen) -> None:
            before = gradient.numpy().copy()
            reduce(self, name, gradient)
            seen.append((name, before, gradient.numpy().copy()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp.Compressor, "reduce", noting)
            model, optimizer, compressor = attached(method, both, **settings)
            compressor.local.optimizer = SGD(momentum=0.9).read
            weights = train(model, optimizer, range(3))
        assert len(seen) == 3 * len(LAYERS) == compressor.ledger.steps
        loopback = Loopback(method, world_size=REPLICAS, bucket_elements=0, **settings)
        for each in loopback.ranks:
            each.optimizer = SGD(momentum=0.9).read
        for everyone in zip(*gather(seen, group), strict=True):
            name = everyone[0][0]
            want = loopback.allreduce([before for _, before, _ in everyone], name)
            assert all(len(before) >= LAYERS[name] * REPLICAS / world_size() for _, before, _ in everyone)
            assert_close({name: everyone[0][2]}, {name: want[0]}, EXACT, f"{method}, {name}")
        sent, wanted = compressor.ledger.tensors(), loopback.ledger.tensors(both["replicate"].get_local_rank())
        assert {name: sent[name].sent for name in LAYERS} == {name: wanted[name].sent for name in LAYERS}, method
        one, other = gather(weights, group)
        assert_close(one, other, EXACT, f"{method}: replicas differ")


def test_sharded_training_goes_on_from_saved_state_to_the_bit() -> None:
    both = mesh()
    model, optimizer, compressor = attached("scalecom", both, density=0.02)
    middle = train(model, optimizer, range(3))
    saved = compressor.save(FOLDER / "fsdp")
    assert saved.parent.name == f"shard-{both['shard'].get_local_rank()}-of-{both['shard'].size()}"
    dist.barrier()
    want = train(model, optimizer, range(3, 6))
    for loads in (True, False):
        model, optimizer, compressor = attached("scalecom", both, density=0.02)
        for name, parameter in model.named_parameters():
            parameter.to_local().detach().copy_(torch.from_numpy(middle[name]))
        if loads:
            compressor.load(FOLDER / "fsdp")
        got = train(model, optimizer, range(3, 6))
        assert loads == all((got[name] == array).all() for name, array in want.items())


def test_unsupported_models_and_settings_are_refused() -> None:
    both = mesh()
    for model, settings, words in (
        (net(), {}, ["no FSDPModule", "fully_shard"]),
        (sharded(both), {}, ["one dimension", "mesh['shard']"]),
        *((sharded(both["shard"]), {name: 9}, [name]) for name in ("bucket_elements", "verify_every", "cosine_every")),
    ):
        given = {"replicas": both["replicate"], **settings}
        must_raise(ValueError, words, lambda m=model, g=given: fsdp.attach(m, "topk", **g))


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    both = mesh()
    model = net()
    model.register_parameter("idle", torch.nn.Parameter(torch.zeros(8, 8)))
    fully_shard(model, mesh=both["shard"])
    fsdp.attach(model, "topk", replicas=both["replicate"])
    must_raise(Exception, ["(root)", "have a gradient"], loss_of(model, 0).backward, same=False)


def test_an_error_in_one_replica_is_the_others_within_seconds() -> None:
    both = mesh()
    model, optimizer, compressor = attached("topk", both)
    train(model, optimizer, range(1))

    def fails(*_: Any) -> None:
        raise MemoryError("made by the test")

    if both["replicate"].get_local_rank() == 1:
        compressor.framework.vector = fails
    loss, began = loss_of(model, 2), time.monotonic()
    must_raise(Exception, ["made by the test"], loss.backward, same=False)
    assert time.monotonic() - began < 5


def test_discarded_and_paused_steps_of_all_modules_leave_no_trace() -> None:
    both, results, states = mesh(), [], []
    for extra in (True, False):
        model, optimizer, compressor = attached("topk", both, momentum=0.9, density=0.05, min_elements=1)
        for step in range(4):
            if extra and step % 2:
                loss_of(model, 100 + step).backward()
                compressor.discard()
                with compressor.paused():
                    loss_of(model, 100 + step).backward()
            weights = train(model, optimizer, range(step, step + 1))
            must_raise(RuntimeError, ["no step to discard"], compressor.discard)
        results.append(weights)
        states.append(compressor.state_dict()["steps"])
        compressor.close()
    assert_close(*results, EXACT, "with and without steps that are thrown away")
    assert states[0] == states[1]
