"""The mean of numbers that the ranks of MPI have; mpi4py passes the id by which they meet.

    mpirun -n 4 python examples/mpi.py

On several hosts, `Rendezvous(world.size, ADDRESS)` with an address of rank 0's host that the others reach.
"""

import array

from mpi4py import MPI

import doorbell_rdma

world = MPI.COMM_WORLD
# The id has the group's secret, and where it meets.
rendezvous = doorbell_rdma.Rendezvous(world.size) if world.rank == 0 else None
identity = world.bcast(rendezvous and rendezvous.id)
numbers = array.array("d", [world.rank, 10 * world.rank])
with doorbell_rdma.Communicator(world.rank, world.size, identity) as comm:
    comm.all_reduce(numbers, op="avg")
print(f"rank {world.rank} of {world.size}: {numbers.tolist()}")
