#!/usr/bin/env python3
"""Programs that use NCCL, on Doorbell's libnccl.so.2 and beside it on NCCL's, a rank on each GPU.

Checks that both give the same results (the same bits where two ranks are summed, else losses within
1 %, as the order of a sum differs), that a survivor gets an error with the rank when one is killed and ends,
and prints the median and the longest time of a step, with --turns also medians of several runs. NVLink's
multicast is off for NCCL.

Training amplifies what sums in another order differ by, some programs to more than 1 %. What distinguishes
this from a fault: in float64 the same program's losses are within 1e-9, and in float32 NCCL's by
its trees and by its rings are as far apart as Doorbell's and NCCL's, within a factor.

With --ranks-per-gpu more than one rank is on each GPU, which NCCL refuses: what trains is then beside
one process that does the work of all ranks, and the others check what they receive. Ranks of a GPU are
time-sliced unless this runs under an MPS daemon (doorbell run --nccl --ranks-per-gpu N).

A library of NCCL's name is preloaded: what PyTorch, CuPy and JAX load is then Doorbell's.

Usage: abi.py LIBRARY [PROGRAM]...
Exit status: 0, or 1 when a check failed.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ALL = [
    *("DDP", "FSDP1", "FSDP2", "tensor parallel", "pipeline", "CUDA graph", "two communicators"),
    *("mixed operations", "communicators", "CuPy", "JAX", "killed"),
]
# The greatest relative difference of losses among more than two ranks, and of those in float64.
ROUNDING, ROUNDING64 = 0.01, 1e-9
# By which the difference of one pair of orders may exceed that of another.
FACTOR = 10
# How NCCL sums for the comparison with itself.
RING, TREE = ({"NCCL_ALGO": each} for each in ("ring", "ring;allreduce:tree"))
# Seconds that ranks work before one is killed, and within which a survivor ends.
WORKS, SURVIVES = 2, 60
# What one process can do for all ranks.
TRAINING = {"DDP", "FSDP1", "FSDP2", "tensor parallel", "pipeline", "CUDA graph"}
# Of these one process multiplies matrices of other shapes, and so rounds otherwise, with any number of ranks.
OTHER_PRODUCTS = {"tensor parallel"}
# NCCL hangs where ranks feed two communicators in opposite orders, and counts are ours alone.
ALONE = {"two communicators", "communicators"}
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "MASTER_ADDR": "127.0.0.1", "PYTHONUNBUFFERED": "1"}
# Where PyTorch's watchdog is the first to see an error, it waits for dumps of all ranks, four times this long (a
# minute by default), before it ends the process.
ENVIRONMENT |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}


def start(program, args, library, more=()):
    """Without a library NCCL's, a GPU for each rank, or one process that does the work of all."""
    ranks = args.ranks if library or args.ranks_per_gpu == 1 else 1
    gpus = -(-args.ranks // args.ranks_per_gpu)
    port = str(20000 + int(time.time() * 1000) % 20000)
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port, "GPUS": str(gpus), "OPERATIONS": str(args.operations)}
        own |= {"BATCHES_OF": str(args.ranks), "STEPS": str(args.steps), "WIDTH": str(args.width)}
        environment = {**os.environ, **ENVIRONMENT, **own, **dict(more), **({"LD_PRELOAD": library} if library else {})}
        output = tempfile.TemporaryFile("w+")
        command = [sys.executable, os.path.join(HERE, "programs.py"), program]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        started.append((process, output))
    return started


def end(started, limit):
    """Each rank's status, `None` where it had to be killed, and its output."""
    until, ends = time.time() + limit, []
    for process, output in started:
        try:
            status = process.wait(max(until - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        ends.append((status, output.read()))
    return ends


def run(program, args, library, more=()):
    """The digest and times of a step, or nothing; what it says of a failure."""
    ends = end(start(program, args, library, more), args.limit * max(args.ranks / 2, 1))
    if any(status != 0 for status, _ in ends):
        for rank, (status, text) in enumerate(ends):
            print(f"    rank {rank}: {status}: {text[-1200:]}")
        return None
    lines = [line.split() for _, text in ends for line in text.splitlines()]
    for line in lines:
        if line[:1] == ["left:"]:
            print("   ", *line)
    return next((tuple(line[1:]) for line in lines if line[:1] == ["result"]), None)


def difference(ours, theirs):
    """The greatest relative difference of losses; 0 where all results have the same bits."""
    if ours[0] == theirs[0]:
        return 0.0
    pairs = [(float(a), float(b)) for a, b in zip(ours[4:], theirs[4:])]
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=float("inf"))


def is_rounding(program, args, library, apart):
    """Whether losses that are further apart than ROUNDING are so because sums are in another order."""
    double = {"DTYPE": "float64"}
    pairs = {"both in float64": (run(program, args, library, double), run(program, args, None, double))}
    if args.ranks_per_gpu == 1:
        pairs["NCCL by trees and by rings"] = (run(program, args, None, TREE), run(program, args, None, RING))
    found = []
    for name, (one, other) in pairs.items():
        found.append(difference(one, other) if one and other else float("nan"))
        print(f"    {name}: apart {found[-1]:.1e}", flush=True)
    return found[0] <= ROUNDING64 and all(apart <= FACTOR * each for each in found[1:])


def threads(pid):
    """What each thread of a process waits in: its name, state, system call, and the library that called."""
    maps = []
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            fields = line.split()
            first, last = (int(each, 16) for each in fields[0].split("-"))
            maps.append((first, last, os.path.basename(fields[-1])))
    for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int):

        def about(name):
            try:
                with open(f"/proc/{pid}/task/{thread}/{name}") as file:
                    return file.read().strip()
            except OSError as error:
                return str(error.strerror)

        call = about("syscall").split()
        at = int(call[-1], 16) if len(call) > 2 else 0
        caller = next((name for first, last, name in maps if first <= at < last), "?")
        state = about("stat").rpartition(")")[2].split()[:1]
        print(f"    thread {thread} {about('comm')}: {' '.join(state)}, call {call[:3]} from {caller}, waits in {about('wchan')}")


