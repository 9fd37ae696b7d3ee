"""Cases of FSDP2: two replicas, each over half of the ranks, which reduce densely among themselves."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvdcompress
from hvdcompress import fsdp
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD
from hvdcompress.testing import numbers
from tests.harness import EXACT, OUT, Skip, assert_close, case, must_raise
from tests.promises.traces import Recorder, digest, record_or_compare
from tests.promises.variants import METHODS

REPLICAS = 2
LAYERS = {"0": 40 * 60 + 60, "2": 60 * 31 + 31, "4": 31 * 10 + 10}


def mesh():
    if dist.get_world_size() % REPLICAS:
        raise Skip("needs an even number of ranks")
    shape = (REPLICAS, dist.get_world_size() // REPLICAS)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def gather(value, group=None):
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = (torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 31), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(31, 10))


def sharded(over) -> torch.nn.Module:
    model = net()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(16, 40, generator=generator)
    return x, x[:, :10].argmax(1)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return torch.nn.functional.cross_entropy(model(x), y)


def steps(model: torch.nn.Module, first: int, last: int) -> dict:
    """Train; returns this rank's shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return shards(model)


def shards(model: torch.nn.Module) -> dict:
    return {name: p.to_local().detach().numpy().copy() for name, p in model.named_parameters()}


