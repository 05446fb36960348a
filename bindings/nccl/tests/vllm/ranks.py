"""A rank of vLLM's communicator: every function of its wrapper, and its types, operators and collectives.

Usage: ranks.py WRAPPER RANK RANKS FOLDER, where WRAPPER has vLLM's files, and the ranks meet in FOLDER
"""

import ctypes
import itertools
import sys
from types import SimpleNamespace

import modules
from modules import DTYPES, ReduceOp, StatelessProcessGroup, Tensor

COUNT = 257
RANK, RANKS = map(int, sys.argv[2:4])
wrapper, pynccl = modules.load(sys.argv[1])


class Recorded(dict):
    """The library's functions, and which of them were called."""

    def __init__(self, functions):
        super().__init__(functions)
        self.called = set()

    def __getitem__(self, name):
        self.called.add(name)
        return super().__getitem__(name)


def element(index, of):
    return 1 + (index // 3 + index * of + of) % 2


def values(of, first=0, count=COUNT):
    return [element(first + index, of) for index in range(count)]


def alike(first=0, count=COUNT):
    """Of all ranks the same, so that an average has no fraction."""
    return values(0, first, count)


def reduced(op, first=0, count=COUNT):
    if op == ReduceOp.AVG:
        return alike(first, count)
    columns = zip(*(values(of, first, count) for of in range(RANKS)))
    product = lambda column: 2 ** column.count(2)
    functions = {ReduceOp.SUM: sum, ReduceOp.PRODUCT: product, ReduceOp.MAX: max, ReduceOp.MIN: min}
    return [functions[op](column) for column in columns]


def check(tensor, expected, *what):
    assert tensor.bytes() == b"".join(map(tensor.dtype.encode, expected)), (RANK, *what)


def raises(text, function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


def reductions(comm, new, op, in_place):
    own = slice(RANK * COUNT, (RANK + 1) * COUNT)
    given = lambda count: alike(0, count) if op == ReduceOp.AVG else values(RANK, 0, count)

    tensor = new(COUNT).set(given(COUNT))
    check(comm.all_reduce(tensor, tensor if in_place else None, op), reduced(op), "all-reduce", op, in_place)

    tensor = new(COUNT).set(given(COUNT))
    output = tensor if in_place else new(COUNT)
    comm.reduce(output, tensor, 1, op)
    if RANK == 1:
        check(output, reduced(op), "reduce", op, in_place)

    tensor = new(RANKS * COUNT).set(given(RANKS * COUNT))
    output = tensor[own] if in_place else new(COUNT)
    comm.reduce_scatter(output, tensor, op)
    check(output, reduced(op, RANK * COUNT), "reduce-scatter", op, in_place)


def gathers(comm, new, in_place):
    output = new(RANKS * COUNT)
    tensor = output[RANK * COUNT : (RANK + 1) * COUNT] if in_place else new(COUNT)
    comm.all_gather(output, tensor.set(values(RANK)))
    check(output, itertools.chain(*map(values, range(RANKS))), "all-gather", in_place)


def parts(comm, new):
    """Groups of broadcasts, reductions and messages, of parts of different sizes, one of them empty."""
    sizes = [100 * rank for rank in range(RANKS)]
    first, mine, total = sum(sizes[:RANK]), sizes[RANK], sum(sizes)

    output = new(total)
    comm.all_gatherv(output, new(mine).set(values(RANK, 0, mine)), sizes)
    check(output, itertools.chain(*(values(of, 0, sizes[of]) for of in range(RANKS))), "all-gather of parts")

    output = new(mine)
    comm.reduce_scatterv(output, new(total).set(values(RANK, 0, total)), sizes)
    check(output, reduced(ReduceOp.SUM, first, mine), "reduce-scatter of parts")

    output = new(mine)
    comm.scatter(output, new(total).set(values(RANK, 0, total)), sizes, 2)
    check(output, values(2, first, mine), "scatter")


def messages(comm, new):
    tensor = new(COUNT).set(values(RANK))
    comm.broadcast(tensor, 2)
    check(tensor, values(2), "broadcast")

    following, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    tensor, received = new(COUNT).set(values(RANK)), new(COUNT)
    operation = lambda op, tensor, peer: SimpleNamespace(op=op, tensor=tensor, group_peer=peer)
    comm.batch_isend_irecv([operation("isend", tensor, following), operation("irecv", received, before)])
    check(received, values(before), "ring")

    if RANK:
        comm.recv(received, RANK - 1)
    else:
        received.set(values(7))
    if RANK + 1 < RANKS:
        comm.send(received, RANK + 1)
    check(received, values(7), "chain")


def nested(comm, new):
    tensors = [new(COUNT).set(values(RANK)) for _ in range(3)]
    received = new(COUNT)
    comm.group_start()
    comm.all_reduce(tensors[0], tensors[0])
    comm.group_start()
    comm.broadcast(tensors[1], 1)
    comm.send(tensors[2], (RANK + 1) % RANKS)
    comm.group_end()
    comm.recv(received, (RANK - 1) % RANKS)
    comm.group_end()
    check(tensors[0], reduced(ReduceOp.SUM), "all-reduce of a group")
    check(tensors[1], values(1), "broadcast of a group")
    check(received, values((RANK - 1) % RANKS), "message of a group")


def windows(comm, new):
    tensor = new(COUNT).set(values(RANK))
    window = comm.register_comm_window(tensor)
    raw = comm.register_comm_window_raw(new(COUNT).data_ptr(), COUNT)
    check(comm.all_reduce(tensor, tensor), reduced(ReduceOp.SUM), "all-reduce of a window")
    comm.deregister_comm_window(window)
    comm.deregister_comm_window(raw)


def errors(comm, library, new):
    raises("invalid argument", library.ncclBroadcast, None, None, 1, 0, RANKS, comm.comm, None)
    assert f"root {RANKS}" in library.ncclGetLastError()
    raises("Last error:\nncclCommSuspend is not supported", comm.suspend)
    raises("ncclCommResume is not supported", library.ncclCommResume, comm.comm)
    # vLLM queries it where it is there.
    properties = wrapper.ncclCommProperties()
    assert library._funcs["ncclCommQueryProperties"](comm.comm, ctypes.byref(properties)) != 0
    assert "device API" in library.ncclGetLastError()


def main():
    group = StatelessProcessGroup(RANK, RANKS, sys.argv[4])
    library = wrapper.NCCLLibrary()
    functions = Recorded(library._funcs)
    # All libraries of this file have them.
    library.path_to_dict_mapping.update(dict.fromkeys(library.path_to_dict_mapping, functions))
    comm = pynccl.PyNcclCommunicator(group, f"cuda:{RANK}")
    assert comm.available and comm.nccl.ncclGetVersion() == "2.30.7"
    library = comm.nccl
    for name, dtype in DTYPES.items():
        new = lambda count: Tensor(dtype, count, comm.device)
        for in_place in (False, True):
            for op in ReduceOp:
                reductions(comm, new, op, in_place)
            gathers(comm, new, in_place)
        parts(comm, new)
        messages(comm, new)
        nested(comm, new)
    windows(comm, new)
    errors(comm, library, new)

    identifier = group.broadcast_obj(bytes(library.ncclGetUniqueId()), 0)
    second = pynccl.PyNcclCommunicator.from_unique_id_bytes(identifier, RANK, RANKS, comm.device.index)
    messages(second, new)
    library.ncclCommDestroy(second.comm)
    raises("destroyed", library.ncclCommDestroy, second.comm)
    comm.destroy()
    assert not comm.available
    assert functions.called == {function.name for function in library.exported_functions}, functions.called
    print("PASS")


main()
