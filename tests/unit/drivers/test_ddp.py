"""``python -m hvdcompress.ddp``: scripts that it runs, and wrong command lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import environment

OPTIONS = ["--method", "topk", "--set", "density=0.1"]


def main(line: list[str]) -> None:
    from hvdcompress.ddp import __main__

    __main__.main(line)


def test_a_script_without_a_ddp_module_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import helper, sys\nprint(__name__, sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "package.py").write_text("import sys\nprint('module', sys.argv[1:])\n")
    line = [sys.executable, "-m", "hvdcompress.ddp", *OPTIONS, str(script), "0", "--set", "x"]
    done = subprocess.run(line, env=environment("alone"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "__main__ ['0', '--set', 'x']\n", done.stderr
    assert "nothing.py has made no DistributedDataParallel module" in done.stderr

    monkeypatch.setattr(sys, "argv", [])  # main() changes both
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    with pytest.raises(SystemExit, match="3"):
        main([*OPTIONS, str(script), "3"])
    assert "warning" not in capsys.readouterr().err, "it has failed for another reason"
    main([*OPTIONS, "-m", "package", "--set", "y"])
    said = capsys.readouterr()
    assert said.out == "module ['--set', 'y']\n" and "package has made no" in said.err


@pytest.mark.parametrize(
    "line,words",
    [
        (["train.py"], "one of the arguments --plan --method is required"),
        (["--plan", "a.yaml", "--method", "topk", "train.py"], "not allowed with argument --plan"),
        (["--plan", "missing.yaml", "train.py"], "missing.yaml"),
        (["--method", "topkk", "train.py"], "did you mean"),
        (["--method", "topk", "--set", "density", "train.py"], "KEY=VALUE, not 'density'"),
        (["--method", "topk", "--set", "density=2", "train.py"], "density"),
        (["--method", "topk"], "no script"),
    ],
)
def test_wrong_command_lines(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_ddp_modules_are_as_before_when_the_script_has_ended() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from hvdcompress.ddp.__main__ import every_module
    from hvdcompress.plan import plan_of

    before = DistributedDataParallel.__init__
    with pytest.raises(KeyError), every_module(plan_of("topk")):
        assert DistributedDataParallel.__init__ is not before
        raise KeyError
    assert DistributedDataParallel.__init__ is before
