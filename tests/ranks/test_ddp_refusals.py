"""Tests of the models, optimizers and options that the DDP driver refuses, with one message on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from tests.ranks.ddp_model import SHAPES, backward, wrapped
from tests.ranks.drivers.ddp import Net

pytestmark = pytest.mark.drivers("ddp")


def test_model_without_ddp_or_with_two_is_refused(driver):
    words = ["no DistributedDataParallel", "wrap it first"]
    driver.must_raise(ValueError, words, lambda: ddp.attach(Net(SHAPES), "topk"))
    two = torch.nn.ModuleList(DistributedDataParallel(Net(SHAPES)) for _ in range(2))
    driver.must_raise(ValueError, ["2 DistributedDataParallel modules"], lambda: ddp.attach(two, "topk"))


def test_float8_parameter_is_refused_by_name(driver):
    model = torch.nn.ParameterDict({"ok": torch.zeros(4, 4), "wrong": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    driver.must_raise(ValueError, ["'wrong'", "float8_e4m3fn"], lambda: ddp.hook(model, "topk"))


@pytest.mark.parametrize("name,by_hook", [("frozen", True), ("a", False), ("new", False)])
def test_parameter_that_is_trained_later_is_refused_by_name(driver, name, by_hook):
    """Unfrozen, replaced or added after DDP was made: DDP does not reduce its gradient. Evaluation is allowed."""
    net = Net(SHAPES)
    net.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    model, compressor = wrapped(net, by_hook)
    gradients = driver.gradients(0, SHAPES)
    backward(model, gradients)
    net.register_parameter(name, net.frozen if name == "frozen" else torch.nn.Parameter(torch.zeros(37, 41)))
    net.frozen.requires_grad_(name == "frozen")
    with torch.no_grad():
        model(gradients)
    driver.must_raise(RuntimeError, [repr(name), "will not reduce"], lambda: model(gradients))
    compressor.close()


@pytest.mark.parametrize("ignored", [False, True])
def test_verify_every_compares_frozen_parameters(driver, ignored):
    """But not parameters that DDP is told to ignore."""
    net = Net(SHAPES)
    net.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    model = DistributedDataParallel(net)
    net._ddp_params_and_buffers_to_ignore = ["frozen"] if ignored else []
    net.frozen.data.fill_(driver.rank)  # after DDP has made them equal
    compressor = ddp.attach(model, "topk", density=0.05, verify_every=1)
    if ignored:
        backward(model, driver.gradients(0, SHAPES))
    else:
        driver.must_raise(ddp.PeerError, ["frozen"], lambda: backward(model, driver.gradients(0, SHAPES)))
    compressor.close()


def test_second_communication_hook_is_refused(driver):
    model, stock = (DistributedDataParallel(Net(SHAPES)) for _ in range(2))
    first = ddp.attach(model, "topk")
    driver.must_raise(ValueError, ["was called on this model already"], lambda: ddp.attach(model, "fp16"))
    driver.must_raise(ValueError, ["cannot be attached"], lambda: ddp.attach(stock, first))
    stock._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    words = ["built-in communication hook", "DDP takes one"]
    driver.must_raise(ValueError, words, lambda: ddp.attach(stock, "topk"))


def test_optimizer_inside_the_backward_pass_is_refused(driver):
    """Registered before or after ``ddp.attach``."""
    words = ["_apply_optimizer_in_backward", "its own hook"]
    before, later, fused = (DistributedDataParallel(Net(SHAPES)) for _ in range(3))
    _apply_optimizer_in_backward(torch.optim.SGD, before.parameters(), {"lr": 0.1})
    driver.must_raise(ValueError, words, lambda: ddp.attach(before, "topk"))
    ddp.attach(later, "topk")
    _apply_optimizer_in_backward(torch.optim.SGD, later.parameters(), {"lr": 0.1})
    driver.must_raise(ValueError, words, lambda: later(driver.gradients(0, SHAPES)))
    fused._register_fused_optim(torch.optim.SGD, 0.1)
    driver.must_raise(ValueError, ["_register_fused_optim", "DDP takes one"], lambda: ddp.attach(fused, "topk"))


def test_options_that_bypass_the_hook_are_refused(driver):
    module = Net(SHAPES)
    delayed = {"delay_all_reduce_named_params": [("a", module.a)], "param_to_hook_all_reduce": module.b}
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    mixed = DistributedDataParallel(module)
    mixed.mixed_precision = object()  # DDP wants a GPU for it
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        python = DistributedDataParallel(Net(SHAPES))
    for words, model in (
        (["delay_all_reduce_named_params"], DistributedDataParallel(module, **delayed)),
        (["skip_all_reduce_unused_params"], DistributedDataParallel(module, **skipping)),
        (["mixed_precision=", "torch.autocast"], mixed),
        (["python_reducer"], python),
    ):
        driver.must_raise(ValueError, words, lambda m=model: ddp.attach(m, "topk"))


def test_no_sync_with_a_static_graph_is_refused(driver):
    model = DistributedDataParallel(Net(SHAPES), static_graph=True)
    ddp.attach(model, "topk")
    with model.no_sync():
        driver.must_raise(RuntimeError, ["static_graph", "no_sync"], lambda: model(driver.gradients(0, SHAPES)))
    backward(model, driver.gradients(0, SHAPES))


def test_join_is_refused(driver):
    model, _ = wrapped(Net(SHAPES))

    def join():
        with model.join():
            model(driver.gradients(0, SHAPES))

    driver.must_raise(RuntimeError, ["join()"], join)


def test_sparse_gradients_are_refused(driver):
    model = DistributedDataParallel(torch.nn.Embedding(500, 10, sparse=True))
    ddp.attach(model, "topk")
    loss = model(torch.tensor([1, 2])).sum()
    driver.must_raise(Exception, ["sparse gradients", "weight"], loss.backward, same=False)
