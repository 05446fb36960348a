"""Programs and functions under ``doorbell run``."""

import ctypes
import subprocess
import sys
import unittest

import doorbell_rdma


def _devices(factor=1):
    """The number of devices that libibverbs has, times the factor."""
    verbs = ctypes.CDLL("libibverbs.so.1")
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    count = ctypes.c_int()
    verbs.ibv_get_device_list(ctypes.byref(count))
    return factor * count.value


def _refuses(text):
    raise LookupError(text)


class Run(unittest.TestCase):
    def test_a_program_runs_on_the_device(self):
        words = [sys.executable, "-c", "import sys, os; print(os.environ['DOORBELL_SOFT_ADDR']); sys.exit(3)"]
        options = ["--address", "127.82.0.1"]
        ended = doorbell_rdma.run(words, options=options, stdout=subprocess.PIPE, text=True)
        self.assertEqual((ended.returncode, ended.stdout), (3, "127.82.0.1\n"))

    def test_a_function_runs_on_the_device(self):
        self.assertEqual(doorbell_rdma.run(_devices, options=["--rails", "2"]), 2)
        self.assertEqual(doorbell_rdma.run(_devices, 10, options=["--rails", "3"]), 30)

    def test_an_exception_of_a_function_is_raised(self):
        with self.assertRaisesRegex(LookupError, "of the test"):
            doorbell_rdma.run(_refuses, "of the test")

    def test_a_function_that_ends_its_process_is_an_error(self):
        with self.assertRaises(subprocess.CalledProcessError) as raised:
            doorbell_rdma.run(sys.exit, 3)
        self.assertEqual(raised.exception.returncode, 3)


if __name__ == "__main__":
    unittest.main()
