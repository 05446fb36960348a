"""Ranks as processes."""

import multiprocessing
import os
import signal
import socket
import threading
import traceback

import doorbell_rdma

SECRET = "a secret of these tests"
# Of what takes milliseconds, on a busy machine.
TIMEOUT = 60.0


class Killed:
    """In place of a result: the process was ended by a signal."""


def interrupt_after(seconds):
    """Ctrl-C after a time, also where the tests were started with it ignored, as by a shell's &."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def _process(pipe, function, arguments):
    try:
        pipe.send((function(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def _communicator(rank, size, address, function, *arguments):
    with doorbell_rdma.open("soft?address=" + device_address(address.rpartition(":")[2])) as device:
        with doorbell_rdma.Communicator(rank, size, address, SECRET, device, TIMEOUT) as comm:
            return function(comm, *arguments)


def device_address(port):
    """A loopback address for the device of the ranks that meet at this port."""
    return f"127.80.{int(port) >> 8}.{int(port) & 255}"


def free_port():
    """A port at which ranks can meet: they try this one and the next seven."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return min(one.getsockname()[1], 65000)


def run(size, function, *arguments):
    """Calls the function with a communicator and these arguments as each of so many ranks."""
    address = f"127.0.0.1:{free_port()}"
    return processes([(_communicator, rank, size, address, function, *arguments) for rank in range(size)])


def processes(calls):
    """Makes each call, a function with arguments, in a process of its own. Returns their results;
    an exception raises with its text.
    """
    spawn = multiprocessing.get_context("spawn")
    started = []
    for function, *arguments in calls:
        reader, writer = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_process, args=(writer, function, arguments))
        process.start()
        writer.close()
        started.append((process, reader))
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
