"""The tensors to exchange, from a word of the command line."""

from experiments.cost_model.scale import tensors_of

__all__ = ["tensors_of"]
