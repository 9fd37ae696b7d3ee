"""How kernels are launched."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops.vectors import Array

BLOCK = 1024  #: elements of a program


def blocks(n: int, block: int = BLOCK) -> int:
    """Return how many programs cover n elements."""
    return -(-n // block)


def launch(kernel: Any, programs: int, like: Array, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of ``like``; the host does not wait for it.

    A product and a sum must round twice, as they do in the reference, and Triton may fuse them unless told not to:
    ``enable_fp_fusion=False`` forbids that to LLVM and to ptxas (https://github.com/triton-lang/triton/pull/2495; the
    default: /pull/11270). Denormals need no option: an instruction without ``.ftz`` keeps them.
    """
    with torch.cuda.device_of(like):
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)
