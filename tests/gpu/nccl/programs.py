"""A rank of abi.py: programs of PyTorch, CuPy and JAX that use NCCL, each with a digest of its results."""

import datetime
import faulthandler
import hashlib
import os
import random
import signal
import statistics
import sys
import time

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GPU = RANK % int(os.environ["GPUS"])
# The ranks whose batches this one computes: its own, or as the only process those of all.
WORK = range(RANK, int(os.environ["BATCHES_OF"]), RANKS)
STEPS, WIDTH, BATCH = int(os.environ["STEPS"]), int(os.environ["WIDTH"]), 64


class Report:
    """A digest of what a program computes, some losses, and the median and the longest time of a step after the first ones.

    The mean would have kernels that the program's own library compiles when a step first needs them, as CuPy's
    does where a reduction's number of threads grows with the size.
    """

    WARM = 10

    def __init__(self):
        self.digest, self.times, self.losses, self.since = hashlib.sha256(), [], [], time.time()

    def add(self, tensor):
        values = tensor.detach().cpu().numpy()
        self.losses.append(float(values.flat[0]))
        self.step(values.tobytes())

    def step(self, result):
        self.digest.update(result)
        now = time.time()
        self.times.append(now - self.since)
        self.since = now

    def end(self):
        if RANK == 0:
            times = self.times[self.WARM :]
            longest = max(range(len(times)), key=times.__getitem__)
            figures = (f"{each * 1e3:.3f}" for each in (statistics.median(times), times[longest]))
            losses = (repr(loss) for loss in self.losses[:: max(len(self.losses) // 8, 1)])
            print("result", self.digest.hexdigest()[:16], *figures, self.WARM + longest, *losses, flush=True)


def torch_rank():
    import torch
    import torch.distributed as dist

    gpu = torch.device("cuda", GPU)
    torch.cuda.set_device(gpu)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(getattr(torch, os.environ.get("DTYPE", "float32")))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=gpu)
    return torch, dist, gpu


def model(torch, gpu):
    torch.manual_seed(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(8)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)).to(gpu)


def batches(torch, gpu, seed):
    generator = torch.Generator(device=gpu)
    generator.manual_seed(seed)
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, device=gpu, generator=generator)
        yield batch, batch.sum(1, keepdim=True) / WIDTH**0.5


def work(torch, gpu):
    """The batches of each step of the ranks whose work this one does."""
    return zip(*(batches(torch, gpu, 100 + rank) for rank in WORK))


def losses_of(torch, net, given):
    return torch.stack([((net(batch) - wanted) ** 2).mean() for batch, wanted in given])


def train(wrap):
    """Data parallel: the sum of all ranks' losses at each step."""
    torch, dist, gpu = torch_rank()
    net = model(torch, gpu)
    if len(WORK) == 1:
        net = wrap(torch, net, gpu)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    report = Report()
    for given in work(torch, gpu):
        found = losses_of(torch, net, given)
        optimiser.zero_grad()
        found.mean().backward()
        optimiser.step()
        total = found.detach().sum()
        dist.all_reduce(total)
        report.add(total)
    report.end()
    dist.destroy_process_group()


def ddp(torch, net, gpu):
    return torch.nn.parallel.DistributedDataParallel(net, device_ids=[gpu.index])


def fsdp1(torch, net, gpu):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({torch.nn.Sequential})
    return FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=gpu, use_orig_params=True)


