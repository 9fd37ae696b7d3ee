"""Configurations of experiments: found by name."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import hvdcompress
from experiments import __main__ as cli
from experiments import packaged
from experiments.training.experiment import Experiment


def test_all_methods_are_compared():
    compared = Experiment.open(packaged.FOLDER / "bench" / "compare.yaml").methods
    own = (hvdcompress.registry.classes()[id] for id in hvdcompress.available())  # not those of the experiments
    assert {entry.method for entry in compared} == {one.id for one in own if one.__module__.startswith("hvdcompress.")}


@pytest.mark.parametrize("words", ["run quickstar", "bench resnet5", "scale scal"])
def test_a_wrong_name_gets_a_suggestion(words):
    wrong = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "200"})
    assert wrong.exit_code == 2 and "did you mean" in wrong.output
