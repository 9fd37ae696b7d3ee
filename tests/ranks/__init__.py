"""Tests that pytest runs on every rank of a launch, and what they share; see ``conftest.py``."""
