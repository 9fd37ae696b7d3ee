"""Make the golden case that a method must have.

    python -m tests.make_golden topk          # or several ids; without any: what is missing

A golden case pins a method down to the byte: what each rank sends in each collective, the results, and
the residuals, for 3 steps in a world of 3. Its gradients come from the package's own integer hash. Look
at it before you commit it: what is wrong in it stays wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hvdcompress
from hvdcompress import registry
from hvdcompress.method import TensorSpec
from hvdcompress.testing import Trial, numbers
from tests.variants import variants

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python -m tests.make_golden"
WORLD, STEPS = 3, 3
SHAPES = {"a": (5, 7), "b": (12,)}
CONVOLUTIONS = {"b": (12,), "c": (2, 3, 2, 2)}  # for a method that suits none of these


def golden_path(id: str) -> Path:
    """The file of a method's golden cases."""
    return ROOT / "tests" / "golden" / id / "cases.json"


def golden_variants(id: str) -> dict[str, dict[str, Any]]:
    """The settings that a method's golden cases are made with, by the case's name."""
    found = variants(registry.classes()[id], density=0.1)

    def needed(settings: dict[str, Any]) -> bool:
        rest = {key: value for key, value in settings.items() if key not in ("feedback", "beta")}
        option = len(rest) > 1 or rest.get("density", 0.1) != 0.1  # something besides density = 0.1
        return not (option and "feedback" in settings and rest in found.values()) and rest.get("density") != 0.34

    return {name: settings for name, settings in found.items() if needed(settings)}


def record(id: str, settings: dict[str, Any], ops: Any = None) -> dict[str, Any]:
    """Run one case: everything that goes over the network, the results and the residuals, in hexadecimal."""
    method = hvdcompress.get_method(id, **settings)
    net = Trial(method, WORLD, ops=ops, seed=7)
    suited = any(method.suits(TensorSpec(name, shape)) for name, shape in SHAPES.items())
    shapes = SHAPES if suited else CONVOLUTIONS
    steps = []
    for step in range(STEPS):
        net.log.clear()
        gradients = [
            {name: numbers(shape, number, rank, step) for number, (name, shape) in enumerate(shapes.items())}
            for rank in range(WORLD)
        ]
        out = net.allreduce(gradients)[0]
        steps.append(
            {
                "collectives": [
                    {
                        "tensor": c.name,
                        "verb": " ".join(filter(None, [c.collective, c.op, c.dtypes[0]])),
                        "root": c.root,
                        "sent": [sent.hex() for sent in c.sent],
                    }
                    for c in net.log
                ],
                "result": {name: _hex(out[name]) for name in shapes},
                "residual": {name: [_hex(net.residual(name, r)) for r in range(WORLD)] for name in shapes},
            }
        )
    return {"settings": settings, "steps": steps}


def _hex(x: np.ndarray[Any, Any]) -> str:
    return np.ascontiguousarray(x).astype("<f4").tobytes().hex()


def main(ids: list[str]) -> None:
    known = hvdcompress.available()
    if unknown := sorted(set(ids) - set(known)):
        raise SystemExit(f"no such method: {', '.join(unknown)}; available: {', '.join(known)}")
    ids = ids or [id for id in known if not golden_path(id).exists()]
    for id in ids:
        cases = {name: record(id, settings) for name, settings in golden_variants(id).items()}
        golden_path(id).parent.mkdir(parents=True, exist_ok=True)
        golden_path(id).write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
        print(f"{golden_path(id).relative_to(ROOT)}: {len(cases)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
