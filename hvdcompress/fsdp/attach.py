"""Attach compression to a model that was given to ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvdcompress.fsdp.replicas import Compressor, Shard, elements_of
from hvdcompress.fsdp.shards import ShardCompressor, groups_of
from hvdcompress.method import Method
from hvdcompress.parts.levels import FORMATS
from hvdcompress.plan import Plan, plan_of
from hvdcompress.registry import get_method
from hvdcompress.settings import DriverSettings

ROOT = "(root)"  #: name of the outermost module, whose vector has the parameters that no inner FSDPModule has


def attach(
    model: torch.nn.Module,
    gradients: str | Method | Plan | Mapping[str, Any] | None = None,
    parameters: str | Method | None = None,
    replicas: str | Method | Plan | Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    **settings: Unpack[DriverSettings],
) -> Compressor | ShardCompressor:
    """Compress what the ranks of a sharded model exchange: gradients and parameters of shards, gradients of replicas.

    Call it on every rank, after ``fully_shard`` and before the first forward pass.

    Args:
        model: an ``FSDPModule``.
        gradients: the method for the reduce-scatter of gradients between shards, such as "blockwise": a method id with
            hyper-parameters in ``settings``, a Method, a Plan, a plan's dict, or its YAML file. The plan's rules match
            the names of the modules that were given to ``fully_shard``. A method that is given by its id rounds
            stochastically and keeps no residual; with ``feedback="plain"`` it keeps one, which has the size of the
            unsharded gradients on every rank, in float32.
        parameters: how parameters are sent in the all-gather between shards: "int8", "int4", "fp8_e4m3", "fp8_e5m2",
            "dynamic8", "bf16", "fp16", or a Method. All ranks compute with the values that were sent; the optimizer
            keeps the exact ones.
        replicas: the method for the all-reduce between replicas, as for ``gradients``. It needs ``fully_shard(…,
            mesh=mesh["shard"])``, and replicas that start from the same weights.
        mesh: for ``replicas``: the ranks that hold the same shard, a one-dimensional device mesh or a process group.
        settings: ``loss_scale``, ``backend``, hyper-parameters and plan keys of ``gradients``, or of ``replicas``
            without ``gradients``.

    Returns:
        The Compressor of the replicas, with that of the shards as ``shards``; without ``replicas``, that of the shards.

    Raises:
        ValueError: the model is not sharded, or not as ``replicas`` needs it; a plan is wrong, or its method cannot
            exchange shards; an argument is missing.
    """
    if gradients is None and parameters is None and replicas is None:
        raise ValueError('give a method: gradients="blockwise", parameters="int8", or replicas="auto" with a mesh')
    if (replicas is None) != (mesh is None):
        raise ValueError('replicas= and mesh= belong together: replicas="auto", mesh=mesh["replicate"]')
    modules = {name or ROOT: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    members = _members(model, modules)
    shards = None
    common: dict[str, Any] = {key: settings[key] for key in ("loss_scale", "backend") if key in settings}
    own = {key: value for key, value in settings.items() if key not in common}
    are_of_replicas = gradients is None and replicas is not None
    if gradients is not None or parameters is not None:
        plan = _plan_of("none" if gradients is None else gradients, **({} if are_of_replicas else own))
        shards = ShardCompressor(plan, _method_of(parameters), modules, _group_of(modules), **common)
    if replicas is None:
        assert shards
        return shards
    compressor = _replicas(modules, members, replicas, mesh, settings if are_of_replicas else common)
    compressor.shards = shards
    return compressor


def _members(model: torch.nn.Module, modules: Mapping[str, Any]) -> dict[str, list[torch.nn.Parameter]]:
    """Return by module the parameters that require a gradient, in the order of its gradient vector."""
    members: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        owners = [module for module in modules if module == ROOT or name.startswith(f"{module}.")]
        if not owners:
            raise ValueError(f"parameter {name} is in no FSDPModule: call fully_shard() first")
        if parameter.requires_grad:
            members.setdefault(max((o for o in owners if o != ROOT), key=len, default=ROOT), []).append(parameter)
    if not members:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
    return members


def _plan_of(given: str | Method | Plan | Mapping[str, Any], **settings: Any) -> Plan:
    """Return the plan of a reduce-scatter, without residuals and with stochastic rounding unless feedback is given."""
    if isinstance(given, str) and not given.endswith((".yaml", ".yml")) and "feedback" not in settings:
        names = {field.name for field in fields(get_method(given))}
        defaults = {"feedback": "none", "rounding": "stochastic"}
        settings = {key: value for key, value in defaults.items() if key in names} | settings
    return plan_of(given, **settings)


def _method_of(parameters: str | Method | None) -> Method:
    """Return the method of the parameters.

    Raises:
        ValueError: there is no such number format.
    """
    if isinstance(parameters, Method):
        return parameters
    if parameters is None or parameters in ("bf16", "fp16"):
        return get_method(parameters or "none")
    known = [name for name in FORMATS if not name.startswith("natural")]
    if parameters not in known:
        raise ValueError(f"parameters = {parameters!r} must be one of {', '.join([*known, 'bf16', 'fp16'])}")
    return get_method("blockwise", values=parameters, feedback="none")


def _group_of(modules: Mapping[str, Any]) -> Any:
    """Return the process group of the shards."""
    found = {
        name: group.mesh_info.shard_process_group for name, module in modules.items() for group in groups_of(module)
    }
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for name, group in found.items()}
    if len(set(ranks.values())) != 1:
        raise ValueError(f"modules are sharded over different ranks: {ranks}")
    return next(iter(found.values()))


def _replicas(
    modules: Mapping[str, Any],
    members: Mapping[str, list[torch.nn.Parameter]],
    method: str | Method | Plan | Mapping[str, Any],
    mesh: Any,
    settings: Mapping[str, Any],
) -> Compressor:
    """Compress gradients between replicas."""
    for owner, parameters in members.items():
        for parameter in parameters:
            if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != 1:
                raise ValueError(
                    f"the parameters of {owner} must be sharded over one dimension, the ranks of a replica: call "
                    "fully_shard(…, mesh=mesh['shard']). With a mesh that contains the replicas, PyTorch reduces over "
                    "them itself"
                )
    first = next(iter(members.values()))[0]
    like = first.to_local().detach()  # type: ignore[attr-defined]
    shards = first.device_mesh  # type: ignore[attr-defined]
    # Expanded scalars: they have the vectors' sizes, but take no memory
    vectors = {owner: like.new_zeros(()).expand(sum(map(elements_of, each))) for owner, each in members.items()}
    group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group()
    shard = Shard(vectors, members, shards.get_local_rank(), shards.size())
    compressor = Compressor(method, shard, group, **settings)
    for owner in members:
        modules[owner].set_all_reduce_hook(functools.partial(compressor._receive, modules[owner], owner))
    return compressor
