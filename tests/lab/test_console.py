"""The terminal of commands: moving lines and colours only where a person watches, and never from a launcher's rank."""

from __future__ import annotations

import io
import sys

import pytest

from hvdcompress.lab.output.console import console_of, is_rank

OF_RANKS = {
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "horovodrun --gloo": {"HOROVOD_RANK": "1"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"},
    "MPICH": {"PMI_RANK": "3"},
    "srun": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
}


class Terminal(io.StringIO):
    """What a terminal would be sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", *(name for one in OF_RANKS.values() for name in one)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def said(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command prints that has a spinner and a coloured line."""
    monkeypatch.setattr(sys, "stdout", stream)
    console = console_of()
    with console.status("working …"):
        console.print("[red]done[/]")
    return stream.getvalue()


def test_a_terminal_has_a_spinner_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(Terminal(), monkeypatch)
    assert "working" in text and "\x1b[31mdone" in text and not is_rank()


@pytest.mark.parametrize("launcher", OF_RANKS)
def test_a_rank_has_neither(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_RANKS[launcher].items():
        monkeypatch.setenv(name, value)
    assert is_rank() and said(Terminal(), monkeypatch) == "done\n"


def test_a_file_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(io.StringIO(), monkeypatch) == "done\n"


def test_forced_colours_bring_no_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert said(io.StringIO(), monkeypatch) == "\x1b[31mdone\x1b[0m\n"


def test_a_lone_task_of_slurm_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")  # srun --pty bash
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not is_rank()
