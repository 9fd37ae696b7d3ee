"""What the torch and the TensorFlow driver must hand to Horovod alike."""

from __future__ import annotations

import hashlib

import numpy as np

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


LAYOUT_MATTERS = ("gradiveq",)  #: to what it makes of a matrix, which is [out, in] in torch and [in, out] in TensorFlow


def digests(sent: dict[str, list[bytes]], method: str) -> dict[str, str]:
    """A hash of all that was sent for each tensor; where layouts matter, in the order of the values."""
    if method in LAYOUT_MATTERS:
        sent = {
            name: [np.sort(np.frombuffer(p, np.int32)).tobytes() for p in payloads] for name, payloads in sent.items()
        }
    return {name: hashlib.sha256(b"".join(payloads)).hexdigest() for name, payloads in sorted(sent.items())}
