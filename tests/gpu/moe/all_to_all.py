"""Measures PyTorch's all_to_all_single over NCCL with the bytes of gpu-moe's dispatches: for each rank, 128 and 4096
tokens, top-8 of 256 experts, hidden 7168, as bf16 and as FP8 with a scale for every 128 elements. Random routings, so
that parts have different lengths. One process per GPU; two at least.

Usage: python3 all_to_all.py [--seconds N]

Ends by itself after N seconds, 170 if not given.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import sys

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
SAMPLES, CALLS = 7, 10
ROW_BYTES = {"bf16": 2 * HIDDEN, "fp8": HIDDEN + HIDDEN // 128 * 4}


def pairs(rank: int, ranks: int, tokens: int) -> list[int]:
    """How many pairs of a rank's tokens and experts each rank gets."""
    choose = random.Random(rank * 1000 + tokens)
    counts = [0] * ranks
    for _ in range(tokens):
        for expert in choose.sample(range(EXPERTS), TOP_K):
            counts[expert * ranks // EXPERTS] += 1
    return counts


def measure(torch, rank: int, ranks: int, tokens: int, row_bytes: int) -> tuple[float, int]:
    """Seconds of one call on the slowest rank, and the bytes that a rank sends."""
    send = [count * row_bytes for count in pairs(rank, ranks, tokens)]
    receive = [pairs(source, ranks, tokens)[rank] * row_bytes for source in range(ranks)]
    given = torch.full((sum(send),), 1, dtype=torch.uint8, device="cuda")
    got = torch.empty((sum(receive),), dtype=torch.uint8, device="cuda")
    samples = []
    for sample in range(SAMPLES + 1):
        torch.distributed.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            torch.distributed.all_to_all_single(got, given, receive, send)
        end.record()
        end.synchronize()
        slowest = torch.tensor(start.elapsed_time(end) / 1e3 / CALLS, device="cuda")
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        # The first warms up.
        if sample > 0:
            samples.append(slowest.item())
    return statistics.median(samples), sum(send)


def run(rank: int, ranks: int, port: int, seconds: int) -> None:
    import torch

    signal.alarm(seconds)
    # Without the multicast of NVLink, which not every machine permits.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{ranks} ranks, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {version}")
        print(f"{'type':<5} {'tokens':>6} {'us':>9} {'GB/s':>8} {'tokens/s':>12}")
    for tokens in (128, 4096):
        for name, row_bytes in ROW_BYTES.items():
            time, sent = measure(torch, rank, ranks, tokens, row_bytes)
            if rank == 0:
                rate = tokens * ranks / time
                print(f"{name:<5} {tokens:>6} {time * 1e6:>9.1f} {sent / time / 1e9:>8.1f} {rate:>12.0f}", flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=int, default=170, metavar="N")
    seconds = arguments.parse_args().seconds
    import torch

    ranks = torch.cuda.device_count()
    if ranks < 2 or EXPERTS % ranks:
        sys.exit(f"{ranks} GPUs: as many ranks as GPUs are needed, 2 at least, and 256 experts are divided among them")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (ranks, port, seconds), ranks)


if __name__ == "__main__":
    main()
