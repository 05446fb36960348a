"""All-reduce of NumPy's float32 in place, 2 ranks, from 8 B to 64 MiB: this package beside the same
communicator in Rust (`doorbell coll`) and, where it is installed, mpi4py. "alloc" is in memory of the
communicator, as Rust's. By turns; of each the best.

    python bench/all_reduce.py [TURNS]

Times are of one operation, in microseconds, on rank 0.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy

import doorbell_rdma

RANKS = 2
SIZES = [8 << (3 * step) for step in range(7)] + [64 << 20]
# As of `doorbell coll`: for a tenth of a second, within these.
SECONDS, FEWEST, MOST = 0.1, 10, 5000


def plain(size):
    return numpy.ones(size // 4, "f4")


def measure(all_reduce, barrier, memory=plain):
    """Microseconds by size, of `all_reduce(array)`."""
    times = {}
    for size in SIZES:
        array = memory(size)

        def repeat(count):
            barrier()
            start = time.perf_counter()
            for _ in range(count):
                all_reduce(array)
            return (time.perf_counter() - start) / count

        # All ranks repeat as often: the estimate is reduced, too.
        estimate = numpy.array([min(repeat(3) for _ in range(5))], "f8")
        all_reduce(estimate)
        count = int(min(max(SECONDS / estimate[0] * RANKS, FEWEST), MOST))
        repeat(count // 10 + 2)
        times[size] = 1e6 * repeat(count)
    return times


def doorbell_rank(rank, identity, kind):
    if len(os.sched_getaffinity(0)) > RANKS:
        # As `doorbell coll` does.
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    with doorbell_rdma.Communicator(rank, RANKS, identity) as comm:
        shared = lambda size: numpy.frombuffer(comm.alloc(size), "f4")
        return measure(comm.all_reduce, comm.barrier, shared if kind == "alloc" else plain)


def mpi_rank():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    times = measure(lambda array: world.Allreduce(MPI.IN_PLACE, array), world.Barrier)
    return times if world.rank == 0 else None


def ranks_of_doorbell(kind):
    with doorbell_rdma.Rendezvous(RANKS) as rendezvous:
        words = [[sys.executable, __file__, "rank", str(rank), rendezvous.id, kind] for rank in range(RANKS)]
        others = [subprocess.Popen(of_rank, stdout=subprocess.DEVNULL) for of_rank in words[1:]]
        times = _read(words[0])
        for other in others:
            other.wait()
    return times


def ranks_of_rust():
    sizes = {}
    # Its sizes grow by one factor.
    for lowest, highest in (SIZES[0], SIZES[-2]), (SIZES[-1], SIZES[-1]):
        words = ["coll", "allreduce", "--ranks", str(RANKS), "--json", "-f", "8"]
        words += ["-b", str(lowest), "-e", str(highest)]
        printed = subprocess.run([doorbell_rdma.command(), *words], stdout=subprocess.PIPE, check=True).stdout
        for result in json.loads(printed)["results"]:
            sizes[result["bytes"]] = result["in_place"]["time_us"]
    return sizes


def ranks_of_mpi():
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return _read(["mpirun", *root, "-n", str(RANKS), sys.executable, __file__, "mpi"])


def _read(words):
    printed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    return {int(size): micros for size, micros in json.loads(printed).items()}


def has_mpi():
    command = [sys.executable, "-c", "from mpi4py import MPI"]
    return shutil.which("mpirun") is not None and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def main(turns):
    kinds = {
        "Python": lambda: ranks_of_doorbell("plain"),
        "alloc": lambda: ranks_of_doorbell("alloc"),
        "Rust": ranks_of_rust,
    }
    if has_mpi():
        kinds["mpi4py"] = ranks_of_mpi
    best = {kind: {size: float("inf") for size in SIZES} for kind in kinds}
    for _ in range(turns):
        for kind, run in kinds.items():
            for size, micros in run().items():
                best[kind][size] = min(best[kind][size], micros)
    print(f"{'bytes':>9}", *(f"{kind:>10}" for kind in kinds), " Rust/Python  Rust/alloc")
    for size in SIZES:
        micros = [best[kind][size] for kind in kinds]
        ratios = [best["Rust"][size] / best[kind][size] for kind in ("Python", "alloc")]
        print(f"{size:>9}", *(f"{value:>10.1f}" for value in micros), *(f"{ratio:>11.2f}" for ratio in ratios))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        print(json.dumps(doorbell_rank(int(sys.argv[2]), *sys.argv[3:])))
    elif sys.argv[1:2] == ["mpi"]:
        times = mpi_rank()
        if times is not None:
            print(json.dumps(times))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
