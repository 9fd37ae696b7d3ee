"""Cases of the torch driver alone: what is refused, with one message on all ranks, and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvdcompress
from hvdcompress import ddp
from hvdcompress.horovod.torch import Compressor, PeerError
from tests import harness
from tests.harness import Skip, case
from tests.launched.torch_model import gradients, optimizer, parameters, reduce_once
from tests.promises.drivers.torch import backward


def must_raise(kind: Any, words: list[str], run: Callable[[], object]) -> None:
    harness.must_raise(kind, words, run, hvd.allgather_object)


@case
def a_gradient_that_belongs_to_no_parameter() -> None:
    params = parameters("stranger")
    stranger = {"stranger.x": torch.nn.Parameter(torch.zeros(64, 64))}
    comp = Compressor("topk", params.items())
    opt = optimizer({**params, **stranger}, comp)
    grads = gradients({**params, **stranger}, 0, hvd.rank())
    must_raise(PeerError, ["named_parameters", "(64, 64)"], lambda: reduce_once(opt, {**params, **stranger}, grads))


@case
def a_parameter_that_was_frozen_and_one_that_is_on_one_rank_only() -> None:
    params = parameters("before")
    params["before.a"].requires_grad_(False)
    comp = Compressor("topk", params.items())
    params["before.a"].requires_grad_(True)
    opt = optimizer(params, comp)
    grads = gradients(params, 0, hvd.rank())
    must_raise(PeerError, ["'before.a' was frozen when"], lambda: reduce_once(opt, params, grads))
    if hvd.size() > 1:
        params = parameters("onerank")
        opt = optimizer(params, Compressor("topk", params.items()))
        reduce_once(opt, params, gradients(params, 0, hvd.rank()))
        params["onerank.a"].requires_grad_(hvd.rank() != 1)
        names = [n for n, p in params.items() if p.requires_grad]
        grads = gradients(params, 1, hvd.rank())
        words = ["ranks disagree: tensor 'onerank.a'", "frozen' on rank 1"]
        must_raise(PeerError, words, lambda: reduce_once(opt, params, grads, names))


@case
def complex_parameters_are_refused_by_name() -> None:
    named = {"real": torch.nn.Parameter(torch.zeros(3)), "odd": torch.nn.Parameter(torch.zeros(3, dtype=torch.cfloat))}
    must_raise(ValueError, ["'odd'", "complex64"], lambda: Compressor("topk", named.items()))


@case
def sparse_gradients_are_refused() -> None:
    for as_dense in (False, True):
        kind = f"sparse{as_dense}"
        embedding = torch.nn.Embedding(200, 16, sparse=True)
        named = [(f"{kind}.{n}", p) for n, p in embedding.named_parameters()]
        comp = Compressor("topk", named)
        sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
        opt = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=comp, sparse_as_dense=as_dense)

        def run(opt=opt, embedding=embedding) -> None:
            embedding(torch.arange(8)).sum().backward()
            opt.step()

        must_raise((ValueError, PeerError), [f"{kind}.weight", "sparse"], run)  # type: ignore[arg-type]


@case
def what_is_given_in_place_of_named_parameters_is_named() -> None:
    model = torch.nn.Linear(4, 4)
    for given, words in (
        (model.parameters(), "no names, like those of model.parameters()"),
        (model, "not the model itself"),
        (torch.nn.Linear, "not the class itself"),
        ([1, 2], "not 1"),
    ):
        must_raise(TypeError, ["model.named_parameters()", words], lambda given=given: Compressor("topk", given))
    method = type(hvdcompress.get("topk"))
    must_raise(ValueError, ["TopK is a class", "'topk'"], lambda: Compressor(method, model.named_parameters()))
    must_raise(ValueError, ["not a Linear"], lambda: Compressor(model, model.named_parameters()))


@case
def the_class_in_place_of_an_instance_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=Compressor)
    must_raise(TypeError, ["is the class: give an instance"], lambda: model(torch.ones(1, 4)).sum().backward())
    del opt


@case
def other_operations_are_refused() -> None:
    for number, op in enumerate((hvd.Min, hvd.Max, hvd.Product)):
        for method in ("none", "topk"):
            params = parameters(f"op{number}.{method}")
            opt = optimizer(params, Compressor(method, params.items()), op=op)
            grads = gradients(params, 0, hvd.rank())
            must_raise(
                PeerError, ["Average", "Sum", "not supported"], lambda o=opt, p=params, g=grads: reduce_once(o, p, g)
            )


@case
def parameters_of_a_compressor_cannot_be_attached_to() -> None:
    """Their gradients would be averaged in the backward pass, too, and averages of averages look right."""
    store = f"file://{harness.OUT.resolve()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
    try:
        layer = torch.nn.Linear(40, 40)
        comp = Compressor("topk", layer.named_parameters())
        model = torch.nn.parallel.DistributedDataParallel(layer)
        must_raise(ValueError, ["'weight' would be exchanged twice", "Horovod"], lambda: ddp.attach(model, "topk"))
        del comp
    finally:
        torch.distributed.destroy_process_group()


@case
def nothing_happens_on_import() -> None:
    """No hook is registered that a program did not ask for, and Horovod's interface is implemented."""
    words = (
        "import os, torch; from torch.optim import optimizer; before = dict(os.environ); "
        "import hvdcompress.horovod.torch; "
        "assert not optimizer._global_optimizer_pre_hooks and dict(os.environ) == before"
    )
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    subprocess.run([sys.executable, "-c", words], check=True, env=alone)
    assert issubclass(Compressor, hvd.compression.Compressor)


