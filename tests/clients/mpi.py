"""Every byte of each message of mpi4py is compared; prints how many, the latency and the bandwidth."""

import time

import mpi4py
import numpy

# Open MPI's osc pt2pt, its windows over TCP, is for one thread.
mpi4py.rc.thread_level = "single"
from mpi4py import MPI  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.Get_rank(), WORLD.Get_size()
RIGHT, LEFT = (RANK + 1) % RANKS, (RANK - 1) % RANKS
SIZES = [1, 8, 1000, 8192, 65537, 1 << 20]
verified = 0


def pattern(size, sender, salt):
    """Bytes that depend on their place, their sender and the operation."""
    return ((numpy.arange(size) * 7 + sender * 31 + salt) % 256).astype(numpy.uint8)


def compare(found, expected, what):
    global verified
    if not numpy.array_equal(found, expected):
        print(f"rank {RANK}: {what} of {found.size} bytes is wrong", flush=True)
        WORLD.Abort(1)
    verified += found.nbytes


def ring(size):
    received = numpy.zeros(size, numpy.uint8)
    WORLD.Sendrecv(pattern(size, RANK, 1), RIGHT, 1, received, LEFT, 1)
    compare(received, pattern(size, LEFT, 1), "ring")


def all_reduce(size):
    received = numpy.zeros(size, numpy.int64)
    WORLD.Allreduce(pattern(size, RANK, 2).astype(numpy.int64), received)
    compare(received, sum(pattern(size, rank, 2).astype(numpy.int64) for rank in range(RANKS)), "all-reduce")


def all_to_all(size):
    sent = numpy.concatenate([pattern(size, RANK, to + 3) for to in range(RANKS)])
    received = numpy.zeros(size * RANKS, numpy.uint8)
    WORLD.Alltoall(sent, received)
    compare(received, numpy.concatenate([pattern(size, rank, RANK + 3) for rank in range(RANKS)]), "all-to-all")


def one_sided(size):
    """A put to the right and a get from the left, between fences; MPICH would allocate windows in memory that processes share."""
    memory = numpy.concatenate([numpy.zeros(size, numpy.uint8), pattern(size, RANK, 5)])
    window = MPI.Win.Create(memory, comm=WORLD)
    sent, fetched = pattern(size, RANK, 4), numpy.zeros(size, numpy.uint8)
    window.Fence()
    window.Put(sent, RIGHT, 0)
    window.Get(fetched, LEFT, size)
    window.Fence()
    compare(memory[:size], pattern(size, LEFT, 4), "put")
    compare(fetched, pattern(size, LEFT, 5), "get")
    window.Free()


def timed(size, rounds):
    """Seconds of a message to the right, received from the left."""
    sent, received = pattern(size, RANK, 6), numpy.zeros(size, numpy.uint8)
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        WORLD.Sendrecv(sent, RIGHT, 6, received, LEFT, 6)
    took = (time.perf_counter() - start) / rounds
    compare(received, pattern(size, LEFT, 6), "a timed message")
    return took


for operation in (ring, all_reduce, all_to_all, one_sided):
    for length in SIZES:
        operation(length)
latency, bandwidth = timed(8, 200), SIZES[-1] / timed(SIZES[-1], 50)
total = WORLD.reduce(verified)
if RANK == 0:
    print(f"verified {total} bytes, {latency * 1e6:.3f} us, {bandwidth / 1e9:.3f} GB/s")
