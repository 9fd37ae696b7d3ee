"""The ranks that torchrun started, asked as Horovod's are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["Ranks"]


class Ranks:
    """The ranks of torch.distributed, asked as the training loop asks Horovod's."""

    @staticmethod
    def init() -> None:
        """Join the ranks that torchrun started."""
        dist.init_process_group("gloo")

    @staticmethod
    def shutdown() -> None:
        """Leave them."""
        dist.destroy_process_group()

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)

    @staticmethod
    def allgather_object(value: Any, name: str) -> list[Any]:
        """Every rank's value, in rank order."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    @staticmethod
    def broadcast_object(value: Any, root_rank: int) -> Any:
        """One rank's value, on all of them."""
        box = [value]
        dist.broadcast_object_list(box, root_rank)
        return box[0]
