"""All-reduce of NumPy's float32 in place, 2 ranks, from 8 B to 64 MiB: this package beside the same
communicator in Rust (the package's own `doorbell coll`) and, where it is installed, mpi4py. "alloc" is
in memory of the communicator, as Rust's. By turns; of each the best.

    python bench/all_reduce.py [TURNS]

Times are of one operation, in microseconds, on rank 0. Of all kinds, each rank's thread is bound to
the same processor. Exit status 1: a bound is missed.
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
SIZES = [8 << step for step in range(24)]
# As of `doorbell coll`: for a tenth of a second, within these.
SECONDS, FEWEST, MOST = 0.1, 10, 5000
# What is expected: of Rust's speed in memory of the communicator, and of mpi4py's.
OF_RUST, OF_MPI = 0.95, 1.0


def plain(size):
    return numpy.ones(size // 4, "f4")


def measure(rank, all_reduce, barrier, memory=plain):
    """Microseconds by size, of `all_reduce(array)`."""
    if len(os.sched_getaffinity(0)) >= RANKS:
        # This thread alone, as `doorbell coll` does: others have begun before.
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
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
    with doorbell_rdma.Communicator(rank, RANKS, identity) as comm:
        shared = lambda size: numpy.frombuffer(comm.alloc(size), "f4")
        return measure(rank, comm.all_reduce, comm.barrier, shared if kind == "alloc" else plain)


def mpi_rank():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    times = measure(world.rank, lambda array: world.Allreduce(MPI.IN_PLACE, array), world.Barrier)
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
    words = ["coll", "allreduce", "--ranks", str(RANKS), "--json", "-f", "2"]
    words += ["-b", str(SIZES[0]), "-e", str(SIZES[-1])]
    printed = subprocess.run([doorbell_rdma.command(), *words], stdout=subprocess.PIPE, check=True).stdout
    return {result["bytes"]: result["in_place"]["time_us"] for result in json.loads(printed)["results"]}


def ranks_of_mpi():
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return _read(["mpirun", *root, "--bind-to", "none", "-n", str(RANKS), sys.executable, __file__, "mpi"])


def _read(words):
    printed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    return {int(size): micros for size, micros in json.loads(printed).items()}


def has_mpi():
    command = [sys.executable, "-c", "from mpi4py import MPI"]
    return shutil.which("mpirun") is not None and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def spread():
    """Leaves out processors so that the first ones, which the ranks are bound to, are of other cores."""
    processors = sorted(os.sched_getaffinity(0))
    cores, chosen = set(), []
    for processor in processors:
        try:
            with open(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list") as siblings:
                core = siblings.read()
        except OSError:
            core = processor
        if len(chosen) < RANKS and core in cores:
            continue
        cores.add(core)
        chosen.append(processor)
    if len(chosen) >= RANKS:
        os.sched_setaffinity(0, chosen)


def main(turns):
    spread()
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
    against = [("Rust", "Python"), ("Rust", "alloc")] + [("mpi4py", "Python"), ("mpi4py", "alloc")] * has_mpi()
    ratios = {pair: {size: best[pair[0]][size] / best[pair[1]][size] for size in SIZES} for pair in against}
    print(f"{'bytes':>9}", *(f"{kind:>9}" for kind in kinds), *(f"{'/'.join(pair):>14}" for pair in against))
    for size in SIZES:
        micros = (f"{best[kind][size]:>9.2f}" for kind in kinds)
        print(f"{size:>9}", *micros, *(f"{ratios[pair][size]:>14.2f}" for pair in against))
    of_rust = ratios["Rust", "alloc"][SIZES[-1]]
    met = of_rust >= OF_RUST
    print(f"alloc at {SIZES[-1]} B: {of_rust:.2f} of Rust's speed, expected {OF_RUST}: {'met' if met else 'missed'}")
    for kind in ("Python", "alloc") if has_mpi() else ():
        behind = [size for size in SIZES if ratios["mpi4py", kind][size] < OF_MPI]
        met = met and not behind
        print(f"{kind} at every size {OF_MPI} of mpi4py's speed: {f'missed at {behind}' if behind else 'met'}")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        print(json.dumps(doorbell_rank(int(sys.argv[2]), *sys.argv[3:])))
    elif sys.argv[1:2] == ["mpi"]:
        times = mpi_rank()
        if times is not None:
            print(json.dumps(times))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
