"""Process groups of torch.distributed on communicators."""

import os
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

import doorbell_rdma

_OPERATORS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}


def create(store, rank, size, timeout):
    """A process group whose ranks meet by the store."""
    seconds = timeout.total_seconds()
    if rank == 0:
        with doorbell_rdma.Rendezvous(size, _own_address(), seconds) as rendezvous:
            store.set("doorbell", rendezvous.id)
            comm = doorbell_rdma.Communicator(rank, size, rendezvous.id, timeout=seconds)
    else:
        comm = doorbell_rdma.Communicator(rank, size, store.get("doorbell").decode(), timeout=seconds)
    return ProcessGroup(comm)


def _own_address():
    """The address of this host by which it reaches the master."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # A datagram socket sends nothing here.
        probe.connect(address)
        return probe.getsockname()[0]


class Work(dist.Work):
    """An operation that a thread of its process group carries out."""

    def __init__(self, comm, running, tensors):
        super().__init__()
        self._comm = comm
        self._running = running
        self._tensors = tensors

    def wait(self, timeout=timedelta(0)):
        # No timeout is the process group's, which the operation has.
        try:
            self._running.result(timeout.total_seconds() or None)
        except KeyboardInterrupt:
            # Of this thread: the other one would go on waiting, and the process for it.
            self._comm.abort("interrupted by a signal")
            raise
        return True

    def is_completed(self):
        return self._running.done()

    def is_success(self):
        return self._running.done() and self._running.exception() is None

    def exception(self):
        return self._running.exception()

    def result(self):
        return self._tensors

    def get_future(self):
        future = torch.futures.Future()

        def complete(running):
            error = running.exception()
            if error is None:
                future.set_result(self._tensors)
            else:
                future.set_exception(error)

        self._running.add_done_callback(complete)
        return future


class Mailbox:
    """The messages of one rank, which come in the order in which they were sent, by their tags.

    Before each comes its header: the tag, and the length in bytes.
    """

    def __init__(self, comm, source, thread):
        self._comm = comm
        self._source = source
        self._thread = thread
        self._lock = threading.Lock()
        # What was asked for and has not come, (tag, tensor, future), and what has come before it was
        # asked for, (tag, future of its bytes).
        self._wanted = []
        self._early = []

    def receive(self, tensor, tag):
        received = Future()
        with self._lock:
            early = _taken(self._early, tag)
            if early is None:
                self._wanted.append((tag, tensor, received))
        if early is None:
            self._thread.submit(self._until, received)
        else:
            early[1].add_done_callback(lambda arrived: _settle(received, lambda: _store(arrived.result(), tensor)))
        return received

    def _until(self, received):
        """Receives messages until this one has come, also by a call for another."""
        try:
            while not received.done():
                self._next()
        except BaseException as error:
            with self._lock:
                wanted, self._wanted = self._wanted, []
            for _, _, waiting in wanted:
                waiting.set_exception(error)
            if not received.done():
                received.set_exception(error)

    def _next(self):
        header = torch.empty(2, dtype=torch.int64)
        self._comm.receive(header, self._source)
        tag, length = header.tolist()
        with self._lock:
            wanted = _taken(self._wanted, tag)
            if wanted is None:
                arrived = Future()
                self._early.append((tag, arrived))
        if wanted is None:
            _settle(arrived, lambda: self._bytes(length))
        else:
            _, tensor, received = wanted
            _settle(received, lambda: self._into(tensor, length))

    def _into(self, tensor, length):
        if tensor.nbytes != length:
            return _store(self._bytes(length), tensor)
        with _Elements(tensor) as elements:
            self._comm.receive(_bytes(elements), self._source)

    def _bytes(self, length):
        return self._comm.receive(torch.empty(length, dtype=torch.uint8), self._source)


def _taken(entries, tag):
    """The first with this tag, which is no more among them."""
    for index, entry in enumerate(entries):
        if entry[0] == tag:
            return entries.pop(index)
    return None


def _settle(future, make):
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


def _store(message, tensor):
    if len(message) != tensor.nbytes:
        raise ValueError(f"a message of {len(message)} bytes was received, and the tensor has {tensor.nbytes}")
    with _Elements(tensor) as elements:
        _bytes(elements).copy_(message)


class ProcessGroup(dist.ProcessGroup):
    """Operations begin in the order of the calls, in a thread for the collectives and one for each
    direction of messages with each rank.
    """

    def __init__(self, comm):
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._threads = {}
        self._mailboxes = {}
        self._name = self._description = ""

    def getBackendName(self):
        return "doorbell"

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def getGroupDesc(self):
        return self._description

    def setGroupDesc(self, description):
        self._description = description

    def _get_backend(self, device):
        # Which has no other operations than these.
        return self

    def _begin(self, queue, tensors, operation):
        return Work(self._comm, self._thread(queue).submit(operation), tensors)

    def _thread(self, queue):
        if queue not in self._threads:
            self._threads[queue] = ThreadPoolExecutor(1, thread_name_prefix="doorbell")
        return self._threads[queue]

    def _collective(self, tensors, operation):
        return self._begin("collectives", tensors, operation)

    def allreduce(self, tensors, opts=dist.AllreduceOptions()):
        op = _operator(opts)

        def operation():
            for tensor in tensors:
                with _Elements(tensor) as elements:
                    self._comm.all_reduce(elements, op=op)

        return self._collective(tensors, operation)

    allreduce_coalesced = allreduce

    def reduce(self, tensors, opts=dist.ReduceOptions()):
        op, root = _operator(opts), opts.rootRank

        def operation():
            for tensor in tensors:
                with _Elements(tensor) as elements:
                    self._comm.reduce(elements, root, op)

        return self._collective(tensors, operation)

    def broadcast(self, tensors, opts=dist.BroadcastOptions()):
        root = opts.rootRank

        def operation():
            for tensor in tensors:
                with _Elements(tensor) as elements:
                    self._comm.broadcast(_bytes(elements), root)

        return self._collective(tensors, operation)

    def allgather(self, output_lists, inputs, opts=None):
        def operation():
            for outputs, given in zip(output_lists, inputs):
                gathered = given.new_empty((self.size(), *given.shape))
                self._comm.all_gather(_bytes(given), _bytes(gathered))
                for output, part in zip(outputs, gathered):
                    output.detach().copy_(part.view_as(output))

        return self._collective(output_lists, operation)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        # A list for each rank, of its tensors.
        return self.allgather([list(outputs) for outputs in zip(*output_lists)], inputs, opts)

    def all_gather_single(self, output, given, opts=None):
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        def operation():
            for output, given in zip(outputs, inputs):
                with _Elements(output) as gathered:
                    self._comm.all_gather(_bytes(given), _bytes(gathered))

        return self._collective(outputs, operation)

    def reduce_scatter(self, outputs, input_lists, opts=dist.ReduceScatterOptions()):
        op = _operator(opts)

        def operation():
            for output, inputs in zip(outputs, input_lists):
                parts = torch.cat([part.detach().reshape(-1) for part in inputs])
                with _Elements(output) as elements:
                    self._comm.reduce_scatter(parts, elements, op)

        return self._collective(outputs, operation)

    def reduce_scatter_single(self, output, given, opts=dist.ReduceScatterOptions()):
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=dist.ReduceScatterOptions()):
        op = _operator(opts)

        def operation():
            for output, given in zip(outputs, inputs):
                with _Elements(output) as elements:
                    self._comm.reduce_scatter(_flat(given), elements, op)

        return self._collective(outputs, operation)

    def alltoall(self, outputs, inputs, opts=None):
        return self._collective(outputs, lambda: self._exchange(outputs, inputs))

    def all_to_all_single(self, output, given, output_splits, input_splits, opts=None):
        def operation():
            outputs = _split(output.detach(), output_splits, self.size())
            self._exchange(outputs, _split(given.detach(), input_splits, self.size()))

        return self._collective([output], operation)

    def gather(self, output_lists, inputs, opts=dist.GatherOptions()):
        root = opts.rootRank

        def operation():
            [given] = inputs
            nothing = given.new_empty(0)
            outputs = output_lists[0] if self.rank() == root else [nothing] * self.size()
            sent = [given if rank == root else nothing for rank in range(self.size())]
            self._exchange(outputs, sent)

        return self._collective(output_lists, operation)

    def scatter(self, outputs, input_lists, opts=dist.ScatterOptions()):
        root = opts.rootRank

        def operation():
            [output] = outputs
            nothing = output.new_empty(0)
            sent = input_lists[0] if self.rank() == root else [nothing] * self.size()
            self._exchange([output if rank == root else nothing for rank in range(self.size())], sent)

        return self._collective(outputs, operation)

    def _exchange(self, outputs, inputs):
        """From and to each rank, a tensor of any size."""
        sent = [_bytes(given) for given in inputs]
        received = torch.empty(sum(output.nbytes for output in outputs), dtype=torch.uint8)
        counts = [output.nbytes for output in outputs]
        self._comm.all_to_all(torch.cat(sent), received, [len(part) for part in sent], counts)
        for output, part in zip(outputs, received.split(counts)):
            with _Elements(output) as elements:
                _bytes(elements).copy_(part)

    def barrier(self, opts=None):
        return self._collective([], self._comm.barrier)

    def send(self, tensors, to, tag=0):
        [tensor] = tensors
        header = torch.tensor([tag, tensor.nbytes])

        def operation():
            self._comm.send(header, to)
            self._comm.send(_bytes(tensor), to)

        return self._begin(("send", to), tensors, operation)

    def recv(self, tensors, source, tag=0):
        [tensor] = tensors
        if source not in self._mailboxes:
            self._mailboxes[source] = Mailbox(self._comm, source, self._thread(("receive", source)))
        return Work(self._comm, self._mailboxes[source].receive(tensor, tag), tensors)

    def abort(self):
        self._comm.abort("torch.distributed has aborted the process group")

    def shutdown(self):
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        self._comm.close()

    # As PyTorch before 2.13 has them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Elements:
    """The elements of a tensor, one after the other: its own, or a copy that is copied back."""

    def __init__(self, tensor):
        self._tensor = tensor.detach()
        self._elements = _flat(tensor)

    def __enter__(self):
        return self._elements

    def __exit__(self, kind, *_):
        if kind is None and not self._tensor.is_contiguous():
            self._tensor.copy_(self._elements.view_as(self._tensor))


def _flat(tensor):
    return tensor.detach().contiguous().view(-1)


def _bytes(tensor):
    """For what no arithmetic is done with, whatever its type."""
    return _flat(tensor).view(torch.uint8)


def _split(tensor, sizes, ranks):
    if sizes:
        return tensor.split(sizes)
    if len(tensor) % ranks:
        raise ValueError(f"{len(tensor)} rows are not as many for each of {ranks} ranks")
    return tensor.split(len(tensor) // ranks)


def _operator(opts):
    for name, op in _OPERATORS.items():
        if opts.reduceOp == getattr(dist.ReduceOp, name):
            return op
    raise ValueError(f"doorbell has no {opts.reduceOp}: expected one of {', '.join(_OPERATORS)}")
