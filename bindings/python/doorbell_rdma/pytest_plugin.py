"""``pytest --doorbell`` runs the tests, and the processes that they start, on a userspace RoCEv2 device.

The libraries of a process are chosen when it starts: so pytest starts again, under ``doorbell run``.
"""

import os
import shlex
import sys

import pytest

from doorbell_rdma import command


def pytest_addoption(parser):
    group = parser.getgroup("doorbell")
    group.addoption(
        "--doorbell",
        action="store_true",
        help="run the tests on a userspace RDMA device: pytest starts again under doorbell run",
    )
    group.addoption(
        "--doorbell-options",
        metavar="OPTIONS",
        help="the same, with options of doorbell run, as '--faults drop=0.01'",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config, parser, args):
    options = early_config.known_args_namespace
    wanted = options.doorbell or options.doorbell_options is not None
    # The command sets it for the programs that it runs.
    if not wanted or "DOORBELL_START" in os.environ:
        return
    capture = early_config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # Output has gone to files since pytest started.
        capture.suspend_global_capture(in_=True)
    program = command()
    run = [program, "run", *shlex.split(options.doorbell_options or ""), "--"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [*run, *_this_pytest(), *early_config.invocation_params.args])


def _this_pytest():
    """The command line that started it, without its arguments."""
    script = sys.argv[0]
    if os.path.basename(script) == "__main__.py":
        return [sys.executable, "-m", "pytest"]
    return [sys.executable, script]
