#!/usr/bin/env python3
"""Programs that use NCCL, on Doorbell's libnccl.so.2 and beside it on NCCL's, a rank on each GPU.

Checks that both give the same results (the same bits where two ranks are summed, else losses within
1 %, as the order of a sum differs), that a survivor gets an error when a rank is killed, and prints
the median and the longest time of a step. NVLink's multicast is off for NCCL.

With --ranks-per-gpu more than one rank is on each GPU, which NCCL refuses: it has a GPU for each
rank then, and is left out where there are too few. Ranks of a GPU are time-sliced unless this runs
under an MPS daemon (doorbell run --nccl --ranks-per-gpu N).

A library of NCCL's name is preloaded: what PyTorch, CuPy and JAX load is then Doorbell's.

Usage: abi.py LIBRARY [PROGRAM]...
Exit status: 0, or 1 when a check failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ALL = [
    *("DDP", "FSDP1", "FSDP2", "tensor parallel", "pipeline", "CUDA graph", "two communicators"),
    *("mixed operations", "communicators", "CuPy", "JAX", "killed"),
]
# The greatest relative difference of losses among more than two ranks.
ROUNDING = 0.01
# NCCL hangs where ranks feed two communicators in opposite orders, and counts are ours alone.
ALONE = {"two communicators", "communicators"}
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "MASTER_ADDR": "127.0.0.1", "PYTHONUNBUFFERED": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def has_gpus(count):
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True)
    return len(listed.stdout.splitlines()) >= count


def start(program, args, library):
    ranks, gpus = args.ranks, -(-args.ranks // args.ranks_per_gpu) if library else args.ranks
    port = str(20000 + int(time.time() * 1000) % 20000)
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port, "GPUS": str(gpus), "OPERATIONS": str(args.operations)}
        environment = {**os.environ, **ENVIRONMENT, **own, **({"LD_PRELOAD": library} if library else {})}
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


def run(program, args, library):
    """The digest and times of a step, or nothing; what it says of a failure."""
    ends = end(start(program, args, library), args.limit)
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


def survivor(args, library):
    """Whether rank 0 gets an error, and when, after the last rank was killed."""
    started = start("killed", args, library)
    time.sleep(20)
    os.killpg(started[-1][0].pid, signal.SIGKILL)
    since = time.time()
    try:
        status = started[0][0].wait(60)
    except subprocess.TimeoutExpired:
        status = None
    took = time.time() - since
    text = end(started, 0.2)[0][1]
    error = next((line.strip() for line in text.splitlines() if "rror" in line), "no error")
    print(f"  killed: rank 0 ended with {status} after {took:.1f} s: {error[:300]}")
    return status not in (None, 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("programs", nargs="*", default=ALL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--operations", type=int, default=10_000, help="those of mixed operations")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a program")
    args = parser.parse_intermixed_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        # The loader goes by the name.
        library = os.path.join(folder, "libnccl.so.2")
        os.symlink(os.path.abspath(args.library), library)
        for program in args.programs:
            if program == "killed":
                passed = survivor(args, library)
            else:
                ours = run(program, args, library)
                is_alone = program in ALONE or args.ranks_per_gpu > 1 and not has_gpus(args.ranks)
                theirs = ours if is_alone else run(program, args, None)
                apart = difference(ours, theirs) if ours and theirs else float("inf")
                passed = apart <= (ROUNDING if args.ranks > 2 else 0.0)
                times = " and ".join(
                    f"{each[1]} ms, {each[2]} in step {each[3]} ({each[0]})" if each else "failed" for each in (ours, theirs)
                )
                if not passed and ours and theirs:
                    print("    losses, Doorbell's and NCCL's:", *(f"{a} {b};" for a, b in zip(ours[4:], theirs[4:])))
                print(f"  {program}: {'ok' if passed else 'FAILED'}, apart {apart:.1e}: Doorbell and NCCL {times}", flush=True)
            if not passed:
                failed.append(program)
    print(f"failed: {', '.join(failed)}" if failed else "no check failed")
    sys.exit(bool(failed))


main()
