"""The mean of numbers that four actors of Ray have.

    python examples/ray_actors.py

On several hosts, `Rendezvous(RANKS, ADDRESS)` with an address of this host that the others reach.
"""

import array

import ray

import doorbell_rdma

RANKS = 4


@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, number, identity):
        self.comm = doorbell_rdma.Communicator(number, RANKS, identity)

    def mean(self, numbers):
        with self.comm:
            return self.comm.all_reduce(array.array("d", numbers), op="avg").tolist()


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    # The id has the group's secret, and where it meets.
    with doorbell_rdma.Rendezvous(RANKS) as rendezvous:
        actors = [Rank.remote(number, rendezvous.id) for number in range(RANKS)]
        means = ray.get([actor.mean.remote([number, 10 * number]) for number, actor in enumerate(actors)])
    for number, mean in enumerate(means):
        print(f"rank {number} of {RANKS}: {mean}")
