#!/usr/bin/env python3
"""NCCL under PyTorch as a client of the soft device: two ranks, on one GPU or on two.

On one GPU the ranks claim to be on different hosts, and run under an MPS daemon of their own. Checks
results, losses, training over a lossy network, and that a rank is notified when the other is killed or
the port is down; prints figures beside NCCL's sockets, by turns. Not for machines whose MPS daemon
others use.

Usage: nccl.py DOORBELL [--turns N] [--budget SECONDS] [PART]..., with the parts speeds, losses, drops, variants,
survivors. `drops` takes at most the budget, and reports the steps that were done by then.
Exit status: 0, or 1 when a check failed.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = [8, 1 << 20, 16 << 20, 128 << 20]
LIMIT = 90
STEPS = 40
# Seconds that two ranks take to import PyTorch and to connect, about.
START_UP = 40
ENVIRONMENT = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "WORLD_SIZE": "2",
    "PYTHONUNBUFFERED": "1",
    # An error ends a rank at once: PyTorch's watchdog waits four times this long for dumps of all ranks.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
STAGED, REGISTERED = {"NCCL_NET_GDR_LEVEL": "LOC"}, {"NCCL_NET_GDR_LEVEL": "SYS"}
failed = []


class Ranks:
    """Two running ranks."""

    def __init__(self, command, work, timeout=60, **extra):
        port = str(20000 + int(time.time() * 1000) % 20000)
        self.outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self.ranks = []
        for rank, output in enumerate(self.outputs):
            own = {"RANK": str(rank), "NCCL_HOSTID": f"h{rank}", "WORK": work, "TIMEOUT": str(timeout)}
            environment = {**os.environ, **ENVIRONMENT, "MASTER_PORT": port, **own, **extra}
            program = [*command, sys.executable, os.path.join(HERE, "rank.py")]
            start = dict(env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            self.ranks.append(subprocess.Popen(program, **start))

    def kill(self, rank):
        if self.ranks[rank].poll() is None:
            os.killpg(self.ranks[rank].pid, signal.SIGKILL)

    def wait(self, limit=LIMIT):
        """The statuses; `None` for a rank that had to be killed. And rank 0's output."""
        end = time.time() + limit
        statuses = []
        for number, rank in enumerate(self.ranks):
            try:
                statuses.append(rank.wait(max(end - time.time(), 0.1)))
            except subprocess.TimeoutExpired:
                self.kill(number)
                rank.wait()
                statuses.append(None)
        texts = []
        for output in self.outputs:
            output.seek(0)
            texts.append(output.read())
        return statuses, texts


def run(name, command, work, **extra):
    """What rank 0 printed of its results; a failure is noted, and nothing is returned."""
    statuses, texts = Ranks(command, work, **extra).wait()
    if statuses != [0, 0]:
        failed.append(name)
        print(f"FAIL {name}: {statuses}\n{texts[0][-1500:]}")
        return []
    lines = (line.split() for line in texts[0].splitlines())
    return [line for line in lines if line and line[0] in ("result", "losses")]


def speeds(turns, paths):
    times = {name: {size: [] for size in SIZES} for name in paths}
    for _ in range(turns):
        for name, (command, extra) in paths.items():
            for _, size, seconds in run(name, command, "sizes:" + ",".join(map(str, SIZES)) + ":0", **extra):
                times[name][int(size)].append(float(seconds))
    print(f"all-reduce, f32, median of {turns}: us, bus GB/s")
    for name, by_size in times.items():
        cells = []
        for size, found in by_size.items():
            if found:
                seconds = statistics.median(found)
                cells.append(f"{size} B: {seconds * 1e6:.1f} us {size / seconds / 1e9:.2f} GB/s")
        print(f"  {name}: " + "; ".join(cells))


def losses(paths):
    for kind in ("ddp", "fsdp"):
        found = {}
        for name, (command, extra) in paths.items():
            for _, digest, seconds in run(f"{kind} {name}", command, f"{kind}:200", **extra):
                found[name] = digest
                print(f"  {kind}, 200 steps, {name}: losses {digest}, {float(seconds) * 1e3:.2f} ms a step")
        if len(set(found.values())) != 1 or len(found) != len(paths):
            failed.append(f"losses of {kind}")


class Training:
    """Steps of training over UDP with faults, read from rank 0's lines while it runs."""

    def __init__(self, name, soft, faults, **extra):
        self.name, self.began = name, time.time()
        over = {**STAGED, "DOORBELL_LINK": "udp", "DOORBELL_FAULTS": faults, "EACH_STEP": "1", **extra}
        self.ranks = Ranks(soft, f"ddp:{STEPS}", **over)
        self.read, self.seconds, self.digests, self.first = 0, [], [], None

    def lines(self):
        """The new whole lines of rank 0, read beside its own writes: the position of those is not changed."""
        file = self.ranks.outputs[0].fileno()
        text = os.pread(file, 1 << 20, self.read)
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        return whole.decode(errors="replace").splitlines()

    def take(self):
        for line in self.lines():
            words = line.split()
            if len(words) == 4 and words[0] == "step":
                self.first = self.first or time.time() - self.began
                self.digests.append(words[2])
                self.seconds.append(float(words[3]))

    def run(self, limit):
        """Until all steps are done or `limit` has passed; a line of progress every five seconds."""
        end, shown = time.time() + limit, time.time()
        # A rank ends when all steps are done, or with an error.
        while all(rank.poll() is None for rank in self.ranks.ranks) and time.time() < end:
            time.sleep(0.2)
            self.take()
            if len(self.seconds) == STEPS:
                break
            if time.time() - shown >= 5:
                shown = time.time()
                print(f"    {self.name}: {len(self.seconds)} of {STEPS} steps after {shown - self.began:.0f} s")
        # Leaving may take as long as a connection's timeouts, and is no part of the steps.
        statuses, texts = self.ranks.wait(min(5, max(end - time.time(), 1)))
        self.take()
        done = len(self.seconds)
        if done < STEPS:
            print(f"    {self.name}: ended with {statuses} after {done} of {STEPS} steps")
            print("\n".join([line for line in texts[0].splitlines() if not line.startswith("step")][-10:]))
        if done:
            print(
                f"  ddp over UDP, {self.name}: {done} of {STEPS} steps, losses {self.digests[-1]}, "
                f"{self.mean(done) * 1e3:.2f} ms a step ({statistics.median(self.seconds) * 1e3:.2f} median, "
                f"{max(self.seconds) * 1e3:.0f} most), the first after {self.first:.1f} s"
            )
        return self

    def mean(self, steps):
        """Of the first steps without the very first, in which NCCL connects."""
        return statistics.fmean(self.seconds[1:steps] or self.seconds)