def survivor(args, library):
    """Whether rank 0 gets an error that names the last rank after that was killed, and ends."""
    started = start("killed", args, library)
    process, output = started[0]

    def said():
        # Read without the offset that the process writes at.
        return os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")

    until = time.time() + args.limit * max(args.ranks / 2, 1)
    while "works" not in said():
        if process.poll() is not None or time.time() > until:
            print(f"  killed: rank 0 did not begin: {end(started, 0.2)[0]}", flush=True)
            return False
        time.sleep(0.1)
    time.sleep(WORKS)
    os.killpg(started[-1][0].pid, signal.SIGKILL)
    since, took, error, shown = time.time(), 0.0, None, False
    while process.poll() is None and took < SURVIVES:
        time.sleep(0.1)
        took = time.time() - since
        if error is None and "rror" in said():
            error = took
        if not shown and took > SURVIVES / 4:
            # What it waits for, and the stacks of its Python, which its handler of the signal writes.
            shown = True
            threads(process.pid)
            os.kill(process.pid, signal.SIGUSR1)
    status, ended = process.poll(), time.time() - since
    text = end(started, 0.2)[0][1]
    if shown:
        print("    ", text[-6000:].replace("\n", "\n     "))
    named = next((line.strip() for line in text.splitlines() if re.search(rf"\brank {args.ranks - 1}\b", line)), None)
    line = named[:300] if named else "no line names the rank: " + text[-1500:]
    when = "not seen" if error is None else f"after {error:.1f} s"
    print(f"  killed: rank 0's error {when}, its end with {status} after {ended:.1f} s: {line}", flush=True)
    return named is not None and status not in (None, 0)


def compared(program, args, library):
    """Whether both give the same, and the medians of their steps."""
    ours = run(program, args, library)
    is_alone = program in ALONE or args.ranks_per_gpu > 1 and program not in TRAINING
    theirs = ours if is_alone else run(program, args, None)
    apart = difference(ours, theirs) if ours and theirs else float("inf")
    has_equal_sums = args.ranks == 2 and (args.ranks_per_gpu == 1 or program not in OTHER_PRODUCTS)
    passed = apart <= (0.0 if has_equal_sums else ROUNDING)
    if not passed and ours and theirs and not has_equal_sums:
        passed = is_rounding(program, args, library, apart)
    both = (ours, theirs)
    times = " and ".join(f"{each[1]} ms, {each[2]} in step {each[3]} ({each[0]})" if each else "failed" for each in both)
    other = "NCCL" if args.ranks_per_gpu == 1 else "one process"
    if not passed and ours and theirs:
        print(f"    losses, Doorbell's and {other}'s:", *(f"{a} {b};" for a, b in zip(ours[4:], theirs[4:])))
    print(f"  {program}: {'ok' if passed else 'FAILED'}, apart {apart:.1e}: Doorbell and {other} {times}", flush=True)
    return passed, [float(each[1]) if each else float("nan") for each in both]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("programs", nargs="*", default=ALL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--operations", type=int, default=10_000, help="those of mixed operations")
    parser.add_argument("--steps", type=int, default=200, help="of training, at least 20")
    parser.add_argument("--width", type=int, default=1024, help="of the layers that are trained; with 8192 GPUs work during most of a step of FSDP")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a program of two ranks, of more in proportion")
    parser.add_argument("--turns", type=int, default=1, help="how often both libraries run each program, by turns")
    args = parser.parse_intermixed_args()
    if args.turns < 1:
        parser.error("--turns is at least 1")
    if args.steps < 20:
        parser.error("--steps is at least 20")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        # The loader goes by the name.
        library = os.path.join(folder, "libnccl.so.2")
        os.symlink(os.path.abspath(args.library), library)
        for program in args.programs:
            if program == "killed":
                passed = survivor(args, library)
            else:
                turns = [compared(program, args, library) for _ in range(args.turns)]
                passed = all(passed for passed, _ in turns)
                if args.turns > 1:
                    medians = (statistics.median(times) for times in zip(*(times for _, times in turns)))
                    print(f"  {program}: medians of {args.turns} turns", *(f"{each:.3f} ms" for each in medians), flush=True)
            if not passed:
                failed.append(program)
    print(f"failed: {', '.join(failed)}" if failed else "no check failed")
    sys.exit(bool(failed))


main()
