"""Compress what the ranks of one replica exchange: the reduce-scatter of gradients and the all-gather of parameters.

FSDP calls one object for each of the two, for each module that was given to ``fully_shard``
(``FSDPModule.set_custom_reduce_scatter``, ``set_custom_all_gather``). A rank passes a vector with all shards of the
module's gradients, and gets its shard of their sum; before each use of the module, it passes its shard of the
parameters, and gets all shards. ``parts/shards.py`` says what is sent.

The ranks use FSDP's process group. Nothing is agreed on at the end of an exchange: the state of a rank depends only on
what it has sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from hvdcompress.ddp.group import GroupCompressor
from hvdcompress.ddp.transport import peer_lost
from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.step import evaluate_loss_scale
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather as AllGatherOfMethod
from hvdcompress.method import Context, Method, TensorSpec, Workspace
from hvdcompress.parts import feedback, shards
from hvdcompress.plan import Bucket, Grouping, Plan, Program

#: renamed in PyTorch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PARAMETERS = " (parameters)"  #: end of the name under which reports have the parameters of a module

#: for each part of a module's shard: its number of values, and whether it is sent in float32
Parts = tuple[tuple[int, bool], ...]


class ShardCompressor(GroupCompressor):
    """Compresses gradients and parameters between the shards of a replica; made by :func:`hvdcompress.fsdp.attach`.

    Its state are the residuals, if the plan asks for error feedback, and the number of exchanges, on which random
    rounding depends. A residual has the size of a module's unsharded gradients, in float32, on every rank.

    Args:
        plan: the plan for gradients. Its rules match modules.
        parameters: the method of the parameters; its ``shard_codec`` is used.
        modules: {name: module}, each an ``FSDPModule``.
        group: the ranks of the replica.
        loss_scale, backend: as for :class:`hvdcompress.ddp.Compressor`.

    Attributes:
        plan: the plan for gradients.
        ledger: bytes and seconds so far, on this rank. ``steps`` counts reduce-scatters.

    Raises:
        ValueError: the plan is wrong, or a method needs more than shards.
    """

    driver = "FSDP"
    _grouping = Grouping(0, 0, False)
    _no_fallback_reason = "FSDP exchanges the gradients of each module by themselves"
    _refused: Mapping[str, str] = {
        "verify_every": "no rank has all parameters",
        "nodes": "the exchange between shards has one level",
        "bucket_elements": "FSDP exchanges the gradients of each module by themselves",
    }

    def __init__(
        self,
        plan: Plan,
        parameters: Method,
        modules: Mapping[str, Any],
        group: Any,
        loss_scale: float | Callable[[], float] = 1.0,
        backend: str = "auto",
    ):
        for what, method in (*(("gradients", each) for each in plan.methods), ("parameters", parameters)):
            _check(what, method)
        for name, module in modules.items():
            if any(isinstance(each, _Hook) for group in groups_of(module) for each in vars(group).values()):
                raise ValueError(f"{name}: its exchanges are compressed already; attach once, with all arguments")
        self._layouts: dict[str, list[Parts]] = {
            name: [_parts_of(module, plan.min_elements, trained) for trained in (True, False)]
            for name, module in modules.items()
        }
        world_size = dist.get_world_size(group)
        like = next(next(iter(modules.values())).parameters())
        policy = next(each for module in modules.values() for each in groups_of(module)).mp_policy
        zero = torch.zeros((), dtype=policy.reduce_dtype or policy.param_dtype or like.dtype, device=like.device)

        def vectors(which: int, end: str) -> dict[str, torch.Tensor]:
            # Expanded scalars: they have the vectors' sizes, but take no memory
            sizes = {name: world_size * sum(count for count, _ in both[which]) for name, both in self._layouts.items()}
            return {name + end: zero.expand(size) for name, size in sizes.items() if size}

        super().__init__(plan, group, vectors(0, "").items(), loss_scale, backend)  # type: ignore[arg-type]
        self._parameters = parameters
        program = Program(((0, parameters),))
        self._gathers = {}
        for name, vector in vectors(1, PARAMETERS).items():
            spec = TensorSpec(name, tuple(vector.shape))
            self._gathers[name] = Bucket(spec, (spec,), program)
        # Gradients and parameters may be exchanged at the same time, on streams of their own
        self._scratch: dict[str, dict[str, Any]] = {"gradients": {}, "parameters": {}}
        # Ranks of other replicas, or of other parts of a tensor, draw other random numbers
        self._seed = plan.seed + dist.get_process_group_ranks(group)[0]
        self._met = False
        self._waits: str | None = None
        for name, module in modules.items():
            if not all(method.identity for method in plan.methods):
                module.set_custom_reduce_scatter(_Hook(self._reduce_scatter, name))
            if not parameters.identity:
                module.set_custom_all_gather(_Hook(self._all_gather, name))

    def _warm_up(self, specs: Sequence[TensorSpec]) -> None:
        """Do nothing: the sums that the base class tries are other ones."""

    def _buckets(self) -> list[Bucket]:
        return [*self.buckets.values(), *(() if self._parameters.identity else self._gathers.values())]

    def _waits_for(self) -> str | None:
        return self._waits

    @torch.no_grad()
    def _reduce_scatter(self, name: str, output_tensor: Any, input_tensor: Any, group: Any, op: Any, **_: Any) -> None:
        """Sum a module's gradients over the ranks of a group; each rank gets its shard of the sum.

        Args:
            name: the module.
            output_tensor: receives the shard [m].
            input_tensor: the gradients [p·m].
            group: the process group.
            op: ``ReduceOp.SUM`` or ``AVG``, or a sum with a factor (PREMUL_SUM).
        """
        if name not in self._bucket_and_index:
            raise ValueError(f"{name}: all its parameters were frozen when it was attached; attach after unfreezing it")
        bucket = self._bucket_and_index[name][0]
        state = self.rank_state.next_step(bucket).state
        work, ctx = self._begin("gradients", bucket, input_tensor, group, state.step if state else 0)
        self.rank_state.note_begun(bucket)
        # Not the bucket's: small tensors are sent in float32 anyway, and gloo's own reduce-scatter sends more
        method = self.plan.program_of(bucket.spec).at(ctx.step)
        x = self._framework.flat(input_tensor.float())
        state = state or BucketState.zeros(bucket, x, work.ops)
        slots = state.slots
        if self.rank_state.paused or method.identity:
            self._observe(bucket.spec.name, Sent("AllToAll", None, input_tensor.nbytes, group=_ranks(ctx)))
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
        else:
            out = torch.empty_like(output_tensor, dtype=torch.float32) if _other(output_tensor) else output_tensor
            form = shards.format_of(method.shard_codec, self._fitting(name, 0, len(out)))
            factor, result = _factor(op, ctx.world_size), self._framework.flat(out)
            residual = slots.get(feedback.RESIDUAL)
            scale = evaluate_loss_scale(self.loss_scale)
            if residual is not None:
                x = self._accumulated(bucket, residual, x, scale, work.ops)
            communication = shards.reduce_scatter(x, result, factor, form, ctx, work, residual is not None)
            self._run(communication, f"{name}: gradients", ctx, group)
            if out is not output_tensor:
                output_tensor.copy_(out)
            if residual is not None:
                x *= np.float32(1.0 / scale)
                if method.feedback == "lowpass":
                    work.ops.blend(x, residual, method.beta)
                work.ops.keep_if(work.ops.all_finite(x), x, residual)
                slots = {**slots, feedback.RESIDUAL: x}
        if not self.rank_state.paused:
            self.rank_state.swap({bucket.spec.name: replace(state, slots=slots, step=ctx.step + 1)})
            self.ledger.steps += 1

    def _accumulated(self, bucket: Bucket, residual: Any, gradients: Any, scale: float, ops: Any) -> Any:
        """Return gradients + residual, in the memory of the next residual."""
        if len(gradients) != len(residual):
            raise ValueError(
                f"{bucket.spec.name}: only {len(gradients)} of {len(residual)} elements have a gradient; with error "
                "feedback, every parameter needs one in every step"
            )
        x = self.rank_state.memory[bucket.spec.name].second_buffer(feedback.RESIDUAL, residual, "float32", ops)
        ops.write(x, residual, scale)
        x += gradients
        return x

    @torch.no_grad()
    def _all_gather(self, name: str, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather a module's parameters from the ranks of a group.

        Args:
            name: the module.
            output_tensor: receives the shards of all ranks [p·m].
            input_tensor: this rank's shard [m], a part of ``output_tensor``.
            group: the process group.
            async_op: whether the caller can wait for a work handle. Decoding follows the collective on its stream, so
                this matters only if nothing is decoded.
        """
        bucket = self._gathers[name + PARAMETERS]
        work, ctx = self._begin("parameters", bucket, input_tensor, group, 0)
        for observer in self.rank_state.observers:
            observer.begun(self.rank_state.rank, bucket.spec.name, input_tensor.nbytes)
        if self.rank_state.paused or ctx.world_size != self.rank_state.world_size:
            self._observe(bucket.spec.name, Sent("AllGather", None, input_tensor.nbytes, group=_ranks(ctx)))
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        out = torch.empty_like(output_tensor, dtype=torch.float32) if _other(output_tensor) else output_tensor
        form = shards.format_of(self._parameters.shard_codec, self._fitting(name, 1, len(input_tensor)))
        x, result = self._framework.flat(input_tensor.float()), self._framework.flat(out)
        self._run(shards.all_gather(x, result, form, ctx, work), f"{name}: parameters", ctx, group)
        if out is not output_tensor:
            output_tensor.copy_(out)
        return None

    def _begin(
        self, what: str, bucket: Bucket, given: torch.Tensor, group: Any, step: int
    ) -> tuple[Workspace, Context]:
        """Meet the other ranks before the first exchange, and return workspace and context of an exchange."""
        if not given.is_floating_point():
            raise TypeError(
                f"{bucket.spec.name}: these parameters have an all-gather of their own, such as float8, so FSDP "
                "passes bytes, which cannot be compressed; leave out parameters="
            )
        if not self._met:
            facts = {"method": str(self.plan.program), **self.plan.to_dict(), "parameters": str(self._gathers)}
            self._meet(given.device, facts)
            self._met = True
        ops = self._framework.ops(self._framework.flat(given[:0].float()))
        ctx = Context(group.rank(), group.size(), step, bucket.spec, self._seed, needs_own=False)
        return Workspace(ops, self._scratch[what]), ctx

    def _fitting(self, name: str, which: int, length: int) -> Parts:
        """Return the parts of a shard; one part, if some parameters have no gradient in this step."""
        parts = self._layouts[name][which]
        return parts if sum(count for count, _ in parts) == length else ((length, False),)

    def _run(self, communication: Generator[Any, Iterable[Any], None], what: str, ctx: Context, group: Any) -> None:
        """Carry out the one collective of an exchange, and what comes before and after."""
        began = time.perf_counter()
        collective = next(communication)
        payload = torch.as_tensor(collective.x)
        is_gather = isinstance(collective, AllGatherOfMethod)
        received = payload.new_empty(len(payload) * (ctx.world_size if is_gather else 1))
        sends = time.perf_counter()
        self._waits = f"{'all-gather' if is_gather else 'all-to-all'} of {what}"
        try:
            if is_gather:
                _all_gather(received, payload, group=group)
            else:
                dist.all_to_all_single(received, payload, group=group)
        except RuntimeError as error:
            raise peer_lost(self.rank_state.rank, error) from error
        finally:
            self._waits = None
        decodes = time.perf_counter()
        with contextlib.suppress(StopIteration):
            communication.send([self._framework.flat(each) for each in received.view(ctx.world_size, -1)])
        ended = time.perf_counter()
        name, rank = ctx.spec.name, self.rank_state.rank
        self._observe(name, Sent(type(collective).__name__, collective.x, len(payload), group=_ranks(ctx)))
        for observer in self.rank_state.observers:
            observer.encoded(rank, name, sends - began)
            observer.waited(rank, decodes - sends)
            observer.decoded(rank, name, ended - decodes)

    def _observe(self, name: str, what: Sent) -> None:
        for observer in self.rank_state.observers:
            observer.sent(self.rank_state.rank, name, what)


