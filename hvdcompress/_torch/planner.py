"""torch.distributed.checkpoint with another number of ranks than has saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from hvdcompress.engine.saving import checkpoint


class ReshardingPlanner(DefaultLoadPlanner):
    """A planner for ``dcp.load`` that reads the states of all ranks that were saved, if their number was another one.

    DCP asks an object for its keys before it reads the checkpoint. A Compressor names its own rank then, and cannot
    know the others.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Replace the key of this rank by those of all ranks that were saved, unless it is one of them.

        Raises:
            ValueError: the checkpoint has no state of the Compressor. ``dcp.load`` raises it as CheckpointException.
        """
        saved = metadata.state_dict_metadata if metadata else {}
        for name, value in state_dict.items():
            keys = [key for key in value if checkpoint.KEY.fullmatch(str(key))] if isinstance(value, Mapping) else []
            if keys and f"{name}.{keys[0]}" not in saved:
                others = [each.removeprefix(f"{name}.") for each in saved if each.startswith(f"{name}.rank-")]
                if not others and not self.allow_partial_load:
                    raise ValueError(
                        f"the checkpoint has no state of a Compressor under {name!r}. To load the rest, leave {name!r} "
                        "out of the dict: the Compressor then starts with empty residuals"
                    )
                state_dict[name] = dict.fromkeys(others, b"") or value
        super().set_up_planner(state_dict, metadata, is_coordinator)
