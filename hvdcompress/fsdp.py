"""FSDP2: dense between the shards of a model, compressed between its replicas.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])                         # layers first, as always
    from hvdcompress import fsdp

    fsdp.attach(model, "scalecom", replicas=mesh["replicate"], density=0.01)

``fully_shard`` over the shards alone reduces gradients within each replica, by a dense reduce-scatter. What a rank has
then, one flat vector for each module that was given to ``fully_shard``, goes to an *all-reduce hook*
(``FSDPModule.set_all_reduce_hook``), which here averages it over the ranks that hold the same shard in the other
replicas. With a mesh that has the replicas, too, PyTorch reduces over them by itself, before any hook.

Gradients come one after the other, and each is waited for: a vector's exchange is a step of its own, by the module's
name. A flat vector has no rows and columns, so methods that want matrices leave it dense.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvdcompress._torch.compressor import TensorCompressor
from hvdcompress._torch.optimizers import Optimizers, trains
from hvdcompress.ddp.transport import ProcessGroupTransport, joined
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.step import Agree, Step
from hvdcompress.method import Method
from hvdcompress.plan import IN_ORDER, Plan, plan_of

__all__ = ["Compressor", "attach"]

ROOT = "(root)"  #: the name of the outermost module's own vector: of what is in no module inside of it


class Shard(NamedTuple):
    """What a rank holds of a sharded model.

    Attributes:
        vectors: by module, a tensor like the one that is reduced: flat, of that size, dtype and device.
        parameters: by module, the parameters whose gradients its vector has.
        number: of this rank among the shards of a replica, from 0.
        num_shards: number of shards of a replica.
    """

    vectors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, list[torch.nn.Parameter]]
    number: int
    num_shards: int


class Compressor(TensorCompressor):
    """One shard's compression between replicas; :func:`attach` makes it.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        shard: what this rank holds of the model.
        replicas: the process group of the ranks that hold the same shard.
        loss_scale: a number, or a function such as ``scaler.get_scale``, by which the loss was multiplied.
        optimizer: the optimizer, or several, whose momentum is adapted where error feedback delays gradients. Without
            it, an optimizer is found when it takes its first step. "auto" sets beta1 of Adam and its relatives to 0.
        ops: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        settings: hyper-parameters and plan keys.

    Attributes:
        plan: what each module's vector gets.
        ledger: bytes and seconds so far, on this rank, over the links between replicas; ``steps`` counts vectors.

    Raises:
        ValueError: the plan is wrong, joins tensors, or has ``verify_every`` or ``cosine_every``.
    """

    driver = "FSDP"
    never_falls_back = "under FSDP each module's gradients are exchanged in a step of their own"
    grouping = IN_ORDER

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        shard: Shard,
        replicas: Any,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        optimizer: Optimizers | None = None,
        ops: str = "auto",
        **settings: Any,
    ):
        plan = plan_of(method, **{"bucket_elements": 0, **settings})
        if plan.verify_every:
            raise ValueError(
                "verify_every must be 0: under FSDP the Compressor has no parameters, but shards' gradients"
            )
        if plan.cosine_every:
            raise ValueError(
                "cosine_every must be 0: under FSDP each module's gradients are exchanged in a step of their own"
            )
        if plan.bucket_elements:
            raise ValueError("bucket_elements must be 0: FSDP waits for each module's gradients by themselves")
        if plan.clip_norm is not None:
            raise ValueError(
                "clip_norm must be null: under FSDP each module's gradients are exchanged in a step of their own"
            )
        rank = dist.get_rank(replicas)
        world = dist.get_world_size(replicas)
        super().__init__(plan, rank, world, shard.vectors.items(), loss_scale, ops)  # type: ignore[arg-type]
        self.shard = shard
        self._parent = replicas
        self._transport: ProcessGroupTransport | None = None
        self._step: Step | None = None  # under way
        self._waiting: dict[str, torch.Tensor] = {}  # sums of vectors that are not to be reduced yet, by module
        self._trained = {id(parameter) for members in shard.parameters.values() for parameter in members}
        if optimizer is not None:
            self.use_optimizer(optimizer)

    def _tensors(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        return self.shard.parameters

    def notice(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to take a step; see :meth:`TensorCompressor.notice`. It ends one of ours."""
        super().notice(optimizer)
        if trains(optimizer, self._trained):
            self.local.end_round()

    def close(self) -> None:
        """Free its process group. Nothing may be under way."""
        if self._transport:
            self._transport.close()

    def _is_under_way(self) -> bool:
        return self._step is not None

    def _waits_for(self) -> str | None:
        step = self._step
        return step.waits_for() if step else None

    def save(self, folder: str | Path) -> Path:
        """Write this rank's state to its own file, in a folder of its shard in ``folder``; call it on every rank."""
        return super().save(self._folder(folder))

    def load(self, folder: str | Path) -> None:
        """Read this rank's state; states of another number of replicas are re-sharded.

        Raises:
            FileNotFoundError: the folder holds no saved state, or not that of all replicas, or of other shards.
            ValueError: a file is damaged, or the state does not fit; nothing is changed then.
        """
        super().load(self._folder(folder))

    def _folder(self, folder: str | Path) -> Path:
        return Path(folder) / f"shard-{self.shard.number}-of-{self.shard.num_shards}"

    @torch.no_grad()
    def receive(self, module: Any, name: str, gradient: torch.Tensor) -> None:
        """Take a module's vector from FSDP, which calls its hook after ``set_requires_all_reduce(False)``, too.

        Then it waits here for the next one, and is added to that, as FSDP does where it reduces over replicas itself.
        """
        if not all(group.all_reduce_grads for group in _groups(module)):
            before = self._waiting.get(name)
            self._waiting[name] = gradient.clone() if before is None else before.add_(gradient)
            gradient.zero_()
            return
        if name in self._waiting:
            gradient.add_(self._waiting.pop(name))
        self.reduce(name, gradient)

    @torch.no_grad()
    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        """Average a module's vector over the replicas, in its place.

        Raises:
            PeerError: a replica failed, or replicas disagree; on every one.
        """
        if self._transport is None:
            self._transport = joined(self._parent, gradient.device, self.watchdog)
        transport = self._transport
        transport.begin()
        step = self._step = self._new_step(Collectives(transport, self.local.observers), Agree.FIRST_AND_LAST)
        step.factor = 1.0 / self.local.world
        with step.errors_wait:
            step.loss_scale = self.current_loss_scale()
            if len(gradient) != len(self.parameters[name]):
                raise ValueError(
                    f"{name}: {len(gradient)} of {len(self.parameters[name])} elements have a gradient; a parameter "
                    "that a step does not use does not go with compression under FSDP"
                )
        bucket, index = self._place[name]
        try:
            step.run(lambda: step.add(bucket, [index], [self.framework.vector(step, bucket, gradient)]))
        finally:
            self._step = None
        self.ledger.steps += step.finite


