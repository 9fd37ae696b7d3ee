"""Cases of the torch driver, run with those of ``cases.py``: errors are one message on all ranks, and no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import horovod.torch as hvd
import torch
from harness import Skip, case
from torch_model import SHAPES, backward, gradients, optimizer, parameters, reduce_once

from hvdcompress.torch import Compressor, PeerError


def must_raise(kind: Any, words: list[str], run: Callable[[], object]) -> None:
    harness.must_raise(kind, words, run, hvd.allgather_object)


@case
def different_hyperparameters() -> None:
    params = parameters("differ")
    comp = Compressor("topk", params.items(), density=0.01 if hvd.rank() == 0 else 0.02)
    opt = optimizer(params, comp)
    words = ["density", "0.01", "0.02", "rank 1"]
    must_raise(PeerError, words, lambda: reduce_once(opt, params, gradients(params, 0, 0)))


@case
def different_methods() -> None:
    for first in ("scalecom", "none"):
        params = parameters(f"methods.{first}")
        opt = optimizer(params, Compressor(first if hvd.rank() == 0 else "topk", params.items()))
        grads = gradients(params, 0, hvd.rank())
        must_raise(PeerError, ["'method'", "topk", first], lambda o=opt, p=params, g=grads: reduce_once(o, p, g))


@case
def different_models() -> None:
    shapes = {**SHAPES, "e": (8, 131 + hvd.rank())}
    params = parameters("shapes", shapes=shapes)
    comp = Compressor("topk", params.items())
    opt = optimizer(params, comp)
    must_raise(PeerError, ["shapes.e", "131", "132"], lambda: reduce_once(opt, params, gradients(params, 0, 0)))


@case
def ranks_at_different_steps() -> None:
    """A rank's warm-up is over, the others' is not: their collectives differ, of which Horovod complains first."""
    params = parameters("ahead")
    settings = {"density": 0.01, "warmup": {"steps": 2}}
    ahead = Compressor("topk", params.items(), **settings)
    opt = optimizer(params, ahead)
    for step in range(2):
        reduce_once(opt, params, gradients(params, step, hvd.rank()))
    fresh = parameters("ahead")
    comp = Compressor("topk", fresh.items(), **settings)
    if hvd.rank() == 1:
        comp.load_state_dict(ahead.state_dict())
    opt = optimizer(fresh, comp)
    words = ["ranks disagree on the step"]
    must_raise(PeerError, words, lambda: reduce_once(opt, fresh, gradients(fresh, 2, hvd.rank())))


@case
def a_rank_that_raises_inside_compress() -> None:
    for step_of_failure in (0, 2):
        params = parameters(f"raises{step_of_failure}")
        comp = Compressor("topk", params.items())
        opt = optimizer(params, comp)
        for step in range(step_of_failure):
            reduce_once(opt, params, gradients(params, step, hvd.rank()))
        if hvd.rank() == 1:

            def fail(*_: object) -> None:
                raise FloatingPointError("a fault made by the test")

            for bucket in comp.buckets.values():
                object.__setattr__(bucket.program.main, "encode", fail)
        try:
            must_raise(
                PeerError,
                ["a fault made by the test", "rank 1", f"raises{step_of_failure}.", "topk", "round 0"],
                lambda p=params, o=opt, s=step_of_failure: reduce_once(o, p, gradients(p, s, hvd.rank())),
            )
        finally:
            if hvd.rank() == 1:
                for bucket in comp.buckets.values():
                    bucket.program.main.__dict__.pop("encode", None)


@case
def a_gradient_that_belongs_to_no_parameter() -> None:
    params = parameters("stranger")
    stranger = {"stranger.x": torch.nn.Parameter(torch.zeros(64, 64))}
    comp = Compressor("topk", params.items())
    opt = optimizer({**params, **stranger}, comp)
    grads = gradients({**params, **stranger}, 0, hvd.rank())
    must_raise(PeerError, ["named_parameters", "(64, 64)"], lambda: reduce_once(opt, {**params, **stranger}, grads))


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
def other_operations_are_refused() -> None:
    for number, op in enumerate((hvd.Min, hvd.Max, hvd.Product)):
        for method in ("none", "topk"):
            params = parameters(f"op{number}.{method}")
            opt = optimizer(params, Compressor(method, params.items()), op=op)
            grads = gradients(params, 0, hvd.rank())
            must_raise(PeerError, ["Average", "Sum", "refused"], lambda o=opt, p=params, g=grads: reduce_once(o, p, g))


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
