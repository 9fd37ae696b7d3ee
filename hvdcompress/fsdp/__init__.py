"""Compress what the ranks of an FSDP2 model exchange: gradients and parameters of shards, gradients of replicas.

    fully_shard(model)                                             # layers first, as always
    from hvdcompress import fsdp

    fsdp.attach(model, gradients="blockwise", values="int4", parameters="int8")

With replicas, for example one per machine, the exchange between them can be compressed, too::

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    fsdp.attach(model, replicas="scalecom", mesh=mesh["replicate"], density=0.01)

``shards.py`` has the first, ``replicas.py`` the second.
"""

from hvdcompress.fsdp.attach import attach
from hvdcompress.fsdp.replicas import Compressor
from hvdcompress.fsdp.shards import ShardCompressor

__all__ = ["Compressor", "ShardCompressor", "attach"]
