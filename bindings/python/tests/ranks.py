"""Ranks as processes."""

import multiprocessing
import socket
import traceback

import doorbell_rdma

SECRET = "a secret of these tests"
# Of what takes milliseconds, on a busy machine.
TIMEOUT = 60.0


class Killed:
    """In place of a result: the process was ended by a signal."""


def _rank(pipe, function, rank, size, address, arguments):
    try:
        device = doorbell_rdma.open("soft?address=" + device_address(address.rpartition(":")[2]))
        with device, doorbell_rdma.Communicator(
            rank, size, address, secret=SECRET, device=device, timeout=TIMEOUT
        ) as comm:
            result = function(comm, *arguments)
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def device_address(port):
    """A loopback address for the device of the ranks that meet at this port."""
    return f"127.80.{int(port) >> 8}.{int(port) & 255}"


def free_port():
    """The first of eight free ports, as rank 0 tries eight."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return min(one.getsockname()[1], 65000)


def start(size, function, *arguments):
    """The processes, and the pipes of their results."""
    spawn = multiprocessing.get_context("spawn")
    address = f"127.0.0.1:{free_port()}"
    started = []
    for rank in range(size):
        reader, writer = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_rank, args=(writer, function, rank, size, address, arguments))
        process.start()
        writer.close()
        started.append((process, reader))
    return started


def results(started):
    """By rank: what the function returned; an exception's text raises."""
    found, errors = [], []
    for process, reader in started:
        try:
            result, error = reader.recv() if reader.poll(2 * TIMEOUT) else (None, "no result in time")
        except EOFError:
            result, error = Killed, None
        if error is not None:
            errors.append(error)
        found.append(result)
    for process, _ in started:
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            errors.append(f"process {process.pid} did not end")
    if errors:
        raise AssertionError("\n".join(errors))
    return found


def run(size, function, *arguments):
    """Calls the function with a communicator and these arguments as each of so many ranks."""
    return results(start(size, function, *arguments))
