"""Claims of the newer methods: what is measured is what it says, tiny trainings, and verdicts."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from experiments.papers.claims import Kind


@pytest.fixture(scope="module")
def measures():
    pytest.importorskip("torch")
    return pytest.importorskip("experiments.papers.peers.measures")


@pytest.fixture
def claims(measures):
    from experiments.papers.peers import claims

    return claims


def task():
    return {"task": "digits", "net": "fnn3", "steps": 6, "batch_size": 8, "learning_rate": 0.05, "warmup_steps": 1}


def test_errors_of_formats(measures):
    random = np.random.default_rng(0)
    powers = np.float32(2.0) ** random.integers(-9, 9, 5000).astype(np.float32)
    assert measures.errors(powers, 0)["natural"] == 0
    normal = measures.errors(random.normal(size=50_000).astype(np.float32), 1)
    assert 0.07 < normal["natural"] < 0.125 and normal["int4"] == pytest.approx(normal["rotated"], rel=0.1)
    heavy = measures.errors(random.standard_t(3, size=50_000).astype(np.float32), 2)
    assert heavy["rotated"] < 0.4 * heavy["int4"]
    step = normal["int4"] * 50_000  # of one block's values, steps of s/7 have errors of (s/7)²/12
    assert 0 < step < 50_000 * (4 / 7) ** 2 / 12 * 1.5


def test_tiny_trainings_are_measured_and_judged(measures, claims):
    pytest.importorskip("sklearn")
    rows = measures.encoded(task(), ranks=2, seed=0, samples=3)
    assert {row["step"] for row in rows} == {1, 3, 5} and {row["tensor"] for row in rows} >= {"1.weight", "3.weight"}
    frame = pd.DataFrame(rows)
    both = pd.concat([frame.assign(net=net, seed=0) for net in claims.NETS])
    for test in (claims.eighth, claims.rotated):
        verdict = test(both)
        assert verdict.number and json.dumps(claims.PAPER.claims[0].record(verdict))


def test_words_are_counted_in_units_of_k(measures):
    pytest.importorskip("sklearn")
    found = {
        (id, ranks): measures.sent(task(), {"method": id, "density": 0.01}, ranks, seed=0, steps=24)
        for id in ("topk", "arctopk")
        for ranks in (2, 4)
    }
    two, four = found["topk", 2], found["topk", 4]
    assert 1 < two["given"] < 2 and four["given"] == pytest.approx(two["given"], rel=0.05)  # a value and its index
    assert two["transmitted"] == pytest.approx(two["given"], rel=0.05)
    assert four["transmitted"] == pytest.approx(3 * four["given"], rel=0.05)  # all other ranks' entries
    assert found["arctopk", 4]["given"] == found["arctopk", 2]["given"]
    assert all(0 < each["error"] < 1 for each in found.values())


def test_what_grows_is_not_constant(claims):
    def rows(grow):
        return pd.DataFrame(
            {"method": id, "ranks": ranks, "seed": 0, "given": ranks**grow, "transmitted": ranks / 4, "error": 0.5}
            for id in claims.COUNTED
            for ranks in claims.WORLDS
        )

    assert claims.constant(rows(0.0)).outcome.kind is Kind.HOLDS
    assert claims.constant(rows(1.0)).outcome.kind is Kind.FAILS
    assert claims.six_k(rows(0.0)).outcome.because == "2 ranks; 4 ranks; 8 ranks; 16 ranks"


def test_a_training_that_diverged_is_not_as_good(claims):
    def rows(value):
        return pd.DataFrame(
            {"net": net, "method": id, "density": 0.01, "seed": seed, "value": value.get(id, 88.0), "ratio": 9.0}
            for net in claims.NETS
            for id in ("none", "topk", "randomk", "oktopk", "onebit")
            for seed in (0, 1)
        )

    as_topk, as_dense = claims.as_topk("oktopk", "Ok-Topk"), claims.as_dense("onebit", "1-bit SGD")
    assert as_topk(rows({"oktopk": 87.1})).outcome.kind is as_dense(rows({})).outcome.kind is Kind.HOLDS
    for worse in (86.9, math.nan):
        assert as_topk(rows({"oktopk": worse})).outcome.kind is Kind.FAILS
        assert as_dense(rows({"onebit": worse})).outcome.kind is Kind.FAILS
