"""The Triton kernels behind the triton backend, by the same subjects as its ops.

Each reads its input once, where torch's operations make a pass and a temporary each. The results are the reference's
to the bit. Four things see to that:

- no product is fused with a sum (:func:`hvdcompress.ops.triton._kernels.launching.launch`);
- quotients are those of IEEE 754, ``div_rn``; Triton's ``/`` of float32 is an approximation;
- no float is added atomically, which has no order and, in global memory, takes denormal numbers for zeros;
- Triton's ``-x`` is 0 − x, which has no −0: signs are set in the bits.
"""
