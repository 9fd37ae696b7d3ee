"""MPI without a framework: any method on numpy arrays, under plain ``mpirun -np N``."""

from hvdcompress.mpi.compressor import Compressor, PeerError

__all__ = ["Compressor", "PeerError"]
