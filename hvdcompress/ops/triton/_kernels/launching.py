"""Launch kernels without fused multiply-adds."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops.vectors import Array

BLOCK = 1024  #: number of elements per program


def blocks(n: int, block: int = BLOCK) -> int:
    """Return the number of programs for n elements."""
    return -(-n // block)


def launch(kernel: Any, programs: int, like: Array, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of ``like``. The host does not wait for it.

    A product and a sum must be rounded separately, as in the reference. ``enable_fp_fusion=False`` forbids LLVM and
    ptxas to fuse them (https://github.com/triton-lang/triton/pull/2495; the default: /pull/11270). Denormals need no
    option, because instructions without ``.ftz`` keep them.
    """
    with torch.cuda.device_of(like):
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)
