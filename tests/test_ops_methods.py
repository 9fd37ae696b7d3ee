"""Every method gives the reference's payloads, results and residuals under every backend, to the bit."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Broadcast
from hvdcompress.ops import numpy as reference


def is_torch(ops: Any) -> bool:
    return ops.__name__.endswith(".torch")


def get(x: Any) -> Any:
    """An array as something to compare."""
    array = np.asarray(x)
    return str(array.dtype), array.shape, array.tobytes()


def gradient(kind: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, n) if kind == "ties" else rng.normal(size=n)
    if kind == "extreme":
        x = 1e34 * x * (rng.random(n) < 0.5)
        x[:50] = 1e-45
    return x.astype(np.float32)


class Recorder(Loopback):
    """Loopback that keeps the payloads; under torch, what is inside of the methods is tensors."""

    def __init__(self, method: Any, world: int, ops: Any, **settings: Any):
        super().__init__(method, world, ops=TorchInside(ops) if is_torch(ops) else ops, **settings)
        self.payloads: list[Any] = []

    def _carry_out(self, name: str, verbs: list[Any]) -> list[Any]:
        wrap = self.ops.put if isinstance(self.ops, TorchInside) else np.asarray
        as_numpy = []
        for verb in verbs:
            if isinstance(verb, Broadcast):
                made = np.asarray(verb.make())
                as_numpy.append(Broadcast(lambda made=made: made, verb.root, verb.num_bytes))
                self.payloads.append(get(made))
            else:
                as_numpy.append(replace(verb, x=np.asarray(verb.x)))
                self.payloads.append(get(verb.x))
        results = super()._carry_out(name, as_numpy)
        return [[wrap(one) for one in r] if isinstance(r, list) else wrap(r) for r in results]


class TorchInside:
    """The torch verbs behind loopback's numpy arrays."""

    def __init__(self, ops: Any):
        import torch

        self.ops, self.put = ops, lambda array: torch.from_numpy(np.array(array))

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.ops, verb)

    def concat(self, arrays: list[Any]) -> Any:
        return self.ops.concat([self.put(a) if isinstance(a, np.ndarray) else a for a in arrays])

    def write(self, out: Any, total: Any, factor: float) -> None:
        self.ops.write(_shared(out), total, factor)

    def fill(self, out: Any, value: float) -> None:
        self.ops.fill(_shared(out), value)


def _shared(out: Any) -> Any:
    import torch

    return torch.from_numpy(out) if isinstance(out, np.ndarray) else out


CHOICES = {"values": ("fp16", "bf16"), "density": (0.001, 0.3), "select": ("exact",), "refine": ("paper",)}
CHOICES |= {"feedback": ("plain", "none"), "beta": (0.1,), "route": ("scatter",)}


def variants() -> list[Any]:
    """Every method with its defaults, and with other values of its hyper-parameters, one at a time."""
    cases = [("randomk", {"unbiased": True, "feedback": "none"})]
    for name in hvdcompress.available():
        known = {f.name for f in fields(hvdcompress.get(name))}
        cases.append((name, {}))
        cases += [(name, {f: value}) for f, values in CHOICES.items() if f in known for value in values]
    return [pytest.param(n, o, id="-".join([n, *(f"{f}={v}" for f, v in o.items())])) for n, o in cases]


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(("name", "options"), variants())
@pytest.mark.parametrize("kind", ["normal", "ties", "extreme"])
def test_methods_give_the_reference_bytes(name: str, options: dict[str, Any], kind: str, backend: str) -> None:
    pytest.importorskip(backend)
    ops = importlib.import_module(f"hvdcompress.ops.{backend}")
    n, world = 5003, 3
    nets = [Recorder(name, world, ops, min_elements=1, **options) for ops in (reference, ops)]
    for step in range(3):
        gradients = [gradient(kind, n, seed=3 * step + rank) for rank in range(world)]
        if step == 1:
            gradients[1] = 0 * gradients[1]  # a rank that has nothing to say
        outs = [net.allreduce(gradients, "w") for net in nets]
        assert nets[0].payloads == nets[1].payloads, f"payloads differ in step {step}"
        assert [get(out) for out in outs[0]] == [get(out) for out in outs[1]], f"results differ in step {step}"
        for rank in range(world):
            assert get(nets[0].residual("w", rank)) == get(nets[1].residual("w", rank)), f"residuals, step {step}"
    for net in nets:
        bad = [g.copy() for g in gradients]
        bad[2][7] = np.nan
        assert all(np.isnan(out).all() for out in net.allreduce(bad, "w"))
    assert get(nets[0].residual("w", 0)) == get(nets[1].residual("w", 0))
