"""Collectives and messages, and the ways to join."""

import array
import os
import subprocess
import sys
import threading
import unittest

import doorbell_rdma
import ranks


def _collectives(comm):
    """What each collective leaves, of integers that name rank and place."""
    rank, size = comm.rank, comm.size

    def numbers(count):
        return array.array("i", [100 * rank + place for place in range(count)])

    def zeros(count):
        return array.array("i", bytes(4 * count))

    parts = numbers(2 * size)
    comm.all_gather(parts)
    halves = numbers(2 * size)
    comm.reduce_scatter(halves, op="max")
    left = {
        "all_gather": comm.all_gather(numbers(2), zeros(2 * size)),
        "all_gather in place": parts,
        "reduce_scatter": comm.reduce_scatter(numbers(2 * size), zeros(2), op="max"),
        "reduce_scatter in place": halves[2 * rank : 2 * rank + 2],
        "broadcast": comm.broadcast(numbers(2), root=1),
        "all_to_all": comm.all_to_all(numbers(size), zeros(size)),
        "all_to_all of parts": comm.all_to_all(
            # Rank r sends r + 1 numbers to each.
            numbers(size * (rank + 1)),
            zeros(size * (size + 1) // 2),
            send_counts=[rank + 1] * size,
            receive_counts=range(1, size + 1),
        ),
        "reduce": comm.reduce(numbers(2), root=1, op="max") if rank == 1 else comm.reduce(numbers(2), 1, "max")[:0],
        "all_reduce": comm.all_reduce(numbers(2), op="min"),
        "all_reduce of averages": comm.all_reduce(numbers(2), op="avg"),
    }
    comm.barrier()
    return {name: values.tolist() for name, values in left.items()}


def _messages(comm):
    """A ring, in which the last rank receives first."""
    values = array.array("q", [comm.rank])
    received = array.array("q", [-1])
    steps = [
        lambda: comm.send(values, (comm.rank + 1) % comm.size),
        lambda: comm.receive(received, (comm.rank - 1) % comm.size),
    ]
    for step in steps if comm.rank + 1 < comm.size else reversed(steps):
        step()
    return received[0]


def _threads(comm):
    """Rank 1 sends only what a thread of rank 0 has caused, while rank 0 waits for it."""
    values = array.array("i", [7])
    if comm.rank == 1:
        comm.receive(values, 0)
        comm.send(values, 0)
        return values[0]
    thread = threading.Timer(0.2, comm.send, (array.array("i", [8]), 1))
    thread.start()
    comm.receive(values, 1)
    thread.join()
    return values[0]


def _repeated(comm):
    """The same for an all-reduce that repeats an earlier one, whose first microseconds have the interpreter."""
    values = array.array("i", [1])
    comm.all_reduce(values)
    if comm.rank == 1:
        comm.receive(array.array("i", [0]), 0)
        return comm.all_reduce(values)[0]
    thread = threading.Timer(0.2, comm.send, (array.array("i", [8]), 1))
    thread.start()
    comm.all_reduce(values)
    # No thread may use it when it is closed.
    thread.join()
    return values[0]


JOIN = """
import array, sys
import doorbell_rdma
device = doorbell_rdma.open(sys.argv[1])
{join}
with comm:
    print(comm, comm.all_reduce(array.array("i", [comm.rank + 1]))[0])
"""


def _outputs(join, environments, device):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN.format(join=join), device],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    return [process.communicate(timeout=ranks.TIMEOUT)[0] for process in processes]


