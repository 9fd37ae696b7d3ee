"""Experiments: small trainings that compare methods."""
