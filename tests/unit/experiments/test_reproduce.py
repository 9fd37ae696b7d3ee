"""`experiments reproduce`: verdicts by rule, results that are kept, pages, and one real claim on a tiny training."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.reproduce import cache, papers, run
from experiments.reproduce.claims import Kind, Unit, judge
from tests import ROOT
from tests.unit.experiments import toy_claims


def reproduce(folder, paper, jobs=1):
    text = io.StringIO()
    files = run.reproduce(paper, folder, toy_claims.SCALE, jobs, Console(file=text, width=200), "the toy's command")
    return files, text.getvalue()


# -- verdicts ------------------------------------------------------------------------------------


def test_every_seed_must_meet_the_rule():
    assert judge({"a": [True] * 3, "b": [True] * 3}, "-").kind is Kind.HOLDS
    some = judge({"a": [True] * 3, "b": [True, True, False]}, "-")
    assert some.kind is Kind.CONDITIONS and some.because == "a (1 of 2)"
    none = judge({"a": [True, False], "b": [False, True]}, "seeds disagree")
    assert str(none) == "does not hold here, because seeds disagree"
    many = judge({**{f"c{n}": [True] for n in range(9)}, "d": [False]}, "-")
    assert many.because == "all but d (9 of 10)"
    few = judge({**{f"c{n}": [True] for n in range(6)}, "d": [False]}, "-")
    assert few.because == "c0; c1; c2; c3; c4; c5 (6 of 7)"
    half = judge({**{f"c{n}": [True] for n in range(8)}, **{f"d{n}": [False] for n in range(8)}}, "-")
    assert half.because == "c0; c1; c2; c3; c4; c5; c6; c7 (8 of 16)"


# -- units ---------------------------------------------------------------------------------------


def test_results_are_kept_and_shared(tmp_path):
    log = tmp_path / "log"
    _, said = reproduce(tmp_path / "out", toy_claims.paper(str(log)))
    assert log.read_text().split() == ["1", "2", "3"]  # both claims name the same units
    assert "[3/3] square 3" in said and "about 0:00 left" in said
    _, said = reproduce(tmp_path / "out", toy_claims.paper(str(log), (1, 2, 3, 4)))
    assert log.read_text().split() == ["1", "2", "3", "4"] and "3 of 4 results are kept" in said


def test_other_settings_functions_and_versions_are_other_results(tmp_path, monkeypatch):
    unit = Unit("square 1", toy_claims.square, {"number": 1, "log": "x"})
    cache.save(tmp_path, unit, {"square": 1}, 0.1)
    assert cache.load(tmp_path, unit) == {"square": 1}
    assert cache.load(tmp_path, Unit("square 1", toy_claims.square, {"number": 2, "log": "x"})) is None
    assert cache.load(tmp_path, Unit("square 1", toy_claims.units, {"number": 1, "log": "x"})) is None
    cache.file_of(tmp_path, unit).write_text('{"found"')  # half a file is no result
    assert cache.load(tmp_path, unit) is None
    cache.save(tmp_path, unit, {"square": 1}, 0.1)
    monkeypatch.setattr("hvdcompress.__version__", "99")
    assert cache.load(tmp_path, unit) is None


def test_units_run_side_by_side(tmp_path):
    log = str(tmp_path / "log")
    units = toy_claims.units(log, (1, 2, 3, 4))
    lone = Unit("alone", toy_claims.square, {"number": 9, "log": log}, alone=True)
    found = run.measure([lone, *units], tmp_path / "cache", 2, Console(file=io.StringIO()))
    assert sorted(one["square"] for one in found.values()) == [1, 4, 9, 16, 81]
    assert Path(log).read_text().split()[-1] == "9"  # nothing ran at the same time: it came last


STOPPED = """
import sys
from rich.console import Console
from tests.unit.experiments import toy_claims
from pathlib import Path
from experiments.reproduce import run
if __name__ == "__main__":
    paper = toy_claims.paper({log!r}, (1, 2, 3), seconds={seconds})
    try:
        run.reproduce(paper, Path({out!r}), toy_claims.SCALE, {jobs}, Console(), "x")
    except KeyboardInterrupt:
        sys.exit(130)
