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
    assert {entry.method for entry in compared} == set(hvdcompress.available())


@pytest.mark.parametrize("words", ["run quickstar", "bench resnet5", "scale scal"])
def test_a_wrong_name_gets_a_suggestion(words):
    wrong = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "200"})
    assert wrong.exit_code == 2 and "did you mean" in wrong.output
