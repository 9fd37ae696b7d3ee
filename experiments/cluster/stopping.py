"""The former place of :mod:`experiments.cluster.launch`'s ``stoppable``; for modules that are being rewritten."""

from experiments.cluster.launch import Stopped, stoppable

__all__ = ["Stopped", "stoppable"]