class _Hook(ReduceScatter, AllGather):
    """A function of a Compressor in the form in which FSDP calls it.

    Args:
        run: the function, whose first argument is the module's name.
        name: the module's name.
    """

    def __init__(self, run: Callable[..., Any], name: str):
        self.run = run
        self.name = name

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or an output of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.name, *args, **kwargs)


def _check(what: str, method: Method) -> None:
    """Raise ValueError if a method cannot exchange shards."""
    if method.identity:
        return
    if method.shard_codec is None:
        raise ValueError(
            f"{what}: {method.id} cannot send shards by themselves in a fixed number of bytes; use blockwise (without "
            "rotation), qsgd, natural, fp16, bf16 or none"
        )
    if what == "parameters" and method.feedback != "none":
        raise ValueError('parameters: a residual would change the values that ranks compute with; use feedback="none"')


def groups_of(module: Any) -> Sequence[Any]:
    """Return FSDP's internal parameter groups of a module."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # newer versions of PyTorch have a list
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group]


def _parts_of(module: Any, min_elements: int, trained: bool) -> Parts:
    """Return the parts of a module's shard: those of all its parameters, or of those that require a gradient."""
    parameters = [each for group in groups_of(module) for each in group.fsdp_params]
    return tuple(
        (each.padded_sharded_param_size.numel(), each.sharded_param.numel() < min_elements)
        for each in parameters
        if each.sharded_param.requires_grad or not trained
    )


def _other(tensor: torch.Tensor) -> bool:
    """Return whether results must be converted to the tensor's dtype."""
    return tensor.dtype != torch.float32


def _ranks(ctx: Context) -> Group:
    return Group(ctx.rank, ctx.world_size)


def _factor(op: Any, world_size: int) -> float:
    """Return the factor of a sum over ranks."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    return 1.0 if op == dist.ReduceOp.SUM else float(op.__getstate__()[1])
