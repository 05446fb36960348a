"""The cost of an import."""

import importlib.util
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

OF = "import time; start = time.perf_counter(); import {}; print(1e3 * (time.perf_counter() - start))"


def _import_ms(package):
    return float(subprocess.check_output([sys.executable, "-c", OF.format(package)], text=True))


class Import(unittest.TestCase):
    def test_an_import_loads_no_numpy_and_no_torch(self):
        import_ms, native_ms, *loaded = subprocess.check_output([sys.executable, "-c", TIME], text=True).split()
        print(f"import doorbell_rdma: {float(import_ms):.1f} ms, first use {float(native_ms):.1f} ms", file=sys.stderr)
        self.assertIn("doorbell_rdma._native", loaded)
        self.assertFalse({"numpy", "torch", "multiprocessing"} & set(loaded), loaded)

    @unittest.skipIf(importlib.util.find_spec("numpy") is None, "there is no NumPy")
    def test_an_import_takes_less_than_half_of_numpys(self):
        # NumPy's takes 60 to 150 ms. By turns, and of each the best.
        turns = [(_import_ms("doorbell_rdma"), _import_ms("numpy")) for _ in range(5)]
        ours, numpys = map(min, zip(*turns))
        print(f"import doorbell_rdma: {ours:.1f} ms, numpy: {numpys:.1f} ms", file=sys.stderr)
        self.assertLess(ours, numpys / 2)


if __name__ == "__main__":
    unittest.main()