def attach(
    model: torch.nn.Module, method: str | Method | Plan | Mapping[str, Any], *, replicas: Any, **settings: Any
) -> Compressor:
    """Compress what the replicas of a sharded model exchange.

    Call it on every rank, after ``fully_shard(…, mesh=mesh["shard"])`` and before the first backward pass. Replicas
    must start from the same weights.

    Args:
        model: an ``FSDPModule``, sharded over the ranks of one replica alone.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict. Rules see the
            names of modules that were given to ``fully_shard``.
        replicas: the mesh of one dimension, or the process group, of the ranks that hold the same shard.
        settings: ``optimizer``, ``loss_scale``, ``ops``, hyper-parameters and plan keys.

    Returns:
        The Compressor.

    Raises:
        ValueError: the model is not sharded, or over more than one dimension; the plan is wrong.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    sizes: dict[str, int] = {}
    members: dict[str, list[torch.nn.Parameter]] = {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        owners = [module for module in modules if not module or name.startswith(f"{module}.")]
        if not owners:
            raise ValueError(f"{name} is in no FSDPModule: call fully_shard() first")
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != 1:
            raise ValueError(
                f"{name} must be sharded over one dimension, the ranks of a replica (mesh=mesh['shard']). With a mesh "
                "that has the replicas, too, PyTorch reduces over them itself, and nothing is left to do"
            )
        owner = max(owners, key=len)
        sizes[owner] = sizes.get(owner, 0) + _elements(parameter)
        members.setdefault(owner or ROOT, []).append(parameter)
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    like = trained[0][1].to_local().detach()
    mesh = trained[0][1].device_mesh
    vectors = {owner or ROOT: like.new_zeros(()).expand(size) for owner, size in sizes.items()}  # without memory
    group = replicas if isinstance(replicas, dist.ProcessGroup) else replicas.get_group()
    shard = Shard(vectors, members, mesh.get_local_rank(), mesh.size())
    compressor = Compressor(method, shard, group, **settings)
    for owner in sizes:
        modules[owner].set_all_reduce_hook(functools.partial(compressor.receive, modules[owner], owner or ROOT))
    return compressor


def _groups(module: Any) -> Sequence[Any]:
    """FSDP's groups of the parameters of a module."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return several if several is not None else [state._fsdp_param_group]


def _elements(parameter: Any) -> int:
    """The elements of a parameter's shard, as every rank has them: rows that do not divide are filled up."""
    dim = parameter.placements[0].dim
    shards = parameter.device_mesh.size()
    return prod(-(-size // shards) if at == dim else size for at, size in enumerate(parameter.shape))
