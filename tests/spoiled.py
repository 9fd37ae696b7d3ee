"""Second buffers are filled with NaN before a step writes to them, so that a test fails where one is read first."""

from __future__ import annotations

from typing import Any

from hvdcompress.engine.bucket_state import Memory


def spoil() -> None:
    """Spoil second buffers from now on, in this process."""
    if hasattr(Memory.second_buffer, "spoils"):
        return
    second_buffer = Memory.second_buffer

    def spoiled(self: Memory, slot: str, current: Any, dtype: str, ops: Any) -> Any:
        buffer = second_buffer(self, slot, current, dtype, ops)
        buffer[:] = float("nan") if dtype.startswith("float") else 77
        return buffer

    spoiled.spoils = True  # type: ignore[attr-defined]
    Memory.second_buffer = spoiled  # type: ignore[method-assign]
