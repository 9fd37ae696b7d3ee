"""Tests of FSDP2 whose reduce-scatter and all-gather between shards are compressed."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from hvdcompress import fsdp
from hvdcompress.engine import lockstep
from hvdcompress.method import Context, Workspace
from hvdcompress.ops import fast
from hvdcompress.parts import shards
from tests.ranks.checks import EXACT, FOLDER, assert_close
from tests.ranks.test_fsdp import loss_of, new_net, sharded, train

pytestmark = pytest.mark.drivers("ddp")

INT4 = {"gradients": "blockwise", "values": "int4", "parameters": "int8"}


@pytest.fixture
def mesh(driver):
    """The mesh of all ranks, which hold the shards of one replica."""
    return init_device_mesh("cpu", (driver.world_size,), mesh_dim_names=("shard",))


def attached(mesh, lr=0.2, momentum=0.0, **settings):
    """Return a sharded net, its optimizer and its Compressor."""
    model = sharded(mesh)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), fsdp.attach(model, **settings)


def gradients_of(model, step=0):
    model.zero_grad()
    loss_of(model, step).backward()
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def run(generators):
    """Carry out the one collective of each rank; results are in the arrays that the generators were given."""
    results = lockstep.perform([next(each) for each in generators])
    for each, result in zip(generators, results, strict=True):
        with contextlib.suppress(StopIteration):
            each.send(result)


@pytest.mark.also("three ranks", "four ranks")
@pytest.mark.parametrize(
    "settings",
    [
        {"gradients": "blockwise", "parameters": "int8"},
        {"gradients": "blockwise", "values": "int4", "block": 64, "parameters": "int4"},
        {"gradients": "qsgd", "bits": 3, "parameters": "fp8_e4m3"},
        {"gradients": "natural", "parameters": "dynamic8"},
        {"gradients": "bf16", "parameters": "bf16"},
        {"gradients": "fp16", "parameters": "fp16"},
        {"gradients": "qsgd", "parameters": "int8", "backend": "torch"},
    ],
)
def test_results_and_bytes_equal_the_simulation(driver, mesh, settings, monkeypatch):
    """Those of ``parts/shards.py`` over simulated ranks."""
    seen = []
    p, rank = driver.world_size, driver.rank

    def recorded(what):
        function = getattr(fsdp.ShardCompressor, what)

        def record(self, name, output_tensor, input_tensor, *args, **kwargs):
            before = input_tensor.numpy().copy()
            function(self, name, output_tensor, input_tensor, *args, **kwargs)
            seen.append((what, name, before, output_tensor.numpy().copy()))

        monkeypatch.setattr(fsdp.ShardCompressor, what, record)

    recorded("_reduce_scatter")
    recorded("_all_gather")
    model, optimizer, compressor = attached(mesh, **settings)
    train(model, optimizer, range(2))
    everyone = driver.gather(seen)
    steps: dict[str, int] = {}
    sent: dict[str, int] = {}
    for calls in zip(*everyone, strict=True):
        what, name, _, after = calls[rank]
        gathers = what == "_all_gather"
        bucket = compressor._gathers[f"{name} (parameters)"] if gathers else compressor.buckets[name]
        method = (bucket.program if gathers else compressor.plan.program).main
        parts = compressor._layouts[name][gathers]
        form = shards.format_of(method.shard_codec, parts)
        step = 0 if gathers else steps.get(name, 0)
        outs = [np.empty(len(after), np.float32) for _ in range(p)]
        contexts = [Context(each, p, step, bucket.spec, needs_own=False) for each in range(p)]
        given = list(zip([call[2] for call in calls], outs, contexts, strict=True))
        if gathers:
            run([shards.all_gather(x, out, form, ctx, Workspace(fast)) for x, out, ctx in given])
        else:
            run([shards.reduce_scatter(x, out, 1 / p, form, ctx, Workspace(fast)) for x, out, ctx in given])
            steps[name] = steps.get(name, 0) + 1
        np.testing.assert_array_equal(after, outs[rank], err_msg=f"{what} of {name}")
        sent[bucket.spec.name] = sent.get(bucket.spec.name, 0) + form.num_bytes * (1 if gathers else p)
    assert {name: entry.sent for name, entry in compressor.ledger.tensors().items()} == sent
    assert compressor.ledger.steps == sum(steps.values()) == 6


@pytest.mark.parametrize(
    "settings,gradient,parameter",
    [
        ({"gradients": "bf16"}, 0.004, 0),
        ({"gradients": "blockwise"}, 0.02, 0),
        ({"gradients": "blockwise", "values": "int4"}, 0.4, 0),
        ({"parameters": "bf16"}, 0.02, 0.004),
        ({"parameters": "int8"}, 0.05, 0.01),
    ],
)
def test_gradients_and_parameters_are_those_of_stock_training_up_to_rounding(mesh, settings, gradient, parameter):
    stock = gradients_of(sharded(mesh))
    model, _, compressor = attached(mesh, min_elements=0, **settings)
    found = gradients_of(model)
    for name, array in stock.items():
        error = np.linalg.norm(found[name] - array) / np.linalg.norm(array)
        assert error < gradient, (name, error)
        assert error > 0, name
    exact = {name: p.full_tensor() for name, p in model.named_parameters()}
    model.unshard()
    for layer in model[::2]:
        layer.unshard()
    for name, used in model.named_parameters():
        error = (used - exact[name]).norm() / exact[name].norm()
        assert (error > 0) == (parameter > 0) and error <= parameter, (name, error)
    assert compressor.ledger.compression_ratio() > 1.5


def test_sums_without_compression_are_stock_to_the_bit(mesh):
    stock = gradients_of(sharded(mesh))
    model, _, compressor = attached(mesh, gradients="none", parameters="int8")
    with compressor.paused():
        assert_close(gradients_of(model), stock, EXACT, "paused")
    with pytest.raises(AssertionError):
        assert_close(gradients_of(model), stock, EXACT, "compressed parameters")
    model, *_ = attached(mesh, gradients="blockwise", min_elements=10**6)
    # all tensors are sent in float32; only the order of the sum may differ
    assert_close(gradients_of(model), stock, (1e-6, 1e-7), "small tensors")


def test_small_tensors_are_sent_exactly(mesh):
    model, *_ = attached(mesh, parameters="int4")
    exact = {name: p.full_tensor() for name, p in model.named_parameters()}
    for layer in model[::2]:
        layer.unshard()
    for name, used in model.named_parameters():
        assert torch.equal(used, exact[name]) == (used.numel() < 1024), name


def test_all_ranks_have_equal_parameters_and_train(driver, mesh):
    model, optimizer, _ = attached(mesh, momentum=0.9, lr=0.05, **INT4)
    before = loss_of(model, 0).item()
    train(model, optimizer, range(20))
    assert loss_of(model, 0).item() < before - 0.2
    for layer in model[::2]:
        layer.unshard()
    for name, parameter in model.named_parameters():
        everyone = driver.gather(parameter.detach().numpy())
        assert all((each == everyone[0]).all() for each in everyone), name


@pytest.mark.parametrize("parameters,reduced", [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", None)])
def test_mixed_precision(mesh, parameters, reduced):
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, parameters), reduce_dtype=getattr(torch, reduced) if reduced else None
    )
    results = []
    for settings in ({}, INT4):
        model = new_net()
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if settings:
            fsdp.attach(model, **settings)
        results.append(gradients_of(model))
    stock, found = results
    for name, array in stock.items():
        assert found[name].dtype == array.dtype == np.float32
        error = np.linalg.norm(found[name] - array) / np.linalg.norm(array)
        assert 0 < error < 0.5, (name, error)


def test_accumulation_exchanges_once(mesh):
    model, _, compressor = attached(mesh, **INT4)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        loss_of(model, last).backward()
    found = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    assert compressor.ledger.steps == 3
    stock = sharded(mesh)
    for step in range(2):
        loss_of(stock, step).backward()
    for name, p in stock.named_parameters():
        array = p.grad.full_tensor().numpy()
        assert np.linalg.norm(found[name] - array) < 0.4 * np.linalg.norm(array), name


@pytest.mark.also("four ranks")
@pytest.mark.parametrize("reshard", [False, "smaller"])
def test_parameters_that_stay_unsharded_after_the_forward_pass(driver, mesh, reshard):
    """On a smaller mesh, the exact decoded values are gathered again, uncompressed."""
    if reshard == "smaller" and driver.world_size % 2:
        pytest.skip("needs an even number of ranks")
    results = []
    for given in (reshard if reshard is False else driver.world_size // 2, True):
        torch.manual_seed(3)
        model = new_net()
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=given)
        fully_shard(model, mesh=mesh)
        fsdp.attach(model, **INT4)
        results.append(gradients_of(model))
    assert_close(*results, EXACT, "gradients")


def test_divide_factors(mesh):
    results = []
    for factor in (None, 4.0, float(mesh.size())):
        model, *_ = attached(mesh, **INT4)
        if factor:
            for module in (model, *model[::2]):
                module.set_gradient_divide_factor(factor)
        results.append(gradients_of(model))
    mean, quarter, same = results
    assert_close(mean, same, EXACT, "mean")
    assert_close({n: a * mesh.size() / 4 for n, a in mean.items()}, quarter, (1e-6, 1e-8), "a quarter of the sum")


def test_clipping_uses_the_norm_of_the_whole_gradient(mesh):
    model, *_ = attached(mesh, **INT4)
    found = gradients_of(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor().item()
    assert norm == pytest.approx(np.sqrt(sum((array**2).sum() for array in found.values())), rel=1e-5)
    assert np.sqrt(sum((p.grad.full_tensor() ** 2).sum() for p in model.parameters())) == pytest.approx(0.01, rel=1e-3)


class Shared(torch.nn.Module):
    """Embedding whose weight is that of the output layer, a frozen layer, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = torch.nn.Embedding(50, 32)
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.layer = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = torch.nn.Linear(32, 5)

    def forward(self, x):
        x = self.frozen(self.embedding(x))
        return self.head(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("kind", [None, "reentrant", "not reentrant"])
def test_tied_frozen_and_unused_parameters_and_recomputed_activations(driver, mesh, kind):
    results = []
    for settings in ({}, {**INT4, "min_elements": 0}):
        model = Shared()
        if kind:
            forward, reentrant = model.layer.forward, kind == "reentrant"
            model.layer.forward = lambda x, f=forward, r=reentrant: checkpoint(f, x, use_reentrant=r)
        for module in (model.frozen, model.layer):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if settings:
            fsdp.attach(model, **settings)
        generator = torch.Generator().manual_seed(driver.rank)
        for _ in range(2):
            model.zero_grad()
            x = torch.randint(50, (8, 12), generator=generator)
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        results.append(
            {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters() if p.grad is not None}
        )
    stock, found = results
    assert stock.keys() == found.keys() == {"embedding.weight", "layer.weight", "layer.bias"}
    for name, array in stock.items():
        assert 0 < np.linalg.norm(found[name] - array) < 0.5 * np.linalg.norm(array), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{"gradients": "blockwise"}, {"gradients": "fp16"}, {"gradients": "natural"}])