def fsdp2(torch, net, gpu):
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def tensor_parallel():
    torch, dist, gpu = torch_rank()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(gpu)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(net, init_device_mesh("cuda", (RANKS,)), plan)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, foreach=False)
    report = Report()
    for batch, wanted in batches(torch, gpu, 100):
        loss = ((net(batch) - wanted) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        report.add(loss)
    report.end()
    dist.destroy_process_group()


def pipeline():
    torch, dist, gpu = torch_rank()
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole = list(model(torch, gpu))
    first, end = (-(-len(whole) * part // RANKS) for part in (RANK, RANK + 1))
    stage = torch.nn.Sequential(*whole[first:end])
    schedule = ScheduleGPipe(
        PipelineStage(stage, RANK, RANKS, gpu), n_microbatches=4, loss_fn=lambda got, wanted: ((got - wanted) ** 2).mean()
    )
    optimiser = torch.optim.SGD(stage.parameters(), lr=0.05)
    report = Report()
    for batch, wanted in batches(torch, gpu, 100):
        losses = []
        optimiser.zero_grad()
        schedule.step(*([batch] if RANK == 0 else []), target=wanted, losses=losses)
        optimiser.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=gpu)
        dist.broadcast(loss, RANKS - 1)
        report.add(loss)
    report.end()
    dist.destroy_process_group()


def graph():
    """A whole step of training is captured, with its all-reduces, and replayed between eager ones."""
    torch, dist, gpu = torch_rank()
    net = model(torch, gpu)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    static = [(torch.zeros(BATCH, WIDTH, device=gpu), torch.zeros(BATCH, 1, device=gpu)) for _ in WORK]

    def step():
        optimiser.zero_grad(set_to_none=False)
        found = losses_of(torch, net, static)
        found.mean().backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimiser.step()
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = step()
    report = Report()
    for given in work(torch, gpu):
        for (batch, wanted), (into, target) in zip(given, static):
            into.copy_(batch)
            target.copy_(wanted)
        captured.replay()
        total = result.detach().sum()
        dist.all_reduce(total)
        report.add(total)
    report.end()
    del captured
    dist.destroy_process_group()


def two():
    """Two communicators at once, each in a stream of its own, which the ranks feed in opposite orders."""
    torch, dist, gpu = torch_rank()
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in groups]
    tensors = [torch.full((4 << 20,), float(RANK + 1 + each), device=gpu) for each in range(2)]
    report = Report()
    for _ in range(STEPS):
        for each in [0, 1] if RANK % 2 == 0 else [1, 0]:
            with torch.cuda.stream(streams[each]):
                for _ in range(4):
                    dist.all_reduce(tensors[each], op=dist.ReduceOp.AVG, group=groups[each])
        torch.cuda.synchronize()
        for each, tensor in enumerate(tensors):
            assert bool((tensor == (RANKS + 1) / 2 + each).all()), f"communicator {each}: a wrong mean"
        report.add(tensors[0][:1024])
    report.end()
    dist.destroy_process_group()


def mixed():
    """Operations of all kinds, types and sizes, in an order that a seed gives."""
    torch, dist, gpu = torch_rank()
    chosen = random.Random(7)
    report = Report()
    types = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    for number in range(int(os.environ["OPERATIONS"])):
        kind = chosen.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"])
        # All ranks' results and what they compare them with are to fit one GPU.
        elements = RANKS * min(chosen.choice([1, 7, 300, 5000, 70_000, 600_000]), 4_800_000 // RANKS)
        dtype = chosen.choice(types)
        mine = (torch.arange(elements, device=gpu) % 5 + RANK).to(dtype)
        everyone = [(torch.arange(elements, device=gpu) % 5 + rank).to(dtype) for rank in range(RANKS)]
        part = elements // RANKS
        own = slice(RANK * part, (RANK + 1) * part)
        if kind == "all_reduce":
            dist.all_reduce(mine)
            got, wanted = mine, sum(everyone[1:], everyone[0])
        elif kind == "all_gather":
            got, wanted = torch.empty(RANKS * elements, dtype=dtype, device=gpu), torch.cat(everyone)
            dist.all_gather_into_tensor(got, mine)
        elif kind == "reduce_scatter":
            got, wanted = torch.empty(part, dtype=dtype, device=gpu), sum(everyone[1:], everyone[0])[own]
            dist.reduce_scatter_tensor(got, mine)
        elif kind == "broadcast":
            root = chosen.randrange(RANKS)
            dist.broadcast(mine, root)
            got, wanted = mine, everyone[root]
        elif kind == "all_to_all":
            got, wanted = torch.empty_like(mine), torch.cat([each[own] for each in everyone])
            dist.all_to_all_single(got, mine)
        else:
            got, wanted = torch.empty_like(mine), everyone[(RANK - 1) % RANKS]
            operations = [dist.P2POp(dist.isend, mine, (RANK + 1) % RANKS), dist.P2POp(dist.irecv, got, (RANK - 1) % RANKS)]
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        assert torch.equal(got, wanted), f"operation {number}, {kind} of {elements} {dtype}: wrong"
        report.step(b"")
    report.end()
    dist.destroy_process_group()


def many():
    """1,000 communicators one after another, each used once; what is left of them."""
    torch, dist, gpu = torch_rank()
    tensor, count = torch.ones(1024, device=gpu), 1000
    report = Report()

    def state():
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))

    for number in range(count):
        group = dist.new_group(list(range(RANKS)))
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        report.step(b"")
        if number == 20:
            before = state()
    after = state()
    report.end()
    print(f"left: {(before[0] - after[0]) >> 10} KiB of GPU memory, {after[1] - before[1]} descriptors", flush=True)
    assert before[0] - after[0] < 64 << 20 and after[1] - before[1] < 20
    dist.destroy_process_group()


