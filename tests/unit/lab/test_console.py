"""The terminal of commands: moving lines and colours only where a person watches, and never from a launcher's rank."""

from __future__ import annotations

import io
import sys

import pytest

from hvdcompress.lab.output.console import console_of
from tests.unit.lab.test_started import OF_RANKS

#: what launchers set for their ranks
VARIABLES = {name for given, _ in OF_RANKS.values() for name in given}


class Terminal(io.StringIO):
    """What a terminal would be sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", *VARIABLES):
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
    assert "working" in text and "\x1b[31mdone" in text


@pytest.mark.parametrize("launcher", OF_RANKS)
def test_a_rank_has_neither(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, _ = OF_RANKS[launcher]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert said(Terminal(), monkeypatch) == "done\n"


def test_a_file_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(io.StringIO(), monkeypatch) == "done\n"


def test_forced_colours_bring_no_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert said(io.StringIO(), monkeypatch) == "\x1b[31mdone\x1b[0m\n"
