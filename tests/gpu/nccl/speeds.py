#!/usr/bin/env python3
"""Times of collectives on memory that is not registered, by settings of DOORBELL_GPU and beside NCCL,
a rank on each GPU, and what loading the kernels takes.

A communicator is made with each of the settings, which are measured by turns. NVLink's multicast is off
for NCCL.

Usage: speeds.py LIBRARY [--ranks N] [--turns N] [SETTING]..., with settings as cut=131072,fifos=67108864; in no turns
communicators are only made
Exit status: 0, or 1 when a rank failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = [256 << 10, 8 << 20, 32 << 20, 256 << 20]
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
SETTINGS = ["", "cut=65536", "cut=98304", "cut=131072", "cut=196608", "fifos=67108864", "fifos=67108864,cut=262144"]
LIMIT = 200


def rank_main(settings, turns):
    import statistics

    import torch
    import torch.distributed as dist

    own, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.device("cuda", own)
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    most = max(SIZES)
    source, target = torch.ones(most, dtype=torch.uint8, device=gpu), torch.empty(most, dtype=torch.uint8, device=gpu)

    def operation(kind, size, group):
        whole, part = size // 4, size // ranks // 4
        a, b = source.view(torch.float32), target.view(torch.float32)
        return {
            "all_reduce": lambda: dist.all_reduce(b[:whole], group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(b[: part * ranks], a[:part], group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(b[:part], a[: part * ranks], group=group),
            "broadcast": lambda: dist.broadcast(b[:whole], 0, group=group),
            "reduce": lambda: dist.reduce(b[:whole], 0, group=group),
        }[kind]

    def microseconds(run, count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count * 1e3

    groups = {}
    for setting in settings:
        os.environ["DOORBELL_GPU"] = setting
        since = time.time()
        groups[setting] = dist.new_group(list(range(ranks)))
        dist.all_reduce(target[:8], group=groups[setting])
        torch.cuda.synchronize()
        if own == 0:
            print("made", setting or "-", f"{time.time() - since:.3f}", flush=True)
    for size in SIZES if turns else []:
        for kind in KINDS:
            found = {setting: [] for setting in settings}
            for _ in range(turns):
                for setting, group in groups.items():
                    target.zero_()
                    found[setting].append(microseconds(operation(kind, size, group), 20 if size >= 32 << 20 else 100))
            for setting, times in found.items():
                if own == 0:
                    print("time", kind, size, setting or "-", f"{statistics.median(times):.1f}", flush=True)
    dist.destroy_process_group()


def run(ranks, library, settings, turns):
    """Rank 0's lines, or nothing."""
    port = str(20000 + int(time.time() * 1000) % 20000)
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **own, "NCCL_NVLS_ENABLE": "0", **({"LD_PRELOAD": library} if library else {})}
        command = [sys.executable, os.path.abspath(__file__), "--rank", "--turns", str(turns), library or "-", *settings]
        output = tempfile.TemporaryFile("w+")
        started.append((subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT), output))
    until, passed = time.time() + LIMIT, True
    for process, _ in started:
        try:
            passed &= process.wait(max(until - time.time(), 0.1)) == 0
        except subprocess.TimeoutExpired:
            passed = False
            process.kill()
            process.wait()
    texts = []
    for _, output in started:
        output.seek(0)
        texts.append(output.read())
    if not passed:
        print(f"FAIL {library or 'NCCL'}:", *(text[-1500:] for text in texts), sep="\n")
        return []
    return [line.split() for line in texts[0].splitlines()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("settings", nargs="*", default=SETTINGS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.rank:
        rank_main(args.settings, args.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        # The loader goes by the name.
        library = os.path.join(folder, "libnccl.so.2")
        os.symlink(os.path.abspath(args.library), library)
        theirs = run(args.ranks, None, [""], args.turns)
        ours = run(args.ranks, library, args.settings, args.turns)
    print("seconds to make a communicator and use it:", *(f"{line[1]} {line[2]};" for line in ours if line[:1] == ["made"]))
    times = {}
    for name, lines in (("NCCL", theirs), ("", ours)):
        for line in lines:
            if line[:1] == ["time"]:
                times.setdefault((line[1], int(line[2])), []).append((name or line[3], float(line[4])))
    print("us, out of place but for all_reduce, broadcast and reduce; - is without settings")
    for (kind, size), found in times.items():
        print(f"  {kind} {size}: " + "  ".join(f"{name} {time:.1f}" for name, time in found))
    sys.exit(not (theirs and ours))


main()
