"""The cost of an import."""

import subprocess
import sys
import unittest

TIME = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import doorbell_rdma
import_ms = 1e3 * (time.perf_counter() - start)
start = time.perf_counter()
doorbell_rdma.open
print(import_ms, 1e3 * (time.perf_counter() - start), *(set(sys.modules) - before))
"""


class Import(unittest.TestCase):
    def test_an_import_loads_no_numpy_and_no_torch(self):
        import_ms, native_ms, *loaded = subprocess.check_output([sys.executable, "-c", TIME], text=True).split()
        print(f"import doorbell_rdma: {float(import_ms):.1f} ms, first use {float(native_ms):.1f} ms", file=sys.stderr)
        self.assertIn("doorbell_rdma._native", loaded)
        self.assertFalse({"numpy", "torch", "multiprocessing"} & set(loaded), loaded)


if __name__ == "__main__":
    unittest.main()
