"""Make what a new method must have: ``configs/methods/<id>.yaml`` and its golden case.

    python tests/make_golden.py topk          # or several ids; without any: what is missing

A golden case pins a method down to the byte: what each rank sends in each collective, the results, and
the residuals, for 3 steps in a world of 3. Its gradients come from the package's own integer hash. The
config is written only where there is none, from the comments in the method's class. Look at both
before you commit them: what is wrong in them stays wrong.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import hvdcompress
from hvdcompress import registry
from hvdcompress.method import Method, TensorSpec
from hvdcompress.testing import Trial, numbers, variants

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python tests/make_golden.py"
WORLD, STEPS = 3, 3
SHAPES = {"a": (5, 7), "b": (12,)}
CONVOLUTIONS = {"b": (12,), "c": (2, 3, 2, 2)}  # for a method that suits none of these


def golden_path(id: str) -> Path:
    """The file of a method's golden cases."""
    return ROOT / "tests" / "golden" / id / "cases.json"


def config_path(id: str) -> Path:
    """A method's commented defaults."""
    return ROOT / "configs" / "methods" / f"{id}.yaml"


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
    method = hvdcompress.get(id, **settings)
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
        out = net.allreduce_many(gradients)[0]
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


def field_comments(cls: type[Method]) -> dict[str, str]:
    """The text below each field in the class, or in the class it is inherited from."""
    found: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if c is not object]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, [*body.body[1:], None], strict=True):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Constant):
                found[ast.unparse(item.target)] = " ".join(str(text.value).split())
    return found


def config_text(id: str) -> str:
    """A method's YAML: each hyper-parameter with its default and a comment."""
    cls, comments = registry.classes()[id], field_comments(registry.classes()[id])
    lines = [
        f"# {id}: {cls.paper}",
        *textwrap.wrap(f"Sends {cls.sends}.", 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False),
    ]
    lines += ["", f"method: {id}"]
    settings = hvdcompress.get(id).hyperparameters()
    shared = {field.name for field in fields(Method)}
    for name in sorted(settings, key=lambda name: name in shared):  # its own first
        value = settings[name]
        text = comments.get(name, "")
        lines += ["", *textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)]
        lines.append(yaml.safe_dump({name: value}).strip())
    return "\n".join(lines) + "\n"


def main(ids: list[str]) -> None:
    known = hvdcompress.available()
    if unknown := sorted(set(ids) - set(known)):
        raise SystemExit(f"no such method: {', '.join(unknown)}; available: {', '.join(known)}")
    ids = ids or [id for id in known if not (golden_path(id).exists() and config_path(id).exists())]
    for id in ids:
        cases = {name: record(id, settings) for name, settings in golden_variants(id).items()}
        golden_path(id).parent.mkdir(parents=True, exist_ok=True)
        golden_path(id).write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
        print(f"{golden_path(id).relative_to(ROOT)}: {len(cases)} cases")
        if not config_path(id).exists():
            config_path(id).parent.mkdir(parents=True, exist_ok=True)
            config_path(id).write_text(config_text(id), encoding="utf-8")
            print(config_path(id).relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
