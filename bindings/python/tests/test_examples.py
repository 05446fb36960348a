"""The examples, as their users run them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import unittest

import ranks

try:
    import numpy
except ImportError:
    numpy = None

EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples")


MEANS = [f"rank {rank} of 4: [1.5, 15.0]" for rank in range(4)]


def _lacks(package):
    return None if importlib.util.find_spec(package) else f"there is no {package}"


def _mpi():
    """The launcher of MPI and the variables for it, or why there is none."""
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if mpirun is None:
        return None, "there is no mpirun"
    is_open = "HYDRA" not in subprocess.run([mpirun, "--version"], stdout=subprocess.PIPE, text=True).stdout
    root = ["--allow-run-as-root"] if is_open and os.getuid() == 0 else []
    words = [mpirun, *root, *(["--oversubscribe"] if is_open else []), "-n", "4"]
    # The wheel of mpi4py is for every MPI that is installed.
    return words, {"MPI4PY_MPIABI": "openmpi"} if is_open else {}


def _start(name, port, launcher=(), **variables):
    device = {"DOORBELL_DEVICE": "soft?address=" + ranks.device_address(port)}
    # Unbuffered, a line and its end would be two writes, between which another rank's may come.
    buffered = {"PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [*launcher, sys.executable, os.path.join(EXAMPLES, name)],
        env={**os.environ, **buffered, **device, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


class Examples(unittest.TestCase):
    def test_processes(self):
        self._prints_means(_start("processes.py", ranks.free_port()))

    @unittest.skipIf(_lacks("mpi4py"), _lacks("mpi4py"))
    def test_mpi(self):
        mpirun, variables = _mpi()
        if mpirun is None:
            self.skipTest(variables)
        self._prints_means(_start("mpi.py", ranks.free_port(), mpirun, **variables))

    @unittest.skipIf(_lacks("ray"), _lacks("ray"))
    def test_ray(self):
        self._prints_means(_start("ray_actors.py", ranks.free_port()))

    def _prints_means(self, process):
        printed, _ = process.communicate(timeout=2 * ranks.TIMEOUT)
        self.assertEqual(sorted(printed.splitlines()), MEANS)

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
