"""Any two features together do what each says: held against a model of it in plain numpy.

The model is top-k selection with feedback, warm-up, rules and restarts, written without any of the package's code. What
must not show in results, such as saving and loading, joining tensors or a loss scale, is not in the model at all.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcompress import registry
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.method import Array, Context, Sparse, TensorSpec, Workspace
from hvdcompress.methods.topk import TopK
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import candidates, pack, select
from hvdcompress.plan import plan_of
from hvdcompress.testing import Trial

SHAPES = {"a": (20, 30), "b": (7, 11), "c": (40,)}
DENSITIES = {"a": 0.05, "b": 0.05, "c": 0.05}
RULED = {"a": 0.05, "b": 0.3, "c": 1.0}  #: with rules: b has a density of its own, c is sent uncompressed
DENSE_STEPS = 2  #: of the method, after it came on and after each trigger
WARMUP, STEPS = 3, 14
CLIP, BETA = 12.0, 0.3
BAD, SAVED, TRIGGERED, RESHARDED = 6, 7, 8, 10  #: the steps before or in which things happen
FEATURES = (
    "feedback", "clipping", "warm-up", "rules", "joined buckets", "resume", "re-shard", "trigger", "NaN step",
    "loss scale",
)  # fmt: skip


@registry.method
class Phased(TopK):
    """Top-k that sends everything in its first steps, so that a restart shows."""

    phases = ("dense", "sparse")

    def phase_of(self, age: int) -> int:
        return int(age >= DENSE_STEPS)

    def kept(self, ctx: Context) -> list[int]:
        density = self.density if ctx.phase else 1.0
        return [select.num_kept(density, size) for size in ctx.spec.parts]

    def num_bytes(self, spec: TensorSpec, world_size: int, phase: int = 0) -> int:
        counts = self.counts(spec) if phase else [spec.size]
        return pack.num_bytes(sum(counts), self.packing(spec))

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        return candidates.scan(self.kept(ctx)[index], index, work)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        chosen = select.largest(x, self.kept(ctx), ctx, work)
        return pack.encode(chosen, self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, sum(self.kept(ctx)), self.packing(ctx.spec), work.ops)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans know the method, as they know one of an entry point."""
    monkeypatch.setitem(registry.classes(), Phased.id, Phased)


def plan_with(features: set[str]) -> dict[str, Any]:
    plan: dict[str, Any] = {"method": Phased.id, "density": 0.05, "min_elements": 0, "bucket_elements": 0}
    if "feedback" in features:
        plan |= {"feedback": "lowpass", "beta": BETA}
    if "clipping" in features:
        plan["local_clip_norm"] = CLIP
    if "warm-up" in features:
        plan["warmup"] = {"steps": WARMUP}
    if "rules" in features:
        plan["rules"] = [
            {"match": {"name": "b"}, "density": 0.3},
            {"match": {"max_size": 40}, "method": "none", "warmup": {"steps": 0}},
        ]
    if "joined buckets" in features:
        plan["bucket_elements"] = 10_000
    return plan


class Model:
    """What ``world_size`` ranks get and keep."""

    def __init__(self, features: set[str], world_size: int):
        self.features, self.world_size = features, world_size
        self.densities = RULED if "rules" in features else DENSITIES
        self.starts = self.on = WARMUP if "warm-up" in features else 0
        self.residuals = [
            {name: np.zeros(shape, np.float64) for name, shape in SHAPES.items()} for _ in range(world_size)
        ]
        self.step = 0

    def allreduce(self, given: list[dict[str, Array]]) -> dict[str, Array]:
        out = {name: self._tensor(name, [one[name].astype(np.float64) for one in given]) for name in SHAPES}
        self.step += 1
        return out

    def _tensor(self, name: str, given: list[Array]) -> Array:
        plain = "rules" in self.features and name == "c"
        if plain or self.step < self.starts:
            return sum(given) / self.world_size
        total = np.zeros(SHAPES[name])
        for gradient, residuals in zip(given, self.residuals, strict=True):
            if "clipping" in self.features:
                gradient = gradient * min(1.0, CLIP / np.sqrt(self.world_size) / np.linalg.norm(gradient))
            x = gradient + residuals[name]
            count = x.size
            if self.step - self.on >= DENSE_STEPS:
                count = max(1, int(self.densities[name] * x.size))
            sent = np.where(np.abs(x) >= np.sort(np.abs(x), axis=None)[-count], x, 0.0)
            beta = BETA if "feedback" in self.features else 1.0
            residuals[name] = (1 - beta) * residuals[name] + beta * (x - sent)
            total += sent
        return total / self.world_size

    def reshard(self, world_size: int) -> None:
        shares = {name: sum(one[name] for one in self.residuals) / world_size for name in SHAPES}
        self.residuals, self.world_size = (
            [{name: array.copy() for name, array in shares.items()} for _ in range(world_size)],
            world_size,
        )


