"""Configurations of experiments: found by name."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments import options
from experiments.configfile import MethodsFile
from tests import ROOT


def test_all_methods_are_compared():
    compared = MethodsFile.open(options.CONFIGS / "bench" / "compare.yaml").methods
    # not `available()`, which has methods that other tests have registered, too
    ours = {file.stem for file in (ROOT / "hvdcompress" / "methods").glob("[a-z]*.py")}
    assert {entry.method for entry in compared} == ours


@pytest.mark.parametrize("words", ["run quickstar", "bench resnet5", "scale scal"])
def test_a_wrong_name_gets_a_suggestion(words):
    wrong = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "200"})
    assert wrong.exit_code == 2 and "did you mean" in wrong.output


def test_seeds_and_hosts():
    assert options.seeds_of("1-3,7") == [1, 2, 3, 7]
    assert options.emulated_hosts(None, None) is None
    for words, reason in (
        ((None, "1gbit"), "need --hosts and the rate"),
        ((4, None), "need --hosts and the rate"),
        ((4, "1gbit", 2), "leave out -np"),
        ((4, "fast"), "is not a rate"),
    ):
        with pytest.raises(ValueError, match=reason):
            options.emulated_hosts(*words)
