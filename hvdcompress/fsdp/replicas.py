"""Compress gradients between the replicas of a sharded model.

``fully_shard`` over the shard dimension reduces gradients within each replica, with a dense reduce-scatter. Afterwards
a rank has one flat gradient vector for each module that was given to ``fully_shard``. FSDP passes this vector to an
*all-reduce hook* (``FSDPModule.set_all_reduce_hook``). The Compressor's hook averages the vector, compressed, over the
ranks that hold the same shard in the other replicas. A mesh that contains the replica dimension does not work, because
PyTorch then reduces over the replicas itself, before any hook.

FSDP waits for the hook of each module before it goes on, so each vector is exchanged in a step of its own, under the
module's name. A flat vector has no rows and columns, so methods that need matrices, such as powersgd, leave it dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch

from hvdcompress._torch.optimizers import Waiting, trains
from hvdcompress.ddp.group import GroupCompressor
from hvdcompress.engine.step import Step
from hvdcompress.fsdp.shards import ShardCompressor, groups_of
from hvdcompress.method import Method
from hvdcompress.plan import Plan, plan_of
from hvdcompress.settings import Settings

ONE_STEP_PER_MODULE = "under FSDP the gradients of each module are exchanged in a step of their own"


class Shard(NamedTuple):
    """The part of a sharded model that this rank holds.

    Attributes:
        vectors: by module name, a tensor with the size [n], dtype and device of the module's gradient vector.
        parameters: by module name, the parameters whose gradients make up the vector.
        number: index of this shard within its replica, from 0.
        num_shards: number of shards of a replica.
    """

    vectors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, list[torch.nn.Parameter]]
    number: int
    num_shards: int


class Compressor(GroupCompressor):
    """Compresses the gradients of one shard between replicas; made by :func:`attach`.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        shard: the part of the model that this rank holds.
        replicas: the process group of the ranks that hold the same shard.
        loss_scale: the factor by which the loss is multiplied: a number, or a function that returns it, such as
            ``scaler.get_scale``.
        backend: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        settings: hyper-parameters and plan keys.

    Attributes:
        plan: the plan: which method each module's vector gets, and with which hyper-parameters.
        ledger: bytes and seconds so far, on this rank, between replicas; ``steps`` counts exchanged vectors.
        shards: the Compressor of the exchange between shards, if :func:`attach` has made one.

    Raises:
        ValueError: the plan is wrong, or has ``bucket_elements``, ``verify_every`` or ``nodes``, which FSDP does not
            support.
    """

    driver = "FSDP"
    _no_fallback_reason = ONE_STEP_PER_MODULE
    _refused: Mapping[str, str] = {
        "verify_every": "under FSDP the Compressor sees only gradients, not parameters",
        "nodes": f"{ONE_STEP_PER_MODULE}; HSDP has two levels of its own",
        "bucket_elements": ONE_STEP_PER_MODULE,
    }

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        shard: Shard,
        replicas: Any,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        backend: str = "auto",
        **settings: Unpack[Settings],
    ):
        plan = plan_of(method, **{"bucket_elements": 0, **settings})
        super().__init__(plan, replicas, shard.vectors.items(), loss_scale, backend)  # type: ignore[arg-type]
        self.shard = shard
        self.shards: ShardCompressor | None = None
        # By module: sums of gradients that are accumulated, not reduced
        self._accumulated: dict[str, torch.Tensor] = {}
        self._trained = {id(parameter) for members in shard.parameters.values() for parameter in members}

    def _parts(self, name: str) -> Iterable[tuple[torch.nn.Parameter, int, int]]:
        start = 0
        for parameter in self.shard.parameters[name]:
            yield parameter, start, start + parameter.to_local().numel()  # type: ignore[attr-defined]
            start += elements_of(parameter)

    def _waiting(self, optimizer: torch.optim.Optimizer) -> dict[int, Waiting]:
        """Return what has waited of each parameter of an optimizer; see :meth:`TensorCompressor._waiting`.

        A training step has one engine step per module. The optimizer's step marks its end.
        """
        if trains(optimizer, self._trained):
            self.rank_state.end_round()
        return super()._waiting(optimizer)

    def summary(self, link_gbits: float | None = None) -> str:
        """Return the tables of both exchanges: between replicas, and between shards if :attr:`shards` has one."""
        tables = [super().summary(link_gbits)]
        if self.shards:
            tables = ["between replicas", *tables, "between shards", self.shards.summary(link_gbits)]
        return "\n".join(tables)

    def save(self, folder: str | Path) -> Path:
        """Write this rank's state to a file of its own, in a subfolder for its shard; call it on every rank.

        Args:
            folder: the folder for all shards.

        Returns:
            The path of the file.
        """
        return super().save(self._folder(folder))

    def load(self, folder: str | Path) -> None:
        """Read this rank's state. The number of replicas may differ from the number at saving; it is re-sharded.

        Args:
            folder: the folder that was given to :meth:`save`.

        Raises:
            FileNotFoundError: the folder does not contain the state of all replicas of this shard, or the number of
                shards differs.
            ValueError: a file is damaged, or the state belongs to another model; nothing is changed.
        """
        super().load(self._folder(folder))

    def _folder(self, folder: str | Path) -> Path:
        return Path(folder) / f"shard-{self.shard.number}-of-{self.shard.num_shards}"

    @torch.no_grad()
    def _receive(self, module: Any, name: str, gradient: torch.Tensor) -> None:
        """All-reduce hook: average a module's gradient vector, or keep it for the next backward pass.

        FSDP calls the hook also after ``set_requires_all_reduce(False)``, and would then lose the vector. So it is
        kept here and added to the next one, as FSDP does when it reduces over replicas itself.

        Args:
            module: the FSDPModule.
            name: its name.
            gradient: its gradient vector [n] on this rank; overwritten with the average over replicas.
        """
        if gradient.is_cuda:
            # Before PyTorch 2.15, FSDP frees the vector while this stream may still use it (PyTorch issue 180889)
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        if not all(group.all_reduce_grads for group in groups_of(module)):
            before = self._accumulated.get(name)
            self._accumulated[name] = gradient.clone() if before is None else before.add_(gradient)
            gradient.zero_()
            return
        if name in self._accumulated:
            gradient.add_(self._accumulated.pop(name))
        self._reduce(name, gradient)

    @torch.no_grad()
    def _reduce(self, name: str, gradient: torch.Tensor) -> None:
        """Average a module's gradient vector over the replicas, in place.

        Args:
            name: the module's name.
            gradient: the vector [n].

        Raises:
            PeerError: a replica failed, or replicas disagree; on every replica.
            ValueError: some parameters of the module have no gradient.
        """
        bucket, index = self._bucket_and_index[name]

        def add(step: Step) -> None:
            if len(gradient) != len(self.parameters[name]):
                raise ValueError(
                    f"{name}: only {len(gradient)} of {len(self.parameters[name])} elements have a gradient; under "
                    "FSDP, compression needs a gradient of every parameter in every step"
                )
            step.add(bucket, [index], [self._framework.vector(step, bucket, gradient)])

        # FSDP adds the result to the gradients of earlier backward passes, which the optimizer has not used
        adds = any(parameter.grad is not None for parameter in self.shard.parameters[name])
        earlier = self.rank_state.late.get(name) if adds else None
        self._connect(gradient.device)
        self.ledger.steps += self._run_ordered(self._config, 1.0 / self.rank_state.world_size, add).finite
        if earlier and not earlier.used and name in self.rank_state.late:
            self.rank_state.late[name].absorb(earlier)


def elements_of(parameter: Any) -> int:
    """Return the number of elements of a parameter's shard, including padding: all shards have the same size."""
    dim = parameter.placements[0].dim
    shards = parameter.device_mesh.size()
    return prod(-(-size // shards) if at == dim else size for at, size in enumerate(parameter.shape))