def test_a_number_that_is_not_finite_is_seen_by_the_owner_of_its_shard(driver, mesh, bad, settings):
    """As without compression, where also the other numbers of the shard are kept."""
    model, _, _ = attached(mesh, **settings)

    def spoil(gradient):
        return gradient * torch.tensor([bad, *[1.0] * 59])

    def at_output(_, __, output):
        output.register_hook(spoil)

    if driver.rank == driver.world_size - 1:
        hook = model[0].register_forward_hook(at_output)
    loss_of(model, 0).backward()
    if driver.rank == driver.world_size - 1:
        hook.remove()
    weight = model[0].weight.grad.full_tensor()
    assert not torch.isfinite(weight[0]).any()
    assert torch.isfinite(model[2].weight.grad.full_tensor()).all()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    assert not torch.isfinite(norm)
    gradients = gradients_of(model, 1)
    assert all(np.isfinite(array).all() for array in gradients.values())


@pytest.mark.only("four ranks")
def test_replicas_of_pytorch_and_of_ours_compose_with_shards(driver, mesh):
    both = init_device_mesh("cpu", (2, driver.world_size // 2), mesh_dim_names=("replicate", "shard"))
    stock = gradients_of(sharded(both))
    native = sharded(both)
    fsdp.attach(native, gradients="bf16", parameters="bf16")
    ours = sharded(both["shard"])
    compressor = fsdp.attach(ours, gradients="bf16", parameters="bf16", replicas="none", mesh=both["replicate"])
    for model in (native, ours):
        found = gradients_of(model)
        for name, array in stock.items():
            assert np.linalg.norm(found[name] - array) < 0.02 * np.linalg.norm(array), name
    assert compressor.ledger.steps == compressor.shards.ledger.steps == 3
    given = {"mesh": both["replicate"], "replicas": "topk", "loss_scale": 2.0, "density": 0.1}
    other = fsdp.attach(sharded(both["shard"]), parameters="int8", **given)
    assert other.plan.program.main.density == 0.1
    assert other.loss_scale == other.shards.loss_scale == 2.0
    assert "bf16" in compressor.summary() and "none" in compressor.summary()


@pytest.mark.only("four ranks")
def test_tensor_parallelism_beside(driver):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    results = []
    for settings in ({}, {"gradients": "blockwise", "parameters": "bf16"}):
        model = new_net()
        parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in model[::2]:
            fully_shard(layer, mesh=both["data"])
        fully_shard(model, mesh=both["data"])
        if settings:
            fsdp.attach(model, **settings)
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(both["data"].get_local_rank()))
        torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        results.append({name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()})
    stock, found = results
    for name, array in stock.items():
        assert 0 < np.linalg.norm(found[name] - array) < 0.05 * np.linalg.norm(array), name


@pytest.mark.parametrize("mixed", [False, True])
def test_residuals_keep_what_was_not_sent(driver, mesh, mixed, monkeypatch):
    """On every shard, the sums and the residuals of all ranks add up to the gradients of all ranks."""
    exchange, seen = fsdp.ShardCompressor._reduce_scatter, {}

    def recording(self, name, output_tensor, input_tensor, group, op, **more):
        before = input_tensor.float().numpy().copy()
        exchange(self, name, output_tensor, input_tensor, group, op, **more)
        given, got = seen.setdefault(name, ([], []))
        given.append(before)
        got.append(output_tensor.float().numpy() * driver.world_size)

    monkeypatch.setattr(fsdp.ShardCompressor, "_reduce_scatter", recording)
    model = new_net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, **({"mp_policy": policy} if mixed else {}))
    fully_shard(model, mesh=mesh, **({"mp_policy": policy} if mixed else {}))
    compressor = fsdp.attach(model, gradients="blockwise", values="int4", feedback="plain", loss_scale=128.0)
    for step in range(5):
        (128 * loss_of(model, step)).backward()
    for name, (given, got) in seen.items():
        residual = compressor.residual(name).numpy() * np.float32(128.0)
        assert residual.any() == (name != "4")  # a small module is sent exactly
        inputs, kept = (np.sum(driver.gather(each), axis=0) for each in (np.sum(given, axis=0), residual))
        m = len(got[0])
        mine = slice(driver.rank * m, (driver.rank + 1) * m)
        np.testing.assert_allclose(np.sum(got, axis=0) + kept[mine], inputs[mine], rtol=1e-4, atol=1e-4)
    (described,) = [line for line in compressor.describe().splitlines() if line.startswith("blockwise")]
    assert "MB of state" in described and "0.00 MB" not in described


