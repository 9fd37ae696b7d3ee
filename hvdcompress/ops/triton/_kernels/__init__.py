"""Triton kernels of the triton backend, in one module per subject, like the backend's ops.

Each kernel reads its input once, where torch needs one pass and one temporary per operation. Four rules make the
results equal to the reference's bits:

- No product is fused with a sum (:func:`hvdcompress.ops.triton._kernels.launching.launch`).
- Quotients are rounded as in IEEE 754 (``div_rn``); Triton's ``/`` of float32 is an approximation.
- No float is added atomically. Atomic additions have no order and, in global memory, treat denormals as zeros.
- Signs are set in the bits, because Triton's ``-x`` is 0 − x, which is never −0.
"""
