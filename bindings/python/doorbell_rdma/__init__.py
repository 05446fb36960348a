"""The doorbell command: RDMA tests, and a userspace RoCEv2 device for any program."""

import os

__all__ = ["command"]


def command():
    """The path of the doorbell program in this package."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "doorbell")
