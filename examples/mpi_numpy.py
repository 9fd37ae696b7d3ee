"""Linear regression by gradient descent on numpy arrays, with gradients that MPI averages, compressed.

mpirun -np 4 python -m mpi4py examples/mpi_numpy.py

The first run compiles kernels, which takes some seconds; later runs load them from disk.
"""

import numpy as np
from mpi4py import MPI

from hvdcompress.mpi import Compressor

comm = MPI.COMM_WORLD
rng = np.random.default_rng(comm.rank)  # every rank has its own data
truth = np.random.default_rng(99).normal(size=1024).astype(np.float32)
x = rng.normal(size=(2048, 1024)).astype(np.float32)
y = x @ truth

compressor = Compressor("scalecom", comm, density=0.05, optimizer_momentum="keep")  # plain gradient descent has none
weights = np.zeros_like(truth)
for _step in range(300):
    gradient = x.T @ (x @ weights - y) / len(y)
    weights -= np.float32(0.1) * compressor.allreduce(gradient, name="weights")

if comm.rank == 0:
    error = np.linalg.norm(weights - truth) / np.linalg.norm(truth)
    if comm.size == 1:
        print(f"one rank, error {error:.1%}: one rank sends nothing; start several with mpirun -np 4")
    else:
        ratio = compressor.ledger.compression_ratio()
        print(f"{comm.size} ranks, error {error:.1%}, {ratio:.1f} times fewer bytes than dense")
        print(compressor.summary())