@case
def adasum_is_refused() -> None:
    if hvd.size() & (hvd.size() - 1) or not hvd.mpi_enabled():
        raise Skip("Horovod's Adasum needs a power of two ranks, and MPI")
    params = parameters("adasum")
    opt = optimizer(params, Compressor("topk", params.items()), op=hvd.Adasum)

    def run() -> None:
        backward(params, gradients(params, 0, hvd.rank()))
        opt.step()

    must_raise(PeerError, ["Adasum"], run)


@case
def two_optimizers_on_one_compressor() -> None:
    """Steps of optimizers that share a Compressor: refused before a gradient is used that is on its way."""
    first, second = parameters("shared.first"), parameters("shared.second")
    both = {**first, **second}
    comp = Compressor("scalecom", both.items(), density=0.1)
    optimizers = [optimizer(params, comp) for params in (first, second)]
    backward(both, gradients(both, 0, hvd.rank()))
    before = {name: parameter.detach().clone() for name, parameter in both.items()}
    words = ["before all gradients", "shared.second.a", "a Compressor of its own"]
    harness.must_raise(ValueError, words, optimizers[0].step, hvd.allgather_object)
    assert all(torch.equal(parameter, before[name]) for name, parameter in both.items()), "no parameter has moved"


@case
def two_optimizers_that_are_synchronized_first() -> None:
    first, second = parameters("synced.first"), parameters("synced.second")
    both = {**first, **second}
    comp, control = Compressor("topk", both.items(), density=0.1), parameters("synced.control")
    alone = optimizer(control, Compressor("topk", control.items(), density=0.1))
    optimizers = [optimizer(params, comp) for params in (first, second)]
    for step in range(3):
        for parameter in both.values():
            parameter.grad = None
        backward(both, gradients(both, step, hvd.rank()))
        for one in optimizers:
            one.synchronize()
        for one in optimizers:
            with one.skip_synchronize():
                one.step()
        reduce_once(alone, control, gradients(control, step, hvd.rank()))
        with alone.skip_synchronize():
            alone.step()
    for name, parameter in first.items():
        assert torch.equal(parameter, control[name.replace("first", "control")]), name


@case
def a_parameter_that_horovod_does_not_know() -> None:
    """Added to the optimizer, or made trainable, when Horovod had put its hooks to the others."""
    params, late = parameters("late"), torch.nn.Parameter(torch.zeros(40, 40))
    frozen = params["late.b"].requires_grad_(False)
    comp = Compressor("topk", [*params.items(), ("late.added", late)], density=0.1)
    opt = optimizer(params, comp)
    trained = {name: parameter for name, parameter in params.items() if parameter is not frozen}
    for name, change in (
        ("late.added", lambda: opt.add_param_group({"params": [late]})),
        ("late.b", lambda: (opt.param_groups.pop(), frozen.requires_grad_(True))),
    ):
        opt.zero_grad()
        backward(trained, gradients(trained, 0, hvd.rank()))
        opt.step()  # as good as ever
        change()
        now = {**trained, name: late if name == "late.added" else frozen}
        opt.zero_grad()
        backward(now, gradients(now, 1, hvd.rank()))
        before = {n: parameter.detach().clone() for n, parameter in now.items()}
        harness.must_raise(ValueError, [f"'{name}'", "is not reduced"], opt.step, hvd.allgather_object)
        assert all(torch.equal(parameter, before[n]) for n, parameter in now.items()), "no parameter has moved"
