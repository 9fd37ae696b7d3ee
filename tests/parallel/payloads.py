"""What the torch and the TensorFlow driver must hand to Horovod alike."""

from __future__ import annotations

import hashlib

VARIANTS = [
    ("none", {}),
    ("fp16", {}),
    ("bf16", {}),
    ("topk", {"density": 0.02}),
    ("topk", {"density": 0.05, "values": "qsgd4", "warmup": {"steps": 2}}),
    ("randomk", {"density": 0.05}),
    ("gaussiank", {"density": 0.02}),
    ("scalecom", {"density": 0.02, "values": "fp16"}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "tensors": "all"}),
    ("fft", {}),
    ("qsgd", {}),
    ("qsgd", {"bits": 8, "route": "scatter"}),
    ("terngrad", {}),
    ("signsgd", {}),
    ("gtopk", {"density": 0.02}),
    ("dgc", {"density": 0.02}),
    ("powersgd", {}),
]


def digests(sent: dict[str, list[bytes]]) -> dict[str, str]:
    """A hash of all that was sent for each tensor."""
    return {name: hashlib.sha256(b"".join(payloads)).hexdigest() for name, payloads in sorted(sent.items())}