"""


def heeds_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_loses_only_what_was_under_way(tmp_path):
    log, out, script = tmp_path / "log", tmp_path / "out", tmp_path / "script.py"
    names = {"log": str(log), "out": str(out), "jobs": 2, "seconds": 1.5}
    script.write_text(STOPPED.format(**names))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "start_new_session": True}
    # a shell's background job, and what it starts, would ignore the signal
    process = subprocess.Popen([sys.executable, str(script)], env=env, preexec_fn=heeds_ctrl_c, **how)
    until = time.monotonic() + 60
    while not list(out.glob("cache/*.json")) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=20) == 130
    kept = len(list(out.glob("cache/*.json")))
    assert 1 <= kept < 3 and not list(out.glob("*.md"))
    with pytest.raises(ProcessLookupError):  # no worker is left
        until = time.monotonic() + 10
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


# -- pages ---------------------------------------------------------------------------------------


def test_the_command_measures_prints_and_writes(tmp_path, monkeypatch):
    log = str(tmp_path / "log")
    monkeypatch.setattr(papers, "find", lambda id: toy_claims.paper(log))
    words = ["reproduce", "toy", "--output", str(tmp_path / "toy"), "--jobs", "1"]
    done = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for said in ("[3/3] square 3", "Squares are below 9.", "toy.md"):
        assert said in done.output
    again = CliRunner().invoke(cli.app, [*words, "--full"], env={"COLUMNS": "200"})
    assert again.exit_code == 0 and "3 of 3 results are kept" in again.output
    assert "python -m experiments reproduce toy --full" in (tmp_path / "toy" / "toy.md").read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "reproduce", interrupted)
    stopped = CliRunner().invoke(cli.app, words)
    assert stopped.exit_code == 130 and "what was measured is kept" in stopped.stderr


@pytest.mark.parametrize("id", papers.MODULES)
def test_every_papers_units_are_told_apart(id, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    paper = papers.find(id)
    for scale in (toy_claims.SCALE, toy_claims.Scale(quick=False)):
        units = {cache.file_of(tmp_path, unit).name: unit for claim in paper.claims for unit in claim.units(scale)}
        assert all(unit.seconds > 0 and json.dumps(unit.settings) for unit in units.values())
        # names alone tell units of one scale apart: they are what progress shows
        assert len({unit.name for unit in units.values()}) == len(units)
    assert len({claim.id for claim in paper.claims}) == len(paper.claims)


# -- Gaussian-k's measures, and a tiny training --------------------------------------------------


@pytest.fixture(scope="module")
def measures():
    pytest.importorskip("torch")
    return pytest.importorskip("experiments.reproduce.gaussiank_measures")


def test_known_distributions_are_recognised(measures):
    random = np.random.default_rng(0)
    normal, laplace = (measures.shape(draw(size=50_000)) for draw in (random.normal, random.laplace))
    assert normal["normal"] < 0.01 < 0.03 < normal["laplace"] and abs(normal["kurtosis"]) < 0.1
    assert laplace["laplace"] < 0.01 < 0.03 < laplace["normal"] and laplace["kurtosis"] == pytest.approx(3, abs=0.4)
    assert normal["beyond"] == pytest.approx(0.0027, rel=0.2) and laplace["beyond"] == pytest.approx(0.0144, rel=0.2)
    assert measures.bell(normal["histogram"], 50_000) and measures.bell(laplace["histogram"], 50_000)
    two = np.concatenate([random.normal(-2, 0.5, 20_000), random.normal(2, 0.5, 20_000)])
    assert not measures.bell(measures.shape(two)["histogram"], 40_000) and measures.shape(two)["normal"] > 0.1


def test_the_distance_is_scipys(measures):
    from scipy import stats

    x = np.sort(np.random.default_rng(1).normal(size=400).round(1))  # with ties
    assert measures.distance(x, measures.ndtr) == pytest.approx(stats.kstest(x, "norm").statistic, abs=1e-12)


def test_what_is_left_is_what_top_k_leaves(measures):
    from hvdcompress.loopback import Loopback

    x = np.random.default_rng(2).laplace(size=5000).astype(np.float32)
    net = Loopback("topk", world_size=1, density=0.01, min_elements=1)
    net.allreduce([x], name="x")
    wanted = np.linalg.norm(net.residual("x", 0).astype(np.float64)) ** 2 / np.linalg.norm(x.astype(np.float64)) ** 2
    assert measures.describe(x, [0.01])["left"]["0.01"] == pytest.approx(wanted, rel=1e-6)


def test_being_below_the_line_is_not_enough(measures):
    found = measures.counterexample(10_000, 0.05)
    assert found["above"] == 0 and found["left"] > found["bound"]
    uniform = measures.curve(np.sort(np.random.default_rng(0).random(10_000))[::-1])
    assert uniform["above"] < 0.02  # (1 − i/n)², in expectation, is below
    assert measures.curve(np.ones(100))["above"] == pytest.approx(0.99)


def test_counts_are_those_of_the_thresholds(measures):
    x = np.random.default_rng(3).normal(size=100_000).astype(np.float32)
    found = measures.counts(x, 0.01)
    assert found["first threshold"] == pytest.approx(1, abs=0.1) and 2 / 3 <= found["bisect"] <= 4 / 3
    heavy = measures.counts(np.random.default_rng(3).laplace(size=100_000).astype(np.float32), 0.001)
    assert heavy["first threshold"] > 4 and 2 / 3 <= heavy["bisect"] <= 4 / 3
    ties = measures.counts(np.ones(1000, np.float32), 0.01)
    assert ties["bisect"] == 1
    assert found.keys() == heavy.keys() == {*measures.RULES, *measures.OTHERS}
    for each in (found, heavy, ties):
        assert each["RedSync's trimmed top-k"] == 1 and 2 / 3 <= each["DGC's sampling"] <= 4 / 3
        assert 0 <= each["RedSync's binary search"] <= 2


def test_selectors_choose_what_they_should(measures):
    x = np.random.default_rng(4).laplace(size=20_000).astype(np.float32)
    exact = set(np.argsort(-np.abs(x))[:200].tolist())
    for name, choose in measures.selectors(len(x), 0.01).items():
        chosen = choose(x)
        index = chosen if isinstance(chosen, np.ndarray) else getattr(chosen, "indices", None)
        index = chosen.index if index is None else index
        assert name.startswith("Gaussian-k, paper") or len(set(np.asarray(index).tolist()) & exact) >= 130, name
    assert all(seconds > 0 for seconds in measures.times(5000, 0.01, 0, "laplace", 1)["seconds"].values())


def tiny(**method):
    task = {"task": "digits", "net": "fnn3", "steps": 6, "batch_size": 8, "learning_rate": 0.05, "warmup_steps": 1}
    return {"task": task, "method": method, "ranks": 2, "seed": 0}


def test_a_tiny_training_is_watched(measures):
    pytest.importorskip("sklearn")
    found = measures.watched(**tiny(method="topk", density=0.01), samples=3, densities=[0.01])
    assert {row["tensor"] for row in found["rows"]} == {"1.weight", "3.weight", "5.weight", "all tensors"}
    assert [row["step"] for row in found["rows"] if row["tensor"] == "all tensors"] == [1, 3, 5]
    assert [row["phase"] for row in found["rows"]][::4] == ["early", "middle", "late"]
    assert all(0 < row["left"]["0.01"] < 1 for row in found["rows"]) and json.dumps(found)


def test_simulated_ranks_keep_what_they_do_not_send(measures):
    """What a rank selects from is its gradient and the residual that the step before has left."""
    pytest.importorskip("sklearn")
    from experiments.reproduce import simulate

    left, seen = {}, []

    def look(moment):
        if left:
            assert all((moment.residuals[1][name] == left[name]).all() for name in left)
        left.update({name: moment.net.residual(name, 1).copy() for name in moment.reduced})
        seen.append(moment.step)
        whole = moment.accumulated(1)["1.weight"]
        assert (whole == moment.gradients[1]["1.weight"] + moment.residuals[1]["1.weight"]).all()

    trained = simulate.train(simulate.run_of(**tiny(method="topk", density=0.01)), look, range(6))
    assert seen == list(range(6)) and len(trained.losses) == 6 and trained.rate > 5
    again = simulate.train(simulate.run_of(**tiny(method="topk", density=0.01)))
    assert again.losses == trained.losses and again.value == trained.value  # looking changes nothing


def test_a_simulated_training_is_that_of_real_arithmetic(measures):
    """Dense, two ranks: the update is SGD's on the mean of both gradients."""
    pytest.importorskip("sklearn")
    import torch

    from experiments.reproduce import simulate

    def look(moment):
        for name, mean in moment.reduced.items():
            wanted = (moment.gradients[0][name] + moment.gradients[1][name]) / 2
            np.testing.assert_allclose(mean, wanted, rtol=1e-6, atol=1e-9)

    simulate.train(simulate.run_of(**tiny(method="none")), look, [0, 1, 5])
    assert torch.get_num_threads() == 1
