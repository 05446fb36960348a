"""``pytest --doorbell`` runs the tests, and the processes that they start, on a userspace RoCEv2 device.

The libraries of a process are chosen when it starts: so pytest starts again, under ``doorbell run``.
"""

import os
import shlex
import sys

import pytest

from doorbell_rdma import command

# The options with which pytest has started again, for it and what it starts.
STARTED_WITH = "DOORBELL_PYTEST_OPTIONS"


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
    wanted = early_config.known_args_namespace
    options = wanted.doorbell_options
    if options is None:
        # The command sets the variable for the programs that it runs.
        if not wanted.doorbell or "DOORBELL_START" in os.environ:
            return
    elif os.environ.get(STARTED_WITH) == options:
        return
    else:
        # Under doorbell run too: that of these options is then the inner one.
        os.environ[STARTED_WITH] = options
    capture = early_config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # Output has gone to files since pytest started.
        capture.suspend_global_capture(in_=True)
    program = command()
    run = [program, "run", *shlex.split(options or ""), "--"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [*run, *_this_pytest(), *early_config.invocation_params.args])


def _this_pytest():
    """The command line that started it, without its arguments."""
    script = sys.argv[0]
    if os.path.basename(script) == "__main__.py":
        return [sys.executable, "-m", "pytest"]
    return [sys.executable, script]
