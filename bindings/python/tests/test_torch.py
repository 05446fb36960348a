"""The backend of torch.distributed, beside gloo."""

import os
import unittest

import ranks

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None

STEPS = 20


def _in_group(backend, rank, size, port, functions):
    os.environ["DOORBELL_DEVICE"] = "soft?address=" + ranks.device_address(port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import doorbell_rdma.torch

    doorbell_rdma.torch.register()
    doorbell_rdma.torch.register()
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        return [function(rank, size) for function in functions]
    finally:
        dist.destroy_process_group()


def _run(backend, size, *functions):
    """Of each function what it returned, by rank."""
    port = ranks.free_port()
    by_rank = ranks.processes([(_in_group, backend, rank, size, port, functions) for rank in range(size)])
    return list(zip(*by_rank))


def _train(rank, size):
    """The losses of data-parallel training."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(16, 32)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _collectives(rank, size):
    """What each collective leaves."""
    left = {}

    def numbers(*shape, dtype=torch.float32):
        return (torch.arange(torch.Size(shape).numel()).reshape(shape) + 10 * rank).to(dtype)

    for op in dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT:
        for dtype in torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16:
            left["all_reduce", str(op), str(dtype)] = values = numbers(2, 2, dtype=dtype)
            dist.all_reduce(values, op)
    left["all_reduce, later"] = values = numbers(5)
    work = dist.all_reduce(values, async_op=True)
    work.wait()
    assert work.is_completed()
    left["all_reduce, not contiguous"] = values = numbers(4, 3).T
    dist.all_reduce(values) if dist.get_backend() == "doorbell" else values.copy_(_summed(values))
    left["broadcast"] = values = numbers(2, dtype=torch.int8)
    dist.broadcast(values, 1)
    left["reduce"] = values = numbers(3)
    dist.reduce(values, 0)
    if rank != 0:
        # It is undefined there.
        left["reduce"] = values = None
    left["all_gather"] = [torch.empty(2, 3, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(left["all_gather"], numbers(2, 3) % 2 == rank % 2)
    left["all_gather_into_tensor"] = values = torch.empty(2 * size, 3)
    dist.all_gather_into_tensor(values, numbers(2, 3))
    left["gather"] = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(numbers(2), left["gather"], dst=1)
    left["scatter"] = values = torch.empty(2)
    dist.scatter(values, [numbers(2) + part for part in range(size)] if rank == 1 else None, src=1)
    left["all_to_all_single"] = values = torch.empty(2 * size, 3)
    dist.all_to_all_single(values, numbers(2 * size, 3))
    # Rank r sends r + 1 rows to rank 0, and one to each other.
    sent = [rank + 1] + [1] * (size - 1)
    received = list(range(1, size + 1)) if rank == 0 else [1] * size
    left["all_to_all_single, uneven"] = values = torch.empty(sum(received), 2)
    dist.all_to_all_single(values, numbers(sum(sent), 2), received, sent)
    left["objects"] = objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    left["messages"] = received = torch.empty(1)
    both = [
        dist.P2POp(dist.isend, numbers(1), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    left["tagged"] = tagged = [torch.empty(count) for count in (1, 2, 3)]
    if rank == 0:
        sent = [dist.isend(numbers(tag + 1), 1, tag=tag) for tag in (1, 0, 2)]
        for work in sent:
            work.wait()
    elif rank == 1:
        # The first waits until the others have come, or are asked for.
        last = dist.irecv(tagged[2], 0, tag=2)
        dist.recv(tagged[0], 0, tag=0)
        dist.recv(tagged[1], 0, tag=1)
        last.wait()
    if rank != 1:
        left["tagged"] = None
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        left["new_group"] = values = numbers(2)
        dist.all_reduce(values, group=pair)
    return {name: _plain(values) for name, values in left.items()}


def _summed(values):
    copy = values.contiguous()
    dist.all_reduce(copy)
    return copy


def _plain(values):
    if isinstance(values, list):
        return [_plain(value) for value in values]
    return values.tolist() if torch.is_tensor(values) else values


def _reduce_scatter(rank, size):
    parts = [torch.tensor([part, rank]) for part in range(size)]
    listed, single = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    dist.reduce_scatter(listed, parts)
    dist.reduce_scatter_tensor(single, torch.cat(parts))
    return listed.tolist(), single.tolist()


def _errors(rank, size):
    said = []
    for call in [
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.BAND),
        lambda: dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(2), 1),
    ]:
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _interrupted(rank, size):
    """Rank 0 waits for a message that does not come, and is interrupted as from a terminal."""
    if rank == 0:
        ranks.interrupt_after(0.2)
    try:
        dist.recv(torch.empty(1), 1 - rank)
    except BaseException as error:
        return type(error).__name__, getattr(error, "rank", None)
    return None


@unittest.skipIf(torch is None, "there is no PyTorch")
@unittest.skipIf(torch is not None and torch.__version__ < "2", "PyTorch is older than 2.0")
class Torch(unittest.TestCase):
    def _leave_the_same(self, ours, others):
        for rank, (left, expected) in enumerate(zip(ours, others)):
            self.assertEqual(left.keys(), expected.keys())
            for name in expected:
                self.assertEqual(left[name], expected[name], (rank, name))

    def test_two_ranks_train_and_communicate_as_on_gloo(self):
        functions = [_train, _collectives, _reduce_scatter, _errors, _interrupted]
        losses, left, parts, said, interrupted = _run("doorbell", 2, *functions)
        expected_losses, expected = _run("gloo", 2, _train, _collectives)
        self.assertEqual(losses, expected_losses)
        for of_rank in losses:
            self.assertEqual(len(of_rank), STEPS)
            self.assertLess(of_rank[-1], of_rank[0])
        self._leave_the_same(left, expected)
        self.assertEqual(parts, (([0, 1], [0, 1]), ([2, 1], [2, 1])))
        self.assertEqual(interrupted, (("KeyboardInterrupt", None), ("PeerFailed", 0)))
        beginnings = ["TypeError: elements of DLPack", "ValueError: doorbell has no "]
        lengths = ["ValueError: a message of 8 bytes was received, and the tensor has 12"]
        for texts, beginnings in zip(said, (beginnings, beginnings + lengths)):
            self.assertEqual(len(texts), len(beginnings), texts)
            for text, beginning in zip(texts, beginnings):
                self.assertTrue(text.startswith(beginning), text)

    def test_three_ranks_communicate_as_on_gloo(self):
        left, parts = _run("doorbell", 3, _collectives, _reduce_scatter)
        [expected] = _run("gloo", 3, _collectives)
        self._leave_the_same(left, expected)
        self.assertEqual(parts, (([0, 3], [0, 3]), ([3, 3], [3, 3]), ([6, 3], [6, 3])))


if __name__ == "__main__":
    unittest.main()
