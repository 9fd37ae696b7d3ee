"""How a method's bytes grow with the number of ranks."""

from __future__ import annotations

from functools import cache

import hvdcompress
from experiments.cost_model.imagined import last_phase, requests
from experiments.cost_model.model import on_wire
from hvdcompress.method import TensorSpec

TENSOR = TensorSpec("conv", (256, 256, 3, 3))
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@cache
def wire(id: str) -> tuple[float, ...]:
    """Bytes that the busiest rank transmits in a compressed step, for each of WORLDS."""
    method = hvdcompress.get(id)
    return tuple(
        sum(
            max(on_wire(request, world_size) for request in each)
            for each in requests(method, last_phase(method), world_size, TENSOR)
        )
        for world_size in WORLD_SIZES
    )
