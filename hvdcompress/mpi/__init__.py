"""Compressed all-reduces of numpy arrays over MPI, with mpi4py and without a deep-learning framework."""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.mpi.compressor import Compressor

__all__ = ["Compressor", "PeerError"]