@case
def a_sharded_net_trains_as_with_an_optimizer_without_momentum() -> None:
    """The optimizer's momentum is cancelled in each module's flat vector, of whose parameters all have one."""
    both, results = mesh(), []
    for momentum, lr in ((0.9, 0.05), (0.0, 0.5)):
        model = sharded(both["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        settings = {"density": 0.05, "min_elements": 1, "optimizer": optimizer, "optimizer_momentum": "cancel"}
        compressor = fsdp.attach(model, "topk", replicas=both["replicate"], **settings)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        results.append(shards(model))
        compressor.close()
    assert_close(*results, (1e-5, 1e-5), "sharded")
    groups = [{"params": [p], "momentum": 0.1 * number} for number, p in enumerate(model.parameters())]
    mixed = torch.optim.SGD(groups, lr=0.1)
    must_raise(
        ValueError,
        ["different momentum", "optimizer_momentum"],
        lambda: fsdp.attach(model, "topk", replicas=both["replicate"], min_elements=1, optimizer=mixed),
        gather,
    )


@case
def auto_takes_beta1_out_of_the_adam_of_a_sharded_net() -> None:
    both = mesh()
    for method, beta1 in (("auto", 0.0), ("topk", 0.9)):
        model = sharded(both["shard"])
        optimizer = torch.optim.AdamW(model.parameters())
        fsdp.attach(model, method, replicas=both["replicate"], optimizer=optimizer).close()
        assert optimizer.param_groups[0]["betas"] == (beta1, 0.999)


@case
def accumulation_without_an_exchange() -> None:
    """After set_requires_all_reduce(False) vectors wait, and are exchanged with the next ones, once."""
    both, grads, sent = mesh(), [], []
    for waits in (True, False):
        model = sharded(both["shard"])
        compressor = fsdp.attach(model, "none", replicas=both["replicate"])
        for step in range(4):
            model.set_requires_all_reduce(not waits or step in (2, 3))
            loss_of(model, step).backward()
        grads.append({name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()})
        sent.append(compressor.ledger.bytes_sent())
        compressor.close()
    assert_close(*grads, (1e-5, 1e-5), "accumulated")
    assert 0 < sent[0] < 0.6 * sent[1]


@case
def averages_are_those_of_all_ranks() -> None:
    """Sharded and uncompressed it is what one big batch gives."""
    both, plain = mesh(), net()
    model = sharded(both["shard"])
    fsdp.attach(model, "none", replicas=both["replicate"])
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(two.grad)
        torch.testing.assert_close(one.grad.full_tensor(), two.grad / dist.get_world_size(), msg=name)


@case
def replicas_get_what_loopback_gives() -> None:
    both, plain = mesh(), fsdp.Compressor.reduce
    group = both["replicate"].get_group()
    for method, settings in (
        ("scalecom", {"density": 0.05}),
        ("topk", {"density": 0.05}),
        ("dgc", {}),
        ("qsgd", {"route": "scatter"}),
        ("gtopk", {"density": 0.05}),
        ("fp16", {}),
        ("powersgd", {}),
    ):
        seen: list[tuple] = []

        def noting(self, name, gradient, seen=seen) -> None:
            before = gradient.numpy().copy()
            plain(self, name, gradient)
            seen.append((name, before, gradient.numpy().copy()))

        fsdp.Compressor.reduce = noting
        try:
            model = sharded(both["shard"])
            compressor = fsdp.attach(model, method, replicas=both["replicate"], **settings)
            weights = steps(model, 0, 4)
        finally:
            fsdp.Compressor.reduce = plain
        assert len(seen) == 4 * len(LAYERS) == compressor.ledger.steps
        loopback = Loopback(method, world_size=REPLICAS, bucket_elements=0, **settings)
        for everyone in zip(*gather(seen, group), strict=True):
            name = everyone[0][0]
            want = loopback.allreduce([before for _, before, _ in everyone], name)
            assert all(len(before) >= LAYERS[name] * REPLICAS / dist.get_world_size() for _, before, _ in everyone)
            assert_close({name: everyone[0][2]}, {name: want[0]}, EXACT, f"{method}, {name}")
        one, other = gather(weights, group)
        assert_close(one, other, EXACT, f"{method}: replicas differ")


@case
def sharded_training_goes_on_from_saved_state_to_the_bit() -> None:
    both = mesh()

    def model_of(weights: dict | None):
        model = sharded(both["shard"])
        for name, parameter in model.named_parameters() if weights else ():
            parameter.to_local().detach().copy_(torch.from_numpy(weights[name]))
        return model, fsdp.attach(model, "scalecom", replicas=both["replicate"], density=0.02)

    model, compressor = model_of(None)
    middle = steps(model, 0, 3)
    own = compressor.save(OUT / "fsdp")
    assert own.parent.name == f"shard-{both['shard'].get_local_rank()}-of-{both['shard'].size()}"
    dist.barrier()
    want = steps(model, 3, 6)
    again, compressor = model_of(middle)
    compressor.load(OUT / "fsdp")
    assert_close(steps(again, 3, 6), want, EXACT, "from saved state")
    without, _ = model_of(middle)
    assert any((a != b).any() for a, b in zip(steps(without, 3, 6).values(), want.values(), strict=True))


@case
def what_does_not_go_is_refused() -> None:
    both = mesh()
    attach = lambda model, **more: fsdp.attach(model, "topk", replicas=both["replicate"], **more)  # noqa: E731
    must_raise(ValueError, ["no FSDPModule", "fully_shard"], lambda: attach(net()), gather)
    must_raise(ValueError, ["one dimension", "mesh['shard']"], lambda: attach(sharded(both)), gather)
    must_raise(ValueError, ["bucket_elements"], lambda: attach(sharded(both["shard"]), bucket_elements=9), gather)
    must_raise(ValueError, ["verify_every"], lambda: attach(sharded(both["shard"]), verify_every=9), gather)
    must_raise(ValueError, ["cosine_every"], lambda: attach(sharded(both["shard"]), cosine_every=9), gather)


@case
def a_parameter_without_a_gradient_is_an_error() -> None:
    both = mesh()
    model = net()
    model.register_parameter("idle", torch.nn.Parameter(torch.zeros(8, 8)))
    fully_shard(model, mesh=both["shard"])
    fsdp.attach(model, "topk", replicas=both["replicate"])
    must_raise(Exception, ["(root)", "have a gradient"], loss_of(model, 0).backward, gather, False)


@case
def an_error_in_one_replica_is_the_others_within_seconds() -> None:
    both = mesh()
    model = sharded(both["shard"])
    compressor = fsdp.attach(model, "topk", replicas=both["replicate"])
    steps(model, 0, 2)

    def fails(*rest):
        raise MemoryError("made by the test")

    if both["replicate"].get_local_rank() == 1:
        compressor.framework.vector = fails
    loss, began = loss_of(model, 2), time.monotonic()
    must_raise(Exception, ["made by the test"], loss.backward, gather, False)
    assert time.monotonic() - began < 5


@case
def discarded_and_paused_steps_of_all_modules_leave_no_trace() -> None:
    both, results = mesh(), []
    for extra in (True, False):
        model = sharded(both["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        compressor = fsdp.attach(model, "topk", replicas=both["replicate"], density=0.05, min_elements=1)
        for step in range(6):
            if extra and step % 2:
                loss_of(model, 100 + step).backward()
                compressor.discard()
                with compressor.paused():
                    loss_of(model, 100 + step).backward()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            must_raise(RuntimeError, ["no step to discard"], compressor.discard, gather)
        results.append((shards(model), compressor.state_dict()["steps"]))
        compressor.close()
    assert_close(results[0][0], results[1][0], EXACT, "with and without steps that are thrown away")
    assert results[0][1] == results[1][1]


@case
def traces_of_a_sharded_net() -> None:
    """As promises/traces.py has them, of vectors that are made by no matrix product; two replicas of one shard."""
    if dist.get_world_size() != 2:
        raise Skip("recorded of two ranks")
    both, found = mesh(), {}
    for method, settings in METHODS.items():
        model = sharded(both["shard"])
        compressor = fsdp.attach(model, method, replicas=both["replicate"], **{"min_elements": 1, **settings})
        compressor.local.optimizer = SGD(momentum=0.9).read
        recorder = Recorder(dist.get_rank(), LAYERS)
        compressor.watch(recorder)
        lines, exact = [], hvdcompress.get(method).exact
        for step in range(5):
            results = {}
            for number, (name, size) in enumerate(LAYERS.items()):
                results[name] = torch.as_tensor(numbers((size,), number, dist.get_rank(), step).copy())
                compressor.reduce(name, results[name])
            lines.append(f"{recorder.take()} {digest(results)}" if exact else "-")
        lines.append(digest(compressor.state_dict()["state"] if exact else compressor.state_dict()["steps"]))
        found[method] = lines
        compressor.close()
    record_or_compare("fsdp", dist.get_rank(), found)