class Communicator(unittest.TestCase):
    def test_collectives_leave_what_they_should(self):
        for size in 2, 3:
            for rank, left in enumerate(ranks.run(size, _collectives)):
                gathered = [100 * other + place for other in range(size) for place in range(2)]
                own = [100 * (size - 1) + 2 * rank + place for place in range(2)]
                expected = {
                    "all_gather": gathered,
                    "reduce_scatter": own,
                    "reduce_scatter in place": own,
                    "broadcast": [100, 101],
                    "all_to_all": [100 * other + rank for other in range(size)],
                    "all_to_all of parts": [
                        100 * other + (other + 1) * rank + place for other in range(size) for place in range(other + 1)
                    ],
                    "reduce": [100 * (size - 1), 100 * (size - 1) + 1] if rank == 1 else [],
                    "all_reduce": [0, 1],
                    "all_reduce of averages": [50 * (size - 1), 50 * (size - 1) + 1],
                }
                # In place, the own part is where it will be.
                at = 2 * rank
                in_place = left.pop("all_gather in place")
                self.assertEqual(in_place[at : at + 2], [100 * rank + at, 100 * rank + at + 1])
                self.assertEqual(in_place, [100 * other + 2 * other + place for other in range(size) for place in range(2)])
                self.assertEqual(left, expected)

    def test_messages_go_round(self):
        self.assertEqual(ranks.run(3, _messages), [2, 0, 1])

    def test_other_threads_run_while_one_waits(self):
        self.assertEqual(ranks.run(2, _threads), [8, 8])
        self.assertEqual(ranks.run(2, _repeated), [4, 4])

    def test_ranks_of_a_launcher_join(self):
        port = ranks.free_port()
        environments = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "DOORBELL_SECRET": ranks.SECRET,
            }
            for rank in range(2)
        ]
        join = "comm = doorbell_rdma.Communicator.from_env(device)"
        outputs = _outputs(join, environments, "soft?address=" + ranks.device_address(port))
        self.assertEqual(outputs, [f"<Communicator rank {rank} of 2> 3\n" for rank in range(2)])

    def test_ranks_join_by_an_id(self):
        with doorbell_rdma.Rendezvous(2, timeout=ranks.TIMEOUT) as rendezvous:
            port = int(rendezvous.id.split(":")[2])
            environments = [{"ID": rendezvous.id, "AT": str(rank)} for rank in range(2)]
            join = 'import os; comm = doorbell_rdma.Communicator(int(os.environ["AT"]), 2, os.environ["ID"], device=device)'
            outputs = _outputs(join, environments, "soft?address=" + ranks.device_address(port))
        self.assertEqual(outputs, [f"<Communicator rank {rank} of 2> 3\n" for rank in range(2)])

    def test_a_wrong_way_to_join_is_refused(self):
        for address, arguments, expected in [
            ("nowhere", {}, "expected HOST:PORT"),
            ("127.0.0.1:x", {}, "expected HOST:PORT"),
            ("doorbell:x", {}, "expected HOST:PORT, or the id"),
            ("doorbell:127.0.0.1:1:" + 32 * "0", {"secret": ranks.SECRET}, "has its own secret"),
            ("127.0.0.1:4000", {"secret": ranks.SECRET, "timeout": float("nan")}, "a timeout of NaN s"),
        ]:
            with self.assertRaisesRegex(ValueError, expected):
                doorbell_rdma.Communicator(0, 1, address, **arguments)
        with self.assertRaisesRegex(doorbell_rdma.Error, "rank 2 of 2"):
            doorbell_rdma.Communicator(2, 2, "127.0.0.1:4000", secret=ranks.SECRET)
        with self.assertRaisesRegex(doorbell_rdma.Error, "at least"):
            doorbell_rdma.Communicator(0, 1, "127.0.0.1:4000", secret="short")
        with self.assertRaisesRegex(doorbell_rdma.Error, "there is no launcher|no launcher says"):
            doorbell_rdma.Communicator.from_env()


class Device(unittest.TestCase):
    def test_a_device_has_a_name_and_an_address(self):
        with doorbell_rdma.open("soft?address=127.81.0.1&drop=0.01&seed=7") as device:
            self.assertEqual(device.address, "127.81.0.1")
            self.assertEqual(repr(device), f"<Device {device.name} at 127.81.0.1>")
        with self.assertRaisesRegex(ValueError, "the device is closed"):
            doorbell_rdma.Communicator(0, 1, "127.0.0.1:4000", secret=ranks.SECRET, device=device)

    def test_a_wrong_device_is_refused(self):
        with self.assertRaisesRegex(doorbell_rdma.Error, "no fault is called 'dorp'"):
            doorbell_rdma.open("soft?dorp=0.01")


if __name__ == "__main__":
    unittest.main()
