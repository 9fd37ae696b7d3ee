"""Tests of the PyTorch driver alone: what is refused, with one message on all ranks, and no hang."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

import hvdcompress
from hvdcompress.horovod.torch import Compressor, PeerError
from tests.ranks.drivers.torch import backward
from tests.ranks.torch_model import gradients, optimizer, parameters, reduce_once
from tests.ranks.torch_ranks import must_raise

pytestmark = pytest.mark.drivers("torch")


def test_a_gradient_that_belongs_to_no_parameter() -> None:
    params = parameters("stranger")
    comp = Compressor("topk", params.items())
    params["stranger.x"] = torch.nn.Parameter(torch.zeros(64, 64))
    opt, grads = optimizer(params, comp), gradients(params, 0)
    must_raise(PeerError, ["named_parameters", "(64, 64)"], lambda: reduce_once(opt, params, grads))


def test_a_parameter_that_was_frozen_and_one_that_is_on_one_rank_only() -> None:
    params = parameters("before")
    params["before.a"].requires_grad_(False)
    comp = Compressor("topk", params.items())
    params["before.a"].requires_grad_(True)
    opt, grads = optimizer(params, comp), gradients(params, 0)
    must_raise(PeerError, ["'before.a' was frozen when"], lambda: reduce_once(opt, params, grads))
    other = parameters("onerank")
    opt = optimizer(other, Compressor("topk", other.items()))
    reduce_once(opt, other, gradients(other, 0))
    other["onerank.a"].requires_grad_(hvd.rank() != 1)
    names = [n for n, p in other.items() if p.requires_grad]
    words = ["ranks disagree: tensor 'onerank.a'", "frozen' on rank 1"]
    must_raise(PeerError, words, lambda: reduce_once(opt, other, gradients(other, 1), names))


def test_complex_parameters_are_refused_by_name() -> None:
    named = {"real": torch.nn.Parameter(torch.zeros(3)), "odd": torch.nn.Parameter(torch.zeros(3, dtype=torch.cfloat))}
    must_raise(ValueError, ["'odd'", "complex64"], lambda: Compressor("topk", named.items()))


def test_sparse_gradients_are_refused() -> None:
    for as_dense in (False, True):
        embedding = torch.nn.Embedding(200, 16, sparse=True)
        named = [(f"sparse{as_dense}.weight", embedding.weight)]
        comp, sgd = Compressor("topk", named), torch.optim.SGD(embedding.parameters(), lr=0.1)
        opt = hvd.DistributedOptimizer(sgd, named, compression=comp, sparse_as_dense=as_dense)

        def run(opt=opt, embedding=embedding) -> None:
            embedding(torch.arange(8)).sum().backward()
            opt.step()

        must_raise((ValueError, PeerError), [f"sparse{as_dense}.weight", "sparse"], run)


def test_wrong_arguments_are_named() -> None:
    """Such as the model in place of its named parameters, and a class in place of an instance."""
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
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=Compressor)
    must_raise(TypeError, ["is the class: give an instance"], model(torch.ones(1, 4)).sum().backward)
    del opt


def test_other_operations_are_refused() -> None:
    for op, method in ((hvd.Min, "none"), (hvd.Max, "topk"), (hvd.Product, "topk")):
        params = parameters(f"operation{op}")
        opt, grads = optimizer(params, Compressor(method, params.items()), op=op), gradients(params, 0)
        words = ["Average", "Sum", "not supported"]
        must_raise(PeerError, words, lambda o=opt, p=params, g=grads: reduce_once(o, p, g))


def test_adasum_is_refused() -> None:
    if hvd.size() & (hvd.size() - 1) or not hvd.mpi_enabled():
        pytest.skip("Horovod's Adasum needs a power of two ranks, and MPI")
    params = parameters("adasum")
    opt = optimizer(params, Compressor("topk", params.items()), op=hvd.Adasum)

    def run() -> None:
        backward(params, gradients(params, 0))
        opt.step()

    must_raise(PeerError, ["Adasum"], run)


def test_two_optimizers_on_one_compressor() -> None:
    """Refused before a gradient is used that is on its way."""
    first, second = parameters("shared.first"), parameters("shared.second")
    both = {**first, **second}
    comp = Compressor("scalecom", both.items(), density=0.1)
    optimizers = [optimizer(params, comp) for params in (first, second)]
    backward(both, gradients(both, 0))
    must_raise(ValueError, ["before all gradients", "shared.second.a", "a Compressor of its own"], optimizers[0].step)
    assert not any(parameter.any() for parameter in both.values()), "no parameter has moved"


def test_a_parameter_that_horovod_does_not_know() -> None:
    """Added to the optimizer, or made trainable, when Horovod had put its hooks to the others."""
    for name, change in (
        ("late.added", lambda opt, parameter: opt.add_param_group({"params": [parameter]})),
        ("late.frozen", lambda opt, parameter: parameter.requires_grad_(True)),
    ):
        params, late = parameters(name), torch.nn.Parameter(torch.zeros(40, 40), requires_grad=name == "late.added")
        known = params if name == "late.added" else {**params, name: late}
        opt = optimizer(known, Compressor("topk", {**params, name: late}.items(), density=0.1))
        backward(params, gradients(params, 0))
        opt.step()
        change(opt, late)
        opt.zero_grad()
        now = {**params, name: late}
        backward(now, gradients(now, 1))
        before = {n: parameter.detach().clone() for n, parameter in now.items()}
        must_raise(ValueError, [f"'{name}'", "is not reduced"], opt.step)
        assert all(torch.equal(parameter, before[n]) for n, parameter in now.items()), "no parameter has moved"
