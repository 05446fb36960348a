"""RDMA from Python: devices, communicators on arrays, and the doorbell command.

Neither the extension module nor NumPy is loaded before it is used.
"""

import os

__all__ = [
    "Communicator",
    "Device",
    "Error",
    "PeerFailed",
    "Rendezvous",
    "command",
    "open",
    "run",
]

_NATIVE = frozenset(__all__) - {"command", "run"}


def __getattr__(name):
    if name not in _NATIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from doorbell_rdma import _native

    globals().update((native, getattr(_native, native)) for native in _NATIVE)
    return globals()[name]


def __dir__():
    return sorted({*globals(), *__all__})


def command():
    """The path of the doorbell program in this package."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "doorbell")


def run(program, *arguments, options=(), **kwargs):
    """Runs a program, and its child processes, on a userspace device, as ``doorbell run`` does.

    A program is a list of words; this returns a ``subprocess.CompletedProcess``, and ``kwargs`` are
    those of ``subprocess.run``. Or it is a function that can be pickled, which is called with the
    arguments in a new Python, and whose result this returns. ``options`` are words for
    ``doorbell run``, as ``["--drop", "0.01"]``.
    """
    from doorbell_rdma import _run

    if callable(program):
        return _run.function(program, arguments, options, **kwargs)
    return _run.words([*program, *arguments], options, **kwargs)
