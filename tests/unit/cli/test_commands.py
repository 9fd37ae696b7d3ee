"""The command line of the wheel: help, errors, methods, configurations, doctor."""

from __future__ import annotations

import json
import math

import pytest
import typer.main
from typer.testing import CliRunner

import hvdcompress
from hvdcompress.cli import app as cli
from hvdcompress.cli import catalogue, doctor, numbers
from tests.installed import needs, runs_without

COMMANDS = list(typer.main.get_command(cli.app).commands)


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_only_advise_needs_a_framework():
    code = (
        "from typer.testing import CliRunner\n"
        "from hvdcompress.cli.app import app\n"
        "for words in ('--help', '--version', 'methods', 'methods topk', 'configs topk', 'advise --help'):\n"
        "    result = CliRunner().invoke(app, words.split())\n"
        "    assert result.exit_code == 0, (words, result.output, result.exception)\n"
        "result = CliRunner().invoke(app, ['advise', '--model', 'a:b', '--data', 'a:c'])\n"
        "assert result.exit_code == 2 and 'hvdcompress[torch]' in result.output, result.output\n"
    )
    runs_without(("torch", "tensorflow", "horovod", "mpi4py", "pandas", "matplotlib", "experiments", "psutil"), code)


def test_advise_in_a_single_process_says_how_to_start_ranks():
    needs("torch")
    result = invoke("advise", "--model", "a:b", "--data", "a:c")
    assert result.exit_code == 2 and "torchrun" in result.output and "horovodrun" in result.output


def test_version():
    assert invoke("--version").stdout.strip() == hvdcompress.__version__


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0 and "hvdcompress" in result.output.split("Examples:")[1]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("density = 2"), 2, "density = 2"),
        (FileNotFoundError(2, "No such file", "x.yaml"), 2, "x.yaml"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), 2, "hvdcompress[torch]"),
        (ModuleNotFoundError("No module named 'other'", name="other"), 2, "the package other is not installed"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_a_line_and_a_status(monkeypatch, error, status, words):
    def describe(id):
        raise error

    monkeypatch.setattr(catalogue, "describe", describe)
    quiet, loud = invoke("methods", "topk"), invoke("methods", "topk", "--debug")
    assert quiet.exit_code == loud.exit_code == status
    assert quiet.output.startswith("error: ") and words in quiet.output and "Traceback" not in quiet.output
    assert ("Traceback" in loud.output) == isinstance(error, Exception)
    assert ("with --debug" in quiet.output) == (status == 1)


# -- methods and configs -----------------------------------------------------------------------------------


def test_methods():
    assert "scalecom" in invoke("methods").output
    one = invoke("methods", "topk").output
    assert "Departures from the papers" in one and "number, > 0 and ≤ 1" in one
    everything = json.loads(invoke("methods", "--json").stdout)
    assert [each["id"] for each in everything] == hvdcompress.available()
    assert everything[-1] == json.loads(invoke("methods", "topk", "--json").stdout)


@pytest.mark.parametrize("command", ["methods", "configs"])
def test_an_unknown_method_gets_a_suggestion(command):
    wrong = invoke(command, "topkk")
    assert wrong.exit_code == 2 and "did you mean 'topk'?" in wrong.output


@pytest.mark.parametrize("id", hvdcompress.available())
def test_a_config_has_every_option_with_its_default(id, tmp_path):
    file, text = tmp_path / "plan.yaml", invoke("configs", id).stdout
    file.write_text(text, encoding="utf-8")
    plan = hvdcompress.load_plan(file)
    assert plan == hvdcompress.load_plan({"method": id}) and plan.program.main == hvdcompress.get_method(id)
    for option in catalogue.options(type(hvdcompress.get_method(id))):
        assert f"\n{option.name}: " in text and option.about and option.about[:30] in text.replace("\n# ", " ")


def test_configs_are_listed(tmp_path):
    assert invoke("configs").stdout.split() == ["auto", *hvdcompress.available()]
    file = tmp_path / "auto.yaml"
    file.write_text(invoke("configs", "auto").stdout, encoding="utf-8")
    assert hvdcompress.load_plan(file) == hvdcompress.load_plan({"method": "auto"})


# -- doctor ------------------------------------------------------------------------------------------------


NO_PACKAGE = doctor.Check("no_such_package", "pip install it")
BROKEN = doctor.Check("numpy", "pip install it", "raise ImportError('libmpi.so is missing')")


@pytest.mark.parametrize(
    ("check", "state", "found"),
    [
        (NO_PACKAGE, "absent", "no_such_package: not installed"),
        (BROKEN, "broken", "ImportError: libmpi.so is missing"),
        (doctor.Check("numpy", "", "import time; time.sleep(60)"), "broken", "no result within 3 s"),
        (doctor.Check("numpy", "", launch="env X=1"), "works", ""),
        (doctor.Check("numpy", "", launch="no_such_launcher -np 2"), "absent", ""),
    ],
)
def test_doctor_tells_absent_from_broken(check, state, found):
    finding = check.run(3.0)
    assert finding.state == state and found in finding.found


@pytest.mark.parametrize(("check", "status", "line"), [(NO_PACKAGE, 0, "– no_such_package"), (BROKEN, 1, "✗ numpy")])
def test_doctor_prints_and_fails_if_something_is_broken(monkeypatch, check, status, line):
    monkeypatch.setattr(doctor, "CHECKS", [check])
    result = invoke("doctor")
    assert result.exit_code == status and line in result.output


# -- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "values", "texts"),
    [
        (numbers.number, (1234.5, 0.01234, 0.0), ["1230", "0.0123", "0.00"]),
        (numbers.duration, (8.5e-4, 0.0123, 0.9996), ["850 µs", "12.3 ms", "1.00 s"]),
        (numbers.bits_of, ("100mbit", "1gbit", "2.5gbit", "64kbit"), [10**8, 10**9, 2_500_000_000, 64_000]),
        (numbers.size, (999, 5120, 1.234e9, 5e12), ["999 B", "5.12 kB", "1.23 GB", "5000 GB"]),
    ],
)
def test_numbers_have_units(form, values, texts):
    assert [form(value) for value in values] == texts


def test_intervals_are_those_of_students_t():
    found = numbers.mean_interval([1.0, 2.0, 3.0])
    assert found == pytest.approx((2, 2 - 2.920 / 3**0.5, 2 + 2.920 / 3**0.5), rel=1e-3)
    one = numbers.mean_interval([1.0])
    assert one.mean == 1 and math.isnan(one.low) and math.isnan(one.high) and math.isnan(numbers.mean_interval([]).mean)


@pytest.mark.parametrize("text", ["fast", "10", "1bit", "1 mb", "0mbit", "1gbit/1mbit"])
def test_wrong_rates(text):
    with pytest.raises(ValueError, match="is not a rate"):
        numbers.bits_of(text)
