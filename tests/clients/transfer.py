"""Two processes that write and read each other's memory by a transfer engine; every byte is compared.

transfer.py nixl|mooncake:PROTOCOL:DEVICES HOST PORT server
transfer.py nixl|mooncake:PROTOCOL:DEVICES HOST PORT client [lasting [SECONDS]]

PORT is of a TCP connection of their own, for addresses and turns.
"""

import json
import os
import socket
import sys
import time

import numpy

SIZES = [1, 8, 4096, 65537, 4 << 20]
LIMIT_S = 30


def pattern(size, salt):
    return ((numpy.arange(size) * 7 + salt) % 256).astype(numpy.uint8)


def compare(memory, size, salt):
    if not numpy.array_equal(memory[:size], pattern(size, salt)):
        sys.exit(f"{size} bytes of pattern {salt} are wrong")


class Nixl:
    """An agent with the UCX backend."""

    def __init__(self, _, memory, host, name):
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.base = memory.ctypes.data
        self.memory = self.agent.register_memory([(self.base, memory.nbytes, 0, "")], "DRAM")

    def address(self):
        return self.agent.get_agent_metadata().hex(), self.base

    def connect(self, address):
        metadata, self.remote = address
        self.peer = self.agent.add_remote_agent(bytes.fromhex(metadata))

    def move(self, operation, size):
        local, remote = (
            self.agent.get_xfer_descs([(base, size, 0)], "DRAM") for base in (self.base, self.remote)
        )
        handle = self.agent.initialize_xfer(operation, local, remote, self.peer)
        state = self.agent.transfer(handle)
        deadline = time.monotonic() + LIMIT_S
        while state == "PROC" and time.monotonic() < deadline:
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            sys.exit(f"{operation} of {size} bytes is in state {state}")
        handle.release()

    def close(self):
        self.agent.deregister_memory(self.memory)


class Mooncake:
    """A transfer engine whose ends find each other without a server of metadata."""

    def __init__(self, protocol, memory, host, _):
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", *protocol.split(":")) != 0:
            sys.exit("the engine does not start")
        self.host, self.base = host, memory.ctypes.data
        if self.engine.register_memory(self.base, memory.nbytes) != 0:
            sys.exit("the memory cannot be registered")

    def address(self):
        return f"{self.host}:{self.engine.get_rpc_port()}", self.base

    def connect(self, address):
        self.peer, self.remote = address

    def move(self, operation, size):
        transfer = {"WRITE": self.engine.transfer_sync_write, "READ": self.engine.transfer_sync_read}[operation]
        status = transfer(self.peer, self.base, self.remote, size)
        if status != 0:
            sys.exit(f"{operation} of {size} bytes ends with {status}")

    def close(self):
        self.engine.unregister_memory(self.base)


class Turns:
    """Lines of JSON between the ends."""

    def __init__(self, connection):
        self.file = connection.makefile("rw")

    def send(self, value):
        self.file.write(json.dumps(value) + "\n")
        self.file.flush()

    def receive(self):
        line = self.file.readline()
        return json.loads(line) if line else None


def serve(engine, memory, turns):
    """Compares what was written, and offers the next pattern."""
    turns.send(engine.address())
    while (turn := turns.receive()) is not None:
        size, salt = turn
        compare(memory, size, salt)
        memory[:size] = pattern(size, salt + 1)
        turns.send("ready")


def exchange(engine, memory, turns, size, salt):
    memory[:size] = pattern(size, salt)
    engine.move("WRITE", size)
    turns.send((size, salt))
    if turns.receive() is None:
        sys.exit("the server is gone")
    memory[:size] = 0
    engine.move("READ", size)
    compare(memory, size, salt + 1)


def timed(engine, size, rounds):
    start = time.perf_counter()
    for _ in range(rounds):
        engine.move("WRITE", size)
    return (time.perf_counter() - start) / rounds


def last(engine, memory, turns, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        exchange(engine, memory, turns, SIZES[-1], 1)
        print("exchanged", flush=True)
    print("every exchange verified")


def main():
    name, host, port, end, *lasting = sys.argv[1:]
    kind, _, protocol = name.partition(":")
    memory = numpy.zeros(SIZES[-1], numpy.uint8)
    engine = {"nixl": Nixl, "mooncake": Mooncake}[kind](protocol, memory, host, end)
    if end == "server":
        with socket.create_server(("", int(port))) as listener:
            serve(engine, memory, Turns(listener.accept()[0]))
        engine.close()
        return
    turns = Turns(socket.create_connection((host, int(port))))
    engine.connect(turns.receive())
    if lasting:
        last(engine, memory, turns, float((*lasting, "inf")[1]))
        return
    verified = 0
    for salt in (1, 100):
        for size in SIZES:
            exchange(engine, memory, turns, size, salt)
            verified += 2 * size
    latency, bandwidth = timed(engine, 8, 200), SIZES[-1] / timed(engine, SIZES[-1], 50)
    engine.close()
    print(f"verified {verified} bytes, {latency * 1e6:.3f} us, {bandwidth / 1e9:.3f} GB/s")


main()
# Without handlers of exit: of two copies of libnl-route in NIXL's process, one's handler crashes.
sys.stdout.flush()
os._exit(0)