def gradients(step: int, world_size: int) -> list[dict[str, Array]]:
    drawn = [np.random.default_rng([step, rank]) for rank in range(world_size)]
    return [{name: rng.standard_t(4, shape).astype(np.float32) for name, shape in SHAPES.items()} for rng in drawn]


def check(features: set[str], tmp_path: Path, modelled: set[str] | None = None) -> None:
    """Train with these features, and compare each step with the model of them, or of others."""
    world_size, plan, scale = 2, plan_of(plan_with(features)), [1.0]
    modelled = features if modelled is None else modelled

    def network(world_size: int) -> Trial:
        return Trial(plan, world_size, loss_scale=lambda: scale[0])

    net, model = network(world_size), Model(modelled, world_size)
    specs = [TensorSpec(name, shape) for name, shape in SHAPES.items()]
    for step in range(STEPS):
        if "loss scale" in features:
            scale[0] = 2.0 ** (step % 5)
        if "NaN step" in features and step in (BAD, TRIGGERED):
            before = written(net)
            if "trigger" in features and step == TRIGGERED:
                net.trigger()
            bad = gradients(99, world_size)
            bad[-1]["b"][3, 3] = np.inf if step == BAD else np.nan
            outs = net.allreduce_many(bad)
            assert all(np.isnan(array).all() for out in outs for array in out.values()), "all of the step is undone"
            assert written(net) == before, "and all state as before"
        elif "trigger" in features and step == TRIGGERED:
            net.trigger()
        if "resume" in features and step == SAVED:
            for saved in net.saved():
                checkpoint.save(saved, tmp_path)
            net = network(world_size)
            net.restore([checkpoint.load(tmp_path, rank, world_size) for rank in range(world_size)], specs)
        if "re-shard" in features and step == RESHARDED:
            world_size, saved = 3, reshard(net.saved(), 3)
            net = network(world_size)
            net.restore(saved, specs)
            model.reshard(world_size)
        given = gradients(step, world_size)
        outs = net.allreduce_many([{n: g * np.float32(scale[0]) for n, g in one.items()} for one in given])
        want = model.allreduce(given)
        if "trigger" in modelled and step == TRIGGERED:
            model.on = step + 1
        for name in SHAPES:
            assert len({out[name].tobytes() for out in outs}) == 1, f"ranks differ in {name}, step {step}"
            got = outs[0][name] / np.float32(scale[0])
            np.testing.assert_allclose(got, want[name], 1e-4, 1e-5, err_msg=f"{name}, step {step}")
            for rank in range(world_size):
                kept = net.residual(name, rank)
                np.testing.assert_allclose(
                    kept, model.residuals[rank][name], 1e-4, 1e-5, err_msg=f"residual of {name}, step {step}"
                )


def written(net: Trial) -> str:
    """All state, to the bit."""
    return json.dumps(net.saved(), default=lambda array: array.tobytes().hex())


@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids="+".join)
def test_pair(pair: tuple[str, str], tmp_path: Path) -> None:
    check(set(pair), tmp_path)


def test_all_at_once(tmp_path: Path) -> None:
    check(set(FEATURES), tmp_path)


@pytest.mark.parametrize("feature", ["feedback", "clipping", "warm-up", "rules", "trigger"])
def test_a_feature_without_effect_is_noticed(feature: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Not equal|Mismatched"):
        check(set(FEATURES) - {feature, "re-shard"}, tmp_path, modelled=set(FEATURES) - {"re-shard"})
