"""The command line of the wheel: help, errors, methods, configurations, doctor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

import hvdcompress
from hvdcompress.cli import app as cli
from hvdcompress.cli import catalogue, doctor, numbers
from tests import ROOT
from tests.installed import runs_without

COMMANDS = list(typer.main.get_command(cli.app).commands)


def invoke(*words, width=200):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": str(width)})


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


def test_python_m_hvdcompress():
    line = [sys.executable, "-m", "hvdcompress", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip() == hvdcompress.__version__, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command):
    result = invoke(command, "--help", width=80)
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    assert "hvdcompress" in result.output.split("Examples:")[1]


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
    result = invoke("methods")
    assert result.exit_code == 0
    for word in ("scalecom", "gaussiank", "2104.11125", "density=0.01"):
        assert word in result.output
    one = invoke("methods", "topk")
    assert "Departures from the papers" in one.output and "number, > 0 and ≤ 1" in one.output
    wrong = invoke("methods", "topkk")
    assert wrong.exit_code == 2 and "did you mean 'topk'?" in wrong.output
    everything = json.loads(invoke("methods", "--json").stdout)
    assert [each["id"] for each in everything] == hvdcompress.available()
    assert everything[-1] == json.loads(invoke("methods", "topk", "--json").stdout)


@pytest.mark.parametrize("id", hvdcompress.available())
def test_a_config_is_read_back_as_the_defaults(id, tmp_path):
    file = tmp_path / "new" / "plan.yaml"
    assert invoke("configs", id, "--copy", file).exit_code == 0
    plan, text = hvdcompress.load(file), file.read_text(encoding="utf-8")
    assert plan == hvdcompress.load({"method": id}) and plan.program.main == hvdcompress.get(id)
    assert text == invoke("configs", id).stdout
    for option in catalogue.options(type(hvdcompress.get(id))):
        assert f"\n{option.name}: " in text and option.about and option.about[:30] in text.replace("\n# ", " ")


def test_configs(tmp_path):
    listed = invoke("configs").stdout.split()
    assert listed == ["auto", *hvdcompress.available()]
    file = tmp_path / "auto.yaml"
    assert invoke("configs", "auto", "--copy", file).exit_code == 0
    assert hvdcompress.load(file) == hvdcompress.load({"method": "auto"})
    again = invoke("configs", "topk", "--copy", file)
    assert again.exit_code == 2 and "auto.yaml" in again.output and "auto" in file.read_text()
    assert invoke("configs", "--copy", file).exit_code == 2
    assert "did you mean 'topk'?" in invoke("configs", "topkk").output


# -- doctor ------------------------------------------------------------------------------------------------


def test_doctor_tells_absent_from_broken(monkeypatch, tmp_path):
    (tmp_path / "cracked.py").write_text("raise ImportError('libmpi.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = {
        "absent": doctor.Check("no_such_package", "pip install it"),
        "cracked": doctor.Check("cracked", "pip install it"),
        "slow": doctor.Check("numpy", "", "import time; time.sleep(60)"),
        "numpy": doctor.Check("numpy", "", launch="env X=1"),
        "launcher": doctor.Check("numpy", "", launch="no_such_launcher -np 2"),
    }
    found = {name: check.run(1.0 if name == "slow" else 60.0) for name, check in checks.items()}
    assert found["absent"] == doctor.Finding("absent", "no_such_package: not installed", "pip install it")
    assert found["cracked"].state == "broken" and found["cracked"].found == "ImportError: libmpi.so is missing"
    assert found["slow"] == doctor.Finding("broken", "no result within 1 s", "install it again: ")
    assert found["numpy"].state == "works" and found["numpy"].found[0].isdigit()
    assert found["launcher"].state == "absent"
    for kept, status in ((["absent", "numpy"], 0), (["cracked", "numpy"], 1)):
        monkeypatch.setattr(doctor, "CHECKS", [checks[name] for name in kept])
        result, data = invoke("doctor"), invoke("doctor", "--json")
        assert result.exit_code == data.exit_code == status
        assert "– no_such_package" in result.output or "✗ cracked" in result.output
        assert [each["state"] for each in json.loads(data.stdout)] == [found[name].state for name in kept]


# -- numbers -----------------------------------------------------------------------------------------------


def test_numbers_have_units():
    assert [numbers.number(value) for value in (1234.5, 0.01234, 0.0)] == ["1230", "0.0123", "0.00"]
    assert [numbers.duration(value) for value in (8.5e-4, 0.0123, 0.9996)] == ["850 µs", "12.3 ms", "1.00 s"]
    assert [numbers.size(value) for value in (999, 5120, 1.234e9, 5e12)] == ["999 B", "5.12 kB", "1.23 GB", "5000 GB"]
