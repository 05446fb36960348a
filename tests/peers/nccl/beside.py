#!/usr/bin/env python3
"""GPU collectives compared with NCCL: `doorbell coll --gpu` and `nccl-bench` (bench.c) alternately, on the same GPUs.

    beside.py --doorbell target/release/doorbell --nccl ./nccl-bench --ranks 2,4 > beside.md

Prints a table in Markdown: for each size the time of either, bandwidths of the bus by nccl-tests' formulas, and ours by NCCL's. Graphs of 20 operations are compared up to --graphs bytes. NVLink's
multicast is off for NCCL (NCCL_NVLS_ENABLE=0). Results are not checked here, which takes longer than all else: `doorbell coll --gpu` does that by default. Exit status: 0, or 1 where one of the programs failed; what could be measured is printed then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

OPERATIONS = ["allreduce", "allgather", "reduce-scatter", "broadcast"]


def bus(operation, ranks, size, microseconds):
    """Bus bandwidth in GB/s."""
    factor = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(operation, (ranks - 1) / ranks)
    return factor * size / microseconds / 1e3


def run(command, environment, patience):
    """The output of a command; None, with a line on stderr, where it failed."""
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        print(f"beside: {' '.join(command)}: not done after {patience} s", file=sys.stderr)
        return None
    if done.returncode:
        print(f"beside: {' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return done.stdout


def ours(args, ranks, operation, kind, first, last, graph):
    """Microseconds by size."""
    command = [args.doorbell, "coll", operation, "--gpu", "--ranks", str(ranks), "-b", str(first), "-e", str(last), "-f", str(args.factor), "-d", kind, "-c", "0", "--json"]
    output = run(command + (["--graph"] if graph else []), {}, args.patience)
    if output is None:
        return {}
    return {row["bytes"]: row["time_us"] for row in json.loads(output)["results"]}


def theirs(args, ranks, operation, kind, first, last):
    """Microseconds by size, without a graph and with one."""
    command = [args.nccl, str(ranks), operation, kind, str(first), str(last), str(args.factor), "5"]
    output = run(command, {"NCCL_NVLS_ENABLE": "0"}, args.patience)
    rows = [line.split() for line in (output or "").splitlines()]
    return {int(row[0]): (float(row[1]), float(row[2])) for row in rows}


def medians(turns):
    """The median of each size that every round has."""
    sizes = set(turns[0]).intersection(*turns[1:])
    return {size: statistics.median(turn[size] for turn in turns) for size in sizes}


def numbers(text):
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doorbell", required=True)
    parser.add_argument("--nccl", required=True)
    parser.add_argument("--ranks", type=numbers, default=[2], help="2,4")
    parser.add_argument("--operations", type=lambda text: text.split(","), default=OPERATIONS)
    parser.add_argument("--types", type=lambda text: text.split(","), default=["f32", "bf16"])
    parser.add_argument("--first", type=int, default=8, help="bytes")
    parser.add_argument("--last", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--graphs", type=int, default=1 << 20, help="bytes up to which graphs are compared")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120, help="seconds for one program")
    args = parser.parse_args()
    failed = False
    for ranks in args.ranks:
        for operation in args.operations:
            for kind in args.types:
                eager, graphs, nccl_eager, nccl_graphs = [], [], [], []
                for _ in range(args.turns):
                    eager.append(ours(args, ranks, operation, kind, args.first, args.last, False))
                    graphs.append(ours(args, ranks, operation, kind, args.first, min(args.last, args.graphs), True))
                    both = theirs(args, ranks, operation, kind, args.first, args.last)
                    nccl_eager.append({size: pair[0] for size, pair in both.items()})
                    nccl_graphs.append({size: pair[1] for size, pair in both.items() if pair[1]})
                eager, graphs, nccl_eager, nccl_graphs = map(medians, (eager, graphs, nccl_eager, nccl_graphs))
                failed = failed or not eager or not nccl_eager
                print(f"\n{operation}, {kind}, {ranks} GPUs\n")
                print("| bytes | us | NCCL us | of NCCL's time | in a graph us | NCCL us | of NCCL's time | bus GB/s | NCCL GB/s | ratio |")
                print("|---|---|---|---|---|---|---|---|---|---|")
                for size in sorted(set(eager) & set(nccl_eager)):
                    a, b = eager[size], nccl_eager[size]
                    cells = [str(size), f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}"]
                    if size in graphs and size in nccl_graphs:
                        c, d = graphs[size], nccl_graphs[size]
                        cells += [f"{c:.1f}", f"{d:.1f}", f"{c / d:.2f}"]
                    else:
                        cells += ["", "", ""]
                    cells += [f"{bus(operation, ranks, size, a):.1f}", f"{bus(operation, ranks, size, b):.1f}", f"{b / a:.3f}"]
                    print("| " + " | ".join(cells) + " |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
