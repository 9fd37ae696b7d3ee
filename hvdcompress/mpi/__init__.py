"""MPI without a framework: any method on numpy arrays, under plain ``mpirun -np N``."""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.mpi.compressor import Compressor

__all__ = ["Compressor", "PeerError"]
