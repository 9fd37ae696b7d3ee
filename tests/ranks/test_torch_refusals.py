"""Tests of what Horovod for PyTorch refuses: one message on all ranks, and no rank hangs."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

import hvdcompress
from hvdcompress.horovod.torch import Compressor, PeerError
from tests.ranks.drivers.torch import backward
from tests.ranks.torch_model import SHAPES, optimizer, parameters, reduce_once

pytestmark = pytest.mark.drivers("torch")


def test_parameter_without_a_name_is_refused(driver):
    params = parameters()
    comp = Compressor("topk", params.items())
    params["unnamed"] = torch.nn.Parameter(torch.zeros(64, 64))
    opt, grads = optimizer(params, comp), driver.gradients(0, {**SHAPES, "unnamed": (64, 64)})
    driver.must_raise(PeerError, ["named_parameters", "(64, 64)"], lambda: reduce_once(opt, params, grads))


def test_parameter_that_was_frozen_when_the_compressor_was_made_is_refused(driver):
    params = parameters()
    params["a"].requires_grad_(False)
    comp = Compressor("topk", params.items())
    params["a"].requires_grad_(True)
    opt, grads = optimizer(params, comp), driver.gradients(0, SHAPES)
    driver.must_raise(PeerError, ["'a' was frozen when"], lambda: reduce_once(opt, params, grads))


def test_parameter_that_is_frozen_on_one_rank_is_refused(driver):
    params = parameters()
    opt = optimizer(params, Compressor("topk", params.items()))
    grads = driver.gradients(0, SHAPES)
    reduce_once(opt, params, grads)
    params["a"].requires_grad_(driver.rank != 1)
    names = [name for name, parameter in params.items() if parameter.requires_grad]
    words = ["ranks disagree: plan key 'frozen'", "['a'] on rank 1"]
    driver.must_raise(PeerError, words, lambda: reduce_once(opt, params, grads, names))


def test_complex_parameter_is_refused_by_name(driver):
    named = [("real", torch.nn.Parameter(torch.zeros(3))), ("odd", torch.nn.Parameter(torch.zeros(3) * 1j))]
    driver.must_raise(ValueError, ["'odd'", "complex64"], lambda: Compressor("topk", named))


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_refused(driver, as_dense):
    embedding = torch.nn.Embedding(200, 16, sparse=True)
    named = [(f"sparse{as_dense}.weight", embedding.weight)]
    comp, sgd = Compressor("topk", named), torch.optim.SGD(embedding.parameters(), lr=0.1)
    opt = hvd.DistributedOptimizer(sgd, named, compression=comp, sparse_as_dense=as_dense)

    def run():
        embedding(torch.arange(8)).sum().backward()
        opt.step()

    driver.must_raise((ValueError, PeerError), [f"sparse{as_dense}.weight", "sparse"], run)


def test_wrong_arguments_are_named(driver):
    """Such as the model in place of its named parameters, and a class in place of an instance."""
    model = torch.nn.Linear(4, 4)
    for given, words in (
        (model.parameters(), "no names, like those of model.parameters()"),
        (model, "not the model or its class"),
        (torch.nn.Linear, "not the model or its class"),
        ([1, 2], "not 1"),
    ):
        words = ["model.named_parameters()", words]
        driver.must_raise(TypeError, words, lambda given=given: Compressor("topk", given))
    for method, words in (
        (type(hvdcompress.get_method("topk")), ["TopK is a class", "'topk'"]),
        (model, ["not a Linear"]),
    ):
        driver.must_raise(ValueError, words, lambda method=method: Compressor(method, model.named_parameters()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=Compressor)
    driver.must_raise(TypeError, ["is the class: give an instance"], model(torch.ones(1, 4)).sum().backward)
    del opt


@pytest.mark.parametrize("op,method", [("Min", "none"), ("Max", "topk"), ("Product", "topk")])
def test_other_operations_are_refused(driver, op, method):
    params = parameters()
    opt = optimizer(params, Compressor(method, params.items()), op=getattr(hvd, op))
    grads = driver.gradients(0, SHAPES)
    driver.must_raise(PeerError, ["Average", "Sum", "not supported"], lambda: reduce_once(opt, params, grads))


def test_adasum_is_refused(driver):
    if driver.world_size & (driver.world_size - 1) or not hvd.mpi_enabled():
        pytest.skip("Horovod's Adasum needs a power of two ranks, and MPI")
    params = parameters()
    opt = optimizer(params, Compressor("topk", params.items()), op=hvd.Adasum)

    def run():
        backward(params, driver.gradients(0, SHAPES))
        opt.step()

    driver.must_raise(PeerError, ["Adasum"], run)


def test_two_optimizers_on_one_compressor_are_refused(driver):
    """Before a gradient that is in flight is used."""
    shapes = {f"{half}.{name}": shape for half in ("first", "second") for name, shape in SHAPES.items()}
    params = parameters(shapes)
    comp = Compressor("scalecom", params.items(), density=0.1)
    first, _second = (
        optimizer({name: parameter for name, parameter in params.items() if name.startswith(half)}, comp)
        for half in ("first", "second")
    )
    backward(params, driver.gradients(0, shapes), list(shapes))
    driver.must_raise(ValueError, ["before all gradients", "second.a", "a Compressor of its own"], first.step)
    assert not any(parameter.any() for parameter in params.values()), "no parameter has moved"


@pytest.mark.parametrize("is_added", [True, False])
def test_parameter_that_horovod_does_not_know_is_refused(driver, is_added):
    """Added to the optimizer, or made trainable, after Horovod has registered its hooks."""
    params, late = parameters(), torch.nn.Parameter(torch.zeros(40, 40), requires_grad=is_added)
    everything = {**params, "late": late}
    opt = optimizer(params if is_added else everything, Compressor("topk", everything.items(), density=0.1))
    backward(params, driver.gradients(0, SHAPES))
    opt.step()
    if is_added:
        opt.add_param_group({"params": [late]})
    late.requires_grad_(True)
    opt.zero_grad()
    backward(everything, driver.gradients(1, {**SHAPES, "late": (40, 40)}))
    before = {name: parameter.detach().clone() for name, parameter in everything.items()}
    driver.must_raise(ValueError, ["'late'", "is not reduced"], opt.step)
    assert all(torch.equal(parameter, before[n]) for n, parameter in everything.items()), "no parameter has moved"
