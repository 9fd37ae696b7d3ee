"""Chaos: short trainings, each with one fault on purpose, and what came of them."""