def test_discarded_steps_and_numbers_that_are_not_finite_leave_the_residual(driver, mesh):
    model, _, compressor = attached(mesh, gradients="blockwise", feedback="plain")
    loss_of(model, 0).backward()
    before = compressor.residual("0")
    loss_of(model, 1).backward()
    assert not torch.equal(compressor.residual("0"), before)
    compressor.discard()
    torch.testing.assert_close(compressor.residual("0"), before, rtol=0, atol=0)
    (loss_of(model, 1) * float("nan")).backward()
    torch.testing.assert_close(compressor.residual("0"), before, rtol=0, atol=0)
    with compressor.paused():
        loss_of(model, 2).backward()
    torch.testing.assert_close(compressor.residual("0"), before, rtol=0, atol=0)


@pytest.mark.parametrize("more", [{}, {"feedback": "lowpass", "beta": 0.5}])
def test_training_continues_from_saved_state_to_the_bit(mesh, more):
    """Not without the state: random rounding depends on the number of exchanges."""
    settings = {**INT4, **more}
    model, optimizer, compressor = attached(mesh, **settings)
    middle = train(model, optimizer, range(3))
    compressor.save(FOLDER / "fsdp-shards")
    dist.barrier()
    want = train(model, optimizer, range(3, 6))
    for loads in (True, False):
        model, optimizer, compressor = attached(mesh, **settings)
        for name, parameter in model.named_parameters():
            parameter.to_local().detach().copy_(torch.from_numpy(middle[name]))
        if loads:
            compressor.load(FOLDER / "fsdp-shards")
        got = train(model, optimizer, range(3, 6))
        assert loads == all((got[name] == array).all() for name, array in want.items())


