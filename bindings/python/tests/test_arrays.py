"""Arrays: every type and kind, and what is refused."""

import array
import unittest

import dlpack
import doorbell_rdma
import ranks

try:
    import numpy
except ImportError:
    numpy = None

NUMPY_TYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
# Of each: DLPack's code and bits, and the bytes of 1, 2 and 3.
DLPACK_TYPES = {
    "bfloat16": (4, 16, "803f", "0040", "4040"),
    "float8_e4m3fn": (10, 8, "38", "40", "44"),
    "float8_e5m2": (12, 8, "3c", "40", "42"),
    "float16": (2, 16, "003c", "0040", "0042"),
}


def _sums_of_numpy(comm):
    sums = []
    for name in NUMPY_TYPES:
        values = numpy.arange(1000, dtype=name).reshape(10, 100) % 32 + comm.rank
        values = values.astype(name)
        out = numpy.zeros_like(values)
        assert comm.all_reduce(values, out) is out
        assert comm.all_reduce(values) is values
        assert (values == out).all()
        sums.append(values)
    return sums


def _sums_in_memory_of_the_communicator(comm):
    view = comm.alloc(8 << 20)
    values = numpy.frombuffer(view, "f4")
    assert view.format == "B" and view.nbytes == 8 << 20 and not values.any()
    values[:] = comm.rank + 1
    del view
    part = comm.all_reduce(values[1000:-5000])
    comm.all_reduce(comm.alloc(0))
    sums = [values[999], part[0], part[-1], values[-5000]]
    # The array keeps the memory.
    comm.close()
    return [*map(float, sums), float(values.sum())]


def _sums_of_numpy_by_dlpack(comm):
    class Only:
        """What is known only by DLPack."""

        def __init__(self, values):
            self.__dlpack__, self.__dlpack_device__ = values.__dlpack__, values.__dlpack_device__

    values = numpy.full((3, 5), comm.rank + 1, "f4")
    comm.all_reduce(Only(values))
    # One dimension of a transposed array is as contiguous as any.
    comm.all_reduce(Only(values[:1].T))
    return values.tolist()


