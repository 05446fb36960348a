"""Least squares by gradient descent, each rank with samples of its own, under a launcher of MPI:

    mpirun -n 2 python examples/launched.py

No MPI is loaded: the ranks meet as the launcher's variables say. With mpi4py, rank 0 would make a
`doorbell_rdma.Rendezvous`, and `MPI.COMM_WORLD.bcast` its id.
"""

import numpy

import doorbell_rdma

STEPS, FEATURES, SAMPLES = 200, 8, 1000

with doorbell_rdma.Communicator.from_env() as comm:
    random = numpy.random.default_rng(comm.rank)
    wanted = numpy.arange(FEATURES, dtype="f8")
    inputs = random.normal(size=(SAMPLES, FEATURES))
    outputs = inputs @ wanted
    weights = numpy.zeros(FEATURES)
    for step in range(STEPS):
        gradient = inputs.T @ (inputs @ weights - outputs) / SAMPLES
        comm.all_reduce(gradient, op="avg")
        weights -= 0.1 * gradient
    print(f"rank {comm.rank} of {comm.size}: error {abs(weights - wanted).max():.1e}")
