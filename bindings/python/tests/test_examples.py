"""The examples, as their users run them."""

import os
import re
import subprocess
import sys
import unittest

import ranks

try:
    import numpy
except ImportError:
    numpy = None

EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples")


def _start(name, port, **variables):
    device = {"DOORBELL_DEVICE": "soft?address=" + ranks.device_address(port)}
    # Unbuffered, a line and its end would be two writes, between which another rank's may come.
    buffered = {"PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, os.path.join(EXAMPLES, name)],
        env={**os.environ, **buffered, **device, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


class Examples(unittest.TestCase):
    def test_processes(self):
        printed, _ = _start("processes.py", ranks.free_port()).communicate(timeout=2 * ranks.TIMEOUT)
        self.assertEqual(sorted(printed.splitlines()), [f"rank {rank} of 4: [1.5, 15.0]" for rank in range(4)])

    @unittest.skipIf(numpy is None, "there is no NumPy")
    def test_launched(self):
        port = ranks.free_port()
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DOORBELL_SECRET": ranks.SECRET}
        started = [_start("launched.py", port, RANK=str(rank), **job) for rank in range(2)]
        for rank, process in enumerate(started):
            printed, _ = process.communicate(timeout=2 * ranks.TIMEOUT)
            error = re.fullmatch(rf"rank {rank} of 2: error (.*)\n", printed)
            self.assertLess(float(error[1]), 1e-6)


if __name__ == "__main__":
    unittest.main()
