"""A rank of nccl.py: all-reduces with verified results, or steps of training with a digest of all losses."""

import datetime
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GPU = torch.device("cuda", RANK % torch.cuda.device_count())


def all_reduce(sizes, seconds):
    """For each size the mean time of an operation; with `seconds`, operations until then."""
    for size in sizes:
        tensor = torch.empty(max(size // 4, 1), device=GPU)
        for turn in range(3):
            tensor.fill_(RANK + 1.0 + turn)
            dist.all_reduce(tensor)
            expected = sum(rank + 1.0 + turn for rank in range(RANKS))
            assert bool((tensor == expected).all()), f"{size} bytes: a wrong sum"
        tensor.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        count, since = 20 if size >= 1 << 20 else 100, time.time()
        while True:
            for _ in range(count):
                dist.all_reduce(tensor)
            torch.cuda.synchronize()
            if time.time() - since >= seconds:
                break
        if RANK == 0 and not seconds:
            print("result", size, (time.time() - since) / count, flush=True)


def train(kind, steps):
    """The digest of all ranks' mean losses, and the time of a step; with EACH_STEP a line of each step, too."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(1024, 1)).to(GPU)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[GPU.index])
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator(device=GPU)
    random.manual_seed(100 + RANK)
    each = RANK == 0 and os.environ.get("EACH_STEP")
    digest, since = hashlib.sha256(), time.time()
    for step in range(steps):
        began = time.time()
        batch = torch.randn(64, 1024, device=GPU, generator=random)
        loss = ((model(batch) - batch.sum(1, keepdim=True) / 32) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        digest.update(loss.cpu().numpy().tobytes())
        if each:
            print("step", step, digest.hexdigest()[:16], time.time() - began, flush=True)
    if RANK == 0:
        print("losses", digest.hexdigest()[:16], (time.time() - since) / steps, flush=True)


def main():
    torch.cuda.set_device(GPU)
    timeout = datetime.timedelta(seconds=int(os.environ["TIMEOUT"]))
    dist.init_process_group("nccl", timeout=timeout, device_id=GPU)
    work = os.environ["WORK"].split(":")
    if work[0] == "sizes":
        all_reduce([int(size) for size in work[1].split(",")], float(work[2]))
    else:
        train(work[0], int(work[1]))
    dist.destroy_process_group()


main()