def work_until_killed():
    # All stacks, for one who waits for the end of this process.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch, dist, gpu = torch_rank()
    tensor, end = torch.zeros(4 << 20, device=gpu), time.time() + 60
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    print("works", flush=True)
    while time.time() < end:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()


def cupy_rank():
    import cupy
    from cupyx.distributed import init_process_group

    cupy.cuda.Device(GPU).use()
    port = int(os.environ["MASTER_PORT"])
    group = init_process_group(RANKS, RANK, host="127.0.0.1", port=port + 1)
    report = Report()
    steps = 100
    for number in range(steps):
        mine = cupy.arange(1000 + number, dtype="f4") + RANK
        total, everyone = cupy.zeros_like(mine), cupy.zeros((RANKS, *mine.shape), "f4")
        group.all_reduce(mine, total)
        group.all_gather(mine, everyone, mine.size)
        group.broadcast(mine, root=number % RANKS)
        expected = cupy.arange(1000 + number, dtype="f4")
        assert bool((total == RANKS * expected + sum(range(RANKS))).all())
        assert all(bool((everyone[rank] == expected + rank).all()) for rank in range(RANKS))
        assert bool((mine == expected + number % RANKS).all())
        report.step(total.get().tobytes())
    report.end()
    group.stop()


def jax_rank():
    import jax
    import jax.numpy as jnp

    jax.distributed.initialize(f"127.0.0.1:{int(os.environ['MASTER_PORT']) + 2}", RANKS, RANK, local_device_ids=[GPU])
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    report, steps = Report(), 50
    total = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    for number in range(steps):
        local = jnp.full((1, 1 << 16), float(RANK + number), jnp.float32)
        whole = jax.make_array_from_single_device_arrays((RANKS, 1 << 16), sharding, [local])
        result = total(whole).addressable_data(0)
        assert bool((result == sum(rank + number for rank in range(RANKS))).all())
        report.step(jax.device_get(result)[:16].tobytes())
    report.end()


PROGRAMS = {
    "DDP": lambda: train(ddp),
    "FSDP1": lambda: train(fsdp1),
    "FSDP2": lambda: train(fsdp2),
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    "CUDA graph": graph,
    "two communicators": two,
    "mixed operations": mixed,
    "communicators": many,
    "CuPy": cupy_rank,
    "JAX": jax_rank,
    "killed": work_until_killed,
}

PROGRAMS[sys.argv[1]]()
