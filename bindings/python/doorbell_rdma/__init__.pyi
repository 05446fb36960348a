import subprocess
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

# Before Python 3.12 the buffer protocol has no type.
_Array = TypeVar("_Array")
_Operator = Literal["sum", "prod", "min", "max", "avg"]
_Result = TypeVar("_Result")

class Error(RuntimeError):
    """A device or a communicator has failed."""

class PeerFailed(Error):
    """A communicator has failed because of another rank."""

    rank: int

class Device:
    """An open device, which `open` returns."""

    name: str
    address: str
    def close(self) -> None:
        """Closes it; communicators on it keep it open for themselves."""
    def __enter__(self) -> Device: ...
    def __exit__(self, *exception: object) -> None: ...

def open(device: str = "soft0") -> Device:
    """Opens a device: ``soft0``, a userspace device that the environment configures; ``soft`` or
    ``soft?drop=0.01&seed=7``, one of its own with options; or an adapter, as ``mlx5_0``.
    """

class Rendezvous:
    """Where ranks meet that have no launcher, in a thread of this process.

    `id` goes to all ranks, and to no other process: it has the group's secret. `address` is one of this
    host at which they reach it.
    """

    id: str
    def __init__(self, size: int, address: str = "127.0.0.1", timeout: float | None = None) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Rendezvous: ...
    def __exit__(self, *exception: object) -> None: ...

class Communicator:
    """One rank of a group of processes, and the collectives between them.

    All ranks make the same calls in the same order. An array is NumPy's, PyTorch's (of the CPU), an
    ``array.array``, a ``memoryview`` or another with the buffer protocol or DLPack: contiguous, of
    integers with 8, 32 or 64 bits, or of floats with 8 (by DLPack), 16, 32 or 64. No other thread may
    write it during an operation, which releases the interpreter.

    A call raises ``TypeError`` or ``ValueError`` for its arguments, before anything is sent;
    `PeerFailed` when another rank has failed or does not take part within the timeout in seconds, and
    `Error` for other failures. An exception of a signal's handler, as ``KeyboardInterrupt``, ends it,
    and aborts the communicator. After a failure it can only be closed.
    """

    rank: int
    size: int
    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        secret: str | None = None,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> None:
        """Joins a group. Returns when all ranks have joined.

        `address` is HOST:PORT of rank 0, which listens at the first free port from there on, of
        eight; or the id of a `Rendezvous`. `secret` is of 16 characters or more, the same on all
        ranks (default: DOORBELL_SECRET, or the user's file). `device` is by default the one that
        DOORBELL_DEVICE names, or ``soft0``. `timeout` is of each operation (default 30 s), and of
        joining (default 60 s).
        """

    @staticmethod
    def from_env(device: Device | None = None, timeout: float | None = None) -> Communicator:
        """A rank that a launcher has started: ``torchrun`` (RANK, WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT), ``mpirun``, ``srun``, or ``doorbell`` itself.
        """

    def alloc(self, bytes: int) -> memoryview:
        """Memory that is shared with the other ranks, of zeros, for arrays that operations need not copy:
        ``numpy.frombuffer(comm.alloc(4 * count), "f4")``, ``torch.frombuffer(comm.alloc(2 * count),
        dtype=torch.bfloat16)``. Parts of such arrays are as good.
        """

    def all_reduce(
        self, array: _Array, out: _Array | None = None, op: _Operator = "sum", timeout: float | None = None
    ) -> _Array:
        """All ranks get the reduction of all arrays, in place or in `out`, which is returned."""

    def reduce(self, array: _Array, root: int = 0, op: _Operator = "sum", timeout: float | None = None) -> _Array:
        """The root gets the reduction of all arrays, in place."""

    def reduce_scatter(
        self, array: _Array, out: _Array | None = None, op: _Operator = "sum", timeout: float | None = None
    ) -> _Array:
        """Each rank gets its part of the reduction, in place of that part or in `out`."""

    def all_gather(self, array: _Array, out: _Array | None = None, timeout: float | None = None) -> _Array:
        """All ranks get all arrays, by rank, in `out`; or in place, where the own part is the input."""

    def broadcast(self, array: _Array, root: int = 0, timeout: float | None = None) -> _Array:
        """All ranks get the root's array, in place."""

    def all_to_all(
        self,
        array: _Array,
        out: _Array,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> _Array:
        """Each rank gets its part of every rank's array. The counts are of elements, by rank; without
        them all parts have one length.
        """

    def send(self, array: _Array, to: int, timeout: float | None = None) -> None:
        """Sends a message. Returns when it has been received."""

    def receive(self, array: _Array, source: int, timeout: float | None = None) -> _Array:
        """Receives a message of as many elements as the array has."""

    def barrier(self, timeout: float | None = None) -> None:
        """Returns once all ranks have called it."""

    def abort(self, reason: str) -> None:
        """Fails all operations of all ranks, with this reason. May be called by another thread."""

    def close(self) -> None:
        """Leaves the group together with all ranks. As a context manager it does so at the end; after
        an exception it aborts instead.
        """

    def __enter__(self) -> Communicator: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

def command() -> str:
    """The path of the doorbell program in this package."""

@overload
def run(
    program: Callable[..., _Result], *arguments: Any, options: Sequence[str] = (), **kwargs: Any
) -> _Result: ...
@overload
def run(
    program: Sequence[str], *arguments: str, options: Sequence[str] = (), **kwargs: Any
) -> subprocess.CompletedProcess[Any]: ...
