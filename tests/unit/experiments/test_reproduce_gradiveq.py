"""GradiVeQ's claims: spectra of known slices, methods during a dense training, the ring, and verdicts by rule."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.ring.algorithm import simulate
from hvdcompress.method import Context, TensorSpec

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
from experiments.reproduce import gradiveq_measures as measures  # noqa: E402
from experiments.reproduce import gradiveq_ring as ring  # noqa: E402
from experiments.reproduce.simulate import wire_rate  # noqa: E402
from hvdcompress.loopback import Loopback  # noqa: E402

SPEC = TensorSpec("w", (16, 8, 3, 3))


def stack_of(rank: int, steps: int = 30) -> np.ndarray:
    """Gradients whose filters lie in so many dimensions."""
    rng = np.random.default_rng(rank)
    base = rng.standard_normal((rank, 72))
    return (rng.standard_normal((steps, 16, rank)) @ base).reshape(steps, 16, 8, 3, 3).astype(np.float32)


# -- spectra -------------------------------------------------------------------------------------


def test_slices_of_few_dimensions_leave_nothing():
    found = measures.spectrum(stack_of(5), SPEC, "oihw", 72)
    assert found["size"] == 72 and found["samples"] == 480
    assert found["error"] < 1e-6 and found["control"] > 0.5  # shuffled, they need all dimensions
    at = found["ranks"].index(next(r for r in found["ranks"] if r >= 5 / 72))
    assert found["energy"][0] == 0 and found["energy"][at] == pytest.approx(1, abs=1e-6)


def test_the_error_is_that_of_the_best_basis():
    """Eckart and Young: what is left is the energy of the smaller singular values."""
    samples = measures.slices(stack_of(40), SPEC, "oihw", 72)
    values = np.linalg.svd(samples, compute_uv=False)
    wanted = np.sqrt((values[9:] ** 2).sum() / (values**2).sum())
    assert measures.spectrum(stack_of(40), SPEC, "oihw", 72)["error"] == pytest.approx(wanted, rel=1e-6)
    each = measures.oracle(stack_of(40), SPEC, "oihw")  # slices of 576: rank 72
    assert len(each) == 30 and max(each) < wanted


# -- during a training ---------------------------------------------------------------------------


def test_methods_see_what_the_ranks_exchange():
    pytest.importorskip("sklearn")
    task = {"task": "digits", "steps": 14, "batch_size": 4, "learning_rate": 0.02, "warmup_steps": 1}
    lengths = {"dense_steps": 3, "compressed_steps": 4}
    entries = {
        "dense": {"method": "none"},
        "whole": {"method": "gradiveq", **lengths, "min_rate": 1.0, "slice_elements": 16, "lam": 0.0},
        "8x": {"method": "gradiveq", **lengths, "lam": 0.0},
    }
    found = measures.watched(task, 2, 0, ["2.weight"], [0, 5], **lengths, every=2, sizes=[0, 64], entries=entries)
    assert json.dumps(found)
    errors = {(row["start"], row["entry"]): row for row in found["carried"]}
    for start in (0, 5):
        assert errors[start, "dense"]["errors"] == [0, 0] and errors[start, "dense"]["ages"] == [0, 2]
        assert max(errors[start, "whole"]["errors"]) < 1e-5  # as many components as a slice has elements
        assert 0 < errors[start, "oracle oihw"]["errors"][0] < errors[start, "8x"]["errors"][0] < 1
    assert found["rates"]["dense"] == 1 and found["rates"]["8x"] == pytest.approx(8, rel=0.01)
    assert {row["size"] for row in found["spectra"]} == {64}  # of 576 there are too few


def test_the_rate_on_the_wire_is_that_of_rings():
    for method, settings, rate in (("none", {}, 1), ("fp16", {}, 2), ("qsgd", {"bits": 8, "route": "scatter"}, 4)):
        net = Loopback(method, world_size=3, min_elements=1, **settings)
        net.allreduce([np.ones(30_000, np.float32)] * 3, name="w")
        assert wire_rate(net) == pytest.approx(rate, rel=0.02), method


# -- the ring ------------------------------------------------------------------------------------


def test_contenders_send_what_their_rates_say():
    spec = TensorSpec("w", (64, 64, 3, 3))
    turns = [Context(rank, 2, 0, spec) for rank in range(2)]
    contenders = {"dense": (0, "fp32"), "qsgd4": (0, "qsgd4"), "8x": (8.0, "fp32"), "both": (4.0, "qsgd8")}
    made = [ring.ring_codecs(contenders, spec, ctx) for ctx in turns]
    xs = [np.random.default_rng(rank).standard_normal(spec.size).astype(np.float32) for rank in range(2)]
    sent = {name: simulate(xs, [one[name] for one in made])[0].payload for name in contenders}
    for name, rate in (("dense", 1), ("qsgd4", 8), ("8x", 8), ("both", 16)):
        assert sent["dense"] / sent[name] == pytest.approx(rate, rel=0.04), name
