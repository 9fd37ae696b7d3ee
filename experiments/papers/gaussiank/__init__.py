"""Gaussian-k: Shi et al. 2019."""
