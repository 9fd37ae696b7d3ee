"""``experiments to-accuracy``: ranks train and are timed."""

from __future__ import annotations

import pytest

from experiments import units
from experiments.to_accuracy import run
from experiments.to_accuracy.races import RACES
from tests.installed import needs, python_path

TINY = """
import numpy as np
from experiments.momentum.contenders import constant
from experiments.to_accuracy import rank
from experiments.to_accuracy.races import RACES, Race
from experiments.training.tasks import ACCURACY, TASKS, Images, Source

RACE = Race(constant("fnn3", "tiny", 0.1, steps=4, batch_size=4), 0.0, every=2, ranks=2)
RACES["tiny"] = RACE
random = np.random.default_rng(0)
x, y = random.standard_normal((40, 1, 28, 28), np.float32), random.integers(0, 10, 40)
TASKS["tiny"] = Source(lambda: Images(x[:30], y[:30], x[30:], y[30:], classes=10), "fnn3", ACCURACY)
if __name__ == "__main__":
    rank.main()
"""


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A race of four steps, in a module that the ranks import, too."""
    monkeypatch.setattr(run, "MODULE", "tiny_race")
    module = tmp_path / "tiny_race.py"
    module.write_text(TINY)
    monkeypatch.setenv("PYTHONPATH", python_path(str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    import tiny_race

    monkeypatch.setitem(RACES, "tiny", tiny_race.RACE)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", ["ddp", pytest.param("horovod", marks=pytest.mark.slow)])
def test_ranks_train(tiny, driver):
    needs("torch", *(["horovod"] if driver == "horovod" else []))
    run.train_all(run.Setting(tiny, driver), ["tiny"], ["topk@density=0.05"], [1])
    (found,) = units.kept(tiny)["evaluations"]
    assert [step for step, _, _ in found] == [2, 4] and 0 <= found[-1][2] <= 100


@pytest.mark.slow
def test_ranks_are_timed(tiny):
    needs("torch")
    measured = run.Setting(tiny, "ddp").measured(
        {"kind": "time", "race": "tiny", "rate": None}, contenders=["dense", "fp16"], rounds=2, turn=0.01
    )
    assert [each["contender"] for each in measured] == ["dense", "fp16"]
    assert all(len(each["milliseconds"]) == 2 and min(map(min, each["milliseconds"])) > 0 for each in measured)
