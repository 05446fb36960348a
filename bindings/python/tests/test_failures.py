"""Peers that fail, and Ctrl-C."""

import array
import os
import signal
import threading
import time
import unittest

import doorbell_rdma
import ranks


def _killed(comm, culprit):
    comm.barrier()
    if comm.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(array.array("f", bytes(4 << 20)))
    except doorbell_rdma.PeerFailed as failed:
        # The communicator has failed for good.
        try:
            comm.barrier()
        except doorbell_rdma.Error as again:
            return failed.rank, again.rank, str(failed)
    return None


def _interrupted(comm):
    """Rank 0 waits for a message that does not come, and is interrupted as from a terminal."""
    values = array.array("i", [1])
    try:
        if comm.rank == 0:
            ranks.interrupt_after(0.2)
            comm.receive(values, 1)
        else:
            comm.receive(values, 0)
    except KeyboardInterrupt:
        return "interrupted"
    except doorbell_rdma.PeerFailed as failed:
        return failed.rank
    return None


def _handled(comm):
    """A handler that raises nothing does not end the wait."""
    calls = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(time.monotonic()))
    values = array.array("i", [comm.rank])
    if comm.rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        comm.receive(values, 1)
        received = time.monotonic()
        return values[0], [call < received for call in calls]
    time.sleep(0.5)
    comm.send(values, 0)
    return None


def _left_by_exception(comm):
    if comm.rank == 0:
        try:
            with comm:
                raise LookupError("of the test")
        except LookupError:
            return None
    try:
        comm.barrier()
    except doorbell_rdma.PeerFailed as failed:
        return failed.rank, str(failed)
    return None


def _late(comm):
    if comm.rank == 1:
        time.sleep(6)
    start = time.monotonic()
    try:
        comm.barrier(timeout=4)
    except doorbell_rdma.Error as error:
        return type(error).__name__, getattr(error, "rank", None), time.monotonic() - start
    return None


class Failures(unittest.TestCase):
    def test_a_killed_peer_is_named(self):
        first, second, third = ranks.run(3, _killed, 1)
        self.assertIs(second, ranks.Killed)
        for rank, again, text in first, third:
            self.assertEqual((rank, again), (1, 1), text)
            self.assertRegex(text, "rank 1 .*died")

    def test_ctrl_c_ends_a_wait_and_reaches_the_peers(self):
        self.assertEqual(ranks.run(2, _interrupted), ["interrupted", 0])

    def test_a_handler_runs_while_an_operation_waits(self):
        self.assertEqual(ranks.run(2, _handled), [(1, [True]), None])

    def test_ctrl_c_ends_a_join(self):
        start = time.monotonic()
        ranks.interrupt_after(0.3)
        with self.assertRaises(KeyboardInterrupt):
            doorbell_rdma.Communicator(0, 2, f"127.0.0.1:{ranks.free_port()}", secret=ranks.SECRET, timeout=ranks.TIMEOUT)
        self.assertLess(time.monotonic() - start, ranks.TIMEOUT / 2)

    def test_an_exception_in_a_with_statement_fails_the_peers(self):
        _, (rank, text) = ranks.run(2, _left_by_exception)
        self.assertEqual(rank, 0)
        self.assertIn("LookupError: of the test", text)

    def test_a_late_peer_is_named_by_its_timeout(self):
        (kind, rank, waited), _ = ranks.run(2, _late)
        self.assertEqual((kind, rank), ("PeerFailed", 1))
        self.assertLess(waited, ranks.TIMEOUT / 2)


if __name__ == "__main__":
    unittest.main()