def _sums_by_dlpack(comm):
    sums = {}
    for name, (code, bits, *numbers) in DLPACK_TYPES.items():
        for kind in dlpack.Array, dlpack.Unversioned:
            memory = bytearray(8 + 5 * bits // 8)
            memory[8:] = 5 * bytes.fromhex(numbers[comm.rank])
            comm.all_reduce(kind(memory, code, bits, offset=8))
            sums[name, kind.__name__] = memory.hex()
    return sums


def _sums_of_buffers(comm):
    kinds = {
        "array.array": array.array("d", [comm.rank, 1]),
        "bytearray": bytearray([comm.rank, 1]),
        "memoryview": memoryview(array.array("l", [comm.rank, 1])),
        "a scalar": memoryview(array.array("f", [comm.rank])).cast("B").cast("f", shape=[]),
        "nothing": array.array("f"),
    }
    return {kind: memoryview(comm.all_reduce(values)).tolist() for kind, values in kinds.items()}


def _refusals(comm):
    """The exception of each wrong call: its type and text."""
    floats = array.array("f", [1, 2, 3, 4])
    halves = memoryview(floats)[::2]
    calls = {
        "a list": lambda: comm.all_reduce([1.0]),
        "a type": lambda: comm.all_reduce(array.array("h", [1])),
        "another order": lambda: comm.all_reduce(memoryview(b"").cast("c")),
        "a type of DLPack": lambda: comm.all_reduce(dlpack.Array(bytearray(4), 0, 16)),
        "a gap": lambda: comm.all_reduce(halves),
        "a gap of DLPack": lambda: comm.all_reduce(dlpack.Array(bytearray(8), 2, 16, stride=2)),
        "read-only": lambda: comm.all_reduce(bytes(4)),
        "read-only by DLPack": lambda: comm.all_reduce(dlpack.Array(bytearray(4), 2, 32, flags=dlpack.READ_ONLY)),
        "a version": lambda: comm.all_reduce(dlpack.Array(bytearray(4), 2, 32, version=(2, 0))),
        "a GPU": lambda: comm.all_reduce(dlpack.Array(bytearray(4), 2, 32, device=dlpack.CUDA)),
        "not aligned": lambda: comm.all_reduce(dlpack.Array(bytearray(9), 2, 32, offset=1)),
        "two types": lambda: comm.all_reduce(floats, array.array("d", [0] * 4)),
        "two lengths": lambda: comm.all_reduce(floats, array.array("f", [0])),
        "an overlap": lambda: comm.all_reduce(memoryview(floats)[:3], memoryview(floats)[1:]),
        "no part for each": lambda: comm.all_gather(array.array("f", [1, 2, 3])),
        "an operator": lambda: comm.all_reduce(floats, op="mean"),
        "a scalar's operator": lambda: comm.all_reduce(floats, op="premulsum"),
        "a root": lambda: comm.broadcast(floats, root=2),
        "a peer": lambda: comm.send(floats, 2),
        "the array as out": lambda: comm.all_to_all(floats, floats),
        "counts": lambda: comm.all_to_all(floats, array.array("f", [0] * 4), send_counts=[2, 2]),
        "a timeout": lambda: comm.barrier(timeout=-1),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = repr(call())
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    # None of them has begun an operation.
    comm.barrier()
    comm.close()
    comm.close()
    try:
        comm.barrier()
    except ValueError as error:
        said["closed"] = str(error)
    return said


REFUSALS = {
    "a list": "TypeError: <class 'list'> is no array: ",
    "a type": "TypeError: elements of format \"h\" cannot be communicated: expected one of i8, u8, ",
    "another order": "TypeError: elements of format \"c\" ",
    "a type of DLPack": "TypeError: elements of DLPack's type 0 with 16 bits × 1 ",
    "a gap": "ValueError: the array is not contiguous in C's order: ",
    "a gap of DLPack": "ValueError: the array is not contiguous in C's order: ",
    "read-only": "ValueError: the array is read-only, ",
    "read-only by DLPack": "ValueError: the array is read-only, ",
    "a version": "ValueError: the array is of version 2 of DLPack: expected 1",
    "a GPU": "TypeError: the array is not in the memory of the host: ",
    "not aligned": "ValueError: the array is not aligned to its elements: ",
    "two types": "TypeError: the array has elements of f32, and out of f64: ",
    "two lengths": "ValueError: allreduce: the input has 4 elements, and the output 1: ",
    "an overlap": "ValueError: the array and out overlap: ",
    "no part for each": "ValueError: allgather: 3 elements are not as many for each of 2 ranks",
    "an operator": "ValueError: there is no operator \"mean\": one of sum, ",
    "a scalar's operator": "ValueError: the operator premulsum has a scalar, ",
    "a root": "ValueError: broadcast: rank 2 cannot be the root of 2 ranks",
    "a peer": "ValueError: sendrecv: there is no rank 2 of 2 ranks ",
    "the array as out": "ValueError: out is the array: ",
    "counts": "ValueError: counts of one direction: ",
    "a timeout": "ValueError: a timeout of -1 s: ",
    "closed": "the communicator is closed",
}


class Arrays(unittest.TestCase):
    @unittest.skipIf(numpy is None, "there is no NumPy")
    def test_numpy_of_every_type_is_reduced(self):
        for size in 2, 3:
            for sums in ranks.run(size, _sums_of_numpy):
                for name, values in zip(NUMPY_TYPES, sums):
                    expected = numpy.arange(1000).reshape(10, 100) % 32 * size + sum(range(size))
                    numpy.testing.assert_array_equal(values, expected.astype(name))

    @unittest.skipIf(numpy is None, "there is no NumPy")
    def test_numpy_is_reduced_by_dlpack(self):
        for values in ranks.run(2, _sums_of_numpy_by_dlpack):
            self.assertEqual(values, [[6.0] * 5, [3.0] * 5, [3.0] * 5])

    @unittest.skipIf(numpy is None, "there is no NumPy")
    def test_memory_of_the_communicator_is_reduced(self):
        for rank, sums in enumerate(ranks.run(2, _sums_in_memory_of_the_communicator)):
            reduced = (8 << 20) // 4 - 6000
            self.assertEqual(sums, [rank + 1, 3, 3, rank + 1, reduced * 3 + 6000 * (rank + 1)])

    def test_types_that_numpy_lacks_are_reduced_by_dlpack(self):
        for sums in ranks.run(2, _sums_by_dlpack):
            for (name, _), memory in sums.items():
                self.assertEqual(memory, 16 * "0" + 5 * DLPACK_TYPES[name][4], name)
            self.assertEqual(len(sums), 2 * len(DLPACK_TYPES))

    def test_buffers_are_reduced(self):
        for sums in ranks.run(3, _sums_of_buffers):
            self.assertEqual(
                sums,
                {
                    "array.array": [3, 3],
                    "bytearray": [3, 3],
                    "memoryview": [3, 3],
                    "a scalar": 3,
                    "nothing": [],
                },
            )

    def test_what_is_wrong_is_refused(self):
        for said in ranks.run(2, _refusals):
            self.assertEqual(said.keys(), REFUSALS.keys())
            for name, expected in REFUSALS.items():
                self.assertTrue(said[name].startswith(expected), said[name])


if __name__ == "__main__":
    unittest.main()
