"""The mean of numbers that four processes have, which multiprocessing starts.

    python examples/processes.py
"""

import array
import multiprocessing

import doorbell_rdma

RANKS = 4


def rank(number, identity):
    numbers = array.array("d", [number, 10 * number])
    with doorbell_rdma.Communicator(number, RANKS, identity) as comm:
        comm.all_reduce(numbers, op="avg")
    print(f"rank {number} of {RANKS}: {numbers.tolist()}")


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    # The id has the group's secret, and where it meets.
    with doorbell_rdma.Rendezvous(RANKS) as rendezvous:
        processes = [spawn.Process(target=rank, args=(number, rendezvous.id)) for number in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    raise SystemExit(max(process.exitcode for process in processes))