def drops(budget, soft):
    """Steps over UDP that loses 1 % of the packets: losses as without, in at most three times the time."""
    end = time.time() + budget
    without = Training("drop=0", soft, "drop=0,seed=1").run(budget / 3)
    lossy = Training("drop=0.01", soft, "drop=0.01,seed=1").run(end - time.time())
    if not without.seconds or not lossy.seconds:
        failed.append("no step with drops")
        return
    both = min(len(without.digests), len(lossy.digests))
    if without.digests[:both] != lossy.digests[:both]:
        failed.append("losses with drops")
    ratio = lossy.mean(both) / without.mean(both)
    print(f"  with drop=0.01 {ratio:.2f} times the time without, by {both} steps of each")
    if ratio > 3 or both < STEPS:
        failed.append(f"time with drops: {ratio:.2f} times, {both} of {STEPS} steps")
    rest = end - time.time()
    if rest < START_UP:
        print(f"  without tail-loss probes: left out, as {rest:.0f} s of the budget are left")
        return
    name = "drop=0.01 without tail-loss probes"
    Training(name, soft, "drop=0.01,seed=1", DOORBELL_TAIL_LOSS_PROBES="0").run(rest)


def survivor(name, command, seconds, kill, **extra):
    """Rank 0 ends by itself, with an error, when the other is killed or the port goes down."""
    ranks = Ranks(command, "sizes:16777216:600", NCCL_IB_TIMEOUT="14", **extra)
    time.sleep(seconds)
    if kill:
        ranks.kill(1)
    since = time.time()
    try:
        status = ranks.ranks[0].wait(LIMIT)
    except subprocess.TimeoutExpired:
        status = None
    took = time.time() - since
    ranks.kill(0)
    ranks.kill(1)
    text = ranks.wait(1)[1][0]
    if status in (None, 0):
        failed.append(name)
    error = next((line for line in text.splitlines() if "Error" in line), "no error")
    print(f"  {name}: rank 0 ended with {status} after {took:.1f} s: {error[:120]}")


def variants(doorbell, soft):
    one = {**REGISTERED, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run("one hardware connection", soft, "ddp:50", **one)
    for name, extra in {
        "LL": {"NCCL_PROTO": "LL"},
        "LL128": {"NCCL_PROTO": "LL128"},
        "tree": {"NCCL_ALGO": "Tree"},
        "GID index 3": {"NCCL_IB_GID_INDEX": "3"},
        "4 queue pairs": {"NCCL_IB_QPS_PER_CONNECTION": "4"},
    }.items():
        run(name, soft, "sizes:8,1048576,16777216:0", **REGISTERED, **extra)
    run("two rails", [doorbell, "run", "--rails", "2", "--"], "sizes:8,16777216:0", **STAGED)
    print("  one hardware connection, LL, LL128, tree, GID index 3, 4 queue pairs, two rails")


def survivors(doorbell, soft):
    survivor("a killed rank", soft, 12, True, **STAGED)
    survivor("a port that goes down", [doorbell, "run", "--down", "soft0@12s", "--"], 12, False, **STAGED)


def main():
    # Through a pipe, too, each line when it is printed.
    sys.stdout.reconfigure(line_buffering=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("doorbell")
    parser.add_argument("parts", nargs="*", default=["speeds", "losses", "drops", "variants", "survivors"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--budget", type=float, default=145, help="seconds of the part drops")
    args = parser.parse_intermixed_args()
    doorbell = os.path.abspath(args.doorbell)
    soft = [doorbell, "run", "--"]
    paths = {
        "sockets": ([], {"NCCL_IB_DISABLE": "1"}),
        "host-staged": (soft, STAGED),
        "GPU-registered": (soft, REGISTERED),
    }
    over_udp = {"host-staged over UDP": (soft, {**STAGED, "DOORBELL_LINK": "udp"})}
    parts = {
        "speeds": lambda: speeds(args.turns, {**paths, **over_udp}),
        "losses": lambda: losses(paths),
        "drops": lambda: drops(args.budget, soft),
        "variants": lambda: variants(doorbell, soft),
        "survivors": lambda: survivors(doorbell, soft),
    }
    for part in args.parts:
        if part not in parts:
            parser.error(f"{part} is none of {', '.join(parts)}")
    import torch

    if torch.cuda.device_count() == 1:
        folder = tempfile.mkdtemp()
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        for part in args.parts:
            parts[part]()
    finally:
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True)
    print(f"failed: {', '.join(failed)}" if failed else "no check failed")
    sys.exit(bool(failed))


main()
