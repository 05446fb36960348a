"""Tensors both ways by PyTorch's remote procedure calls over TensorPipe; every byte is compared.

tensorpipe.py TRANSPORT HOST PORT server
tensorpipe.py TRANSPORT HOST PORT client [lasting]
"""

import os
import sys
import time

import torch
from torch.distributed import rpc

SIZES = [1, 8, 4096, 65537, 4 << 20]


def pattern(size, salt):
    return ((torch.arange(size) * 7 + salt) % 256).to(torch.uint8)


def answer(tensor, salt):
    """The server's: compares a tensor, and returns another of the same size."""
    if not torch.equal(tensor, pattern(tensor.numel(), salt)):
        raise ValueError(f"{tensor.numel()} bytes of pattern {salt} are wrong")
    return pattern(tensor.numel(), salt + 1)


def returned(tensor):
    return tensor


def exchange(size, salt):
    received = rpc.rpc_sync("server", answer, (pattern(size, salt), salt))
    if not torch.equal(received, pattern(size, salt + 1)):
        sys.exit(f"{size} returned bytes of pattern {salt} are wrong")


def timed(size, rounds):
    tensor = pattern(size, 1)
    start = time.perf_counter()
    for _ in range(rounds):
        rpc.rpc_sync("server", returned, (tensor,))
    return (time.perf_counter() - start) / rounds / 2


def call(lasting):
    while lasting:
        exchange(SIZES[2], 1)
        print("exchanged", flush=True)
    verified = 0
    for salt in (1, 100):
        for size in SIZES:
            exchange(size, salt)
            verified += 2 * size
    latency, bandwidth = timed(8, 200), SIZES[-1] / timed(SIZES[-1], 25)
    print(f"verified {verified} bytes, {latency * 1e6:.3f} us, {bandwidth / 1e9:.3f} GB/s")


def main():
    transport, host, port, end, *lasting = sys.argv[1:]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{host}:{port}",
        rpc_timeout=30,
        _transports=[transport],
        _channels=["basic"],
    )
    rpc.init_rpc(end, rank=int(end == "client"), world_size=2, rpc_backend_options=options)
    if end == "client":
        call(lasting)
    rpc.shutdown()


main()
