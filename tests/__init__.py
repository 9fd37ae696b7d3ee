"""The tests, by what they need: one process, launched ranks, emulated hosts, or an idle machine (chaos)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  #: the repository
