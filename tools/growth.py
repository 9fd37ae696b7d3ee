"""How a method's bytes grow with the number of ranks."""

from __future__ import annotations

from functools import cache

import hvdcompress
from experiments.scale.cost import on_wire
from experiments.scale.imagined import imagine, last_phase
from hvdcompress.method import TensorSpec

TENSOR = TensorSpec("conv", (256, 256, 3, 3))
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@cache
def wire(id: str) -> tuple[float, ...]:
    """Bytes that the busiest rank transmits in a compressed step, for each of WORLDS."""
    method = hvdcompress.get(id)
    return tuple(
        sum(
            max(on_wire(asked, world_size) for asked in each)
            for each in imagine(method, last_phase(method), world_size, TENSOR)
        )
        for world_size in WORLD_SIZES
    )
