"""Programs and functions under ``doorbell run``."""

import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import tempfile

from doorbell_rdma import command

_CALL = "import sys; sys.path.insert(0, sys.argv.pop(1)); from doorbell_rdma import _run; _run.called(sys.argv[1])"
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def words(program, options, **kwargs):
    return subprocess.run([command(), "run", *options, "--", *program], **kwargs)


def function(function, arguments, options, **kwargs):
    # What the start method `spawn` passes: the module that __main__ is, and the paths.
    preparation = multiprocessing.spawn.get_preparation_data("doorbell")
    # For connections between processes, of which there are none; it cannot be pickled.
    preparation.pop("authkey")
    with tempfile.TemporaryDirectory(prefix="doorbell-call-") as folder:
        with open(os.path.join(folder, "call"), "wb") as call:
            pickle.dump(preparation, call)
            pickle.dump((function, arguments), call)
        ended = words([sys.executable, "-c", _CALL, _PACKAGES, folder], options, **kwargs)
        try:
            with open(os.path.join(folder, "result"), "rb") as file:
                result, error = pickle.load(file)
        except (FileNotFoundError, EOFError):
            raise subprocess.CalledProcessError(ended.returncode, "doorbell run") from None
    if error is not None:
        raise error
    return result


def called(folder):
    """Calls the function, in the process under ``doorbell run``."""
    with open(os.path.join(folder, "call"), "rb") as call:
        multiprocessing.spawn.prepare(pickle.load(call))
        function, arguments = pickle.load(call)
    try:
        outcome = (function(*arguments), None)
    except Exception as error:
        outcome = (None, error)
    with open(os.path.join(folder, "result"), "wb") as file:
        pickle.dump(outcome, file)