def test_ranks_with_different_formats_are_told_the_key(driver, mesh):
    model, *_ = attached(mesh, gradients="blockwise", values="int4" if driver.rank else "int8")
    driver.must_raise(Exception, ["values", "int4", "int8"], loss_of(model, 0).backward, same=False)
    model, *_ = attached(mesh, parameters="int4" if driver.rank else "int8")
    driver.must_raise(Exception, ["parameters", "int4", "int8"], lambda: loss_of(model, 0), same=False)


def test_bytes_of_an_all_gather_of_the_parameters_own_are_refused(driver, mesh):
    """FSDP passes bytes if the parameters have ``fsdp_pre_all_gather``, as those of torchao's float8 training."""
    _, _, compressor = attached(mesh, parameters="int8")
    given = torch.zeros(8, dtype=torch.uint8)
    driver.must_raise(
        TypeError, ["0 (parameters)", "bytes"], lambda: compressor._all_gather("0", given, given, mesh.get_group())
    )


def test_a_second_attach_is_refused(driver, mesh):
    model, *_ = attached(mesh, parameters="int8")
    driver.must_raise(ValueError, ["0", "already"], lambda: fsdp.attach(model, gradients="qsgd"))


def test_a_rank_that_comes_late_is_named(driver, mesh, caplog):
    model, *_ = attached(mesh, warn_after=1, **INT4)
    loss_of(model, 0).backward()
    loss = loss_of(model, 1)
    if driver.rank == 0:
        time.sleep(4)
    loss.backward()
    if driver.rank:
        assert any("all-gather of 4: parameters; missing: rank 0" in message for message in caplog.messages)


@pytest.mark.parametrize("options", ["compiled", "offloaded"])
def test_compiled_and_offloaded_models_have_the_same_gradients(mesh, options):
    model, *_ = attached(mesh, **INT4)
    stock = gradients_of(model)
    other = new_net()
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if options == "offloaded" else {}
    for layer in other[::2]:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(other, mesh=mesh, **policy)
    fsdp.attach(other, **INT4)
    call = torch.compile(other) if options == "compiled" else other
    loss_of(call, 0).backward()
    found = {name: p.grad.full_tensor().numpy() for name, p in other.named_parameters()}
    assert_close(found, stock, (1e-6, 1e-7), options)


def test_reports(mesh):
    model, optimizer, compressor = attached(mesh, **INT4)
    train(model, optimizer, range(2))
    for text in (compressor.summary(), compressor.describe(), compressor.openmetrics()):
        assert "blockwise values=int4" in text
        assert "blockwise feedback" in text  # that of the parameters, whose int8 is the default
