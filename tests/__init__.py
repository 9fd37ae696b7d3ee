"""The tests, by what they need: one process, launched ranks, emulated hosts, or an idle machine (chaos)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  #: the repository

#: of the tests of the command
SMALL_EXPERIMENT = """\
name: small
tasks: [{task: digits, steps: 20}]
methods: [none, {method: topk, density: 0.01}]
"""
