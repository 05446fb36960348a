"""PyTorch's own tests of torch.distributed, which its wheel has, on one of its backends.

    python pytorch.py [--backend NAME] [--ranks N] [--full] [--log FILE] [TEST...]

For tensors of the CPU: those that PyTorch runs on gloo, and those of all_to_all that it runs on MPI alone.
Without --full a sample. Prints each with its result, and last the counts. Exit status 1: a test has failed
that FAIL does not name, or one passes that it names.
"""

import argparse
import collections
import importlib.util
import os
import sys
import tempfile
import time
import unittest

NO_SOURCE = "a message is received from a rank that is named: NCCL has no other either"
NOT_WRAPPED = "PyTorch takes only backends for it that it wraps in a group of its own; ours is the group"
OTHER_TEXT = "it matches the text of gloo's error; ours names the missing rank"
FAIL = {
    "doorbell": {
        "test_barrier_timeout_full_group": OTHER_TEXT,
        "test_barrier_timeout_group": OTHER_TEXT,
        "test_monitored_barrier_failure_order": NOT_WRAPPED,
        "test_monitored_barrier_gloo": NOT_WRAPPED,
        "test_monitored_barrier_gloo_rank_0_timeout": NOT_WRAPPED,
        "test_monitored_barrier_gloo_subgroup": NOT_WRAPPED,
        "test_monitored_barrier_wait_all_ranks": NOT_WRAPPED,
        "test_send_recv_any_source": NO_SOURCE,
        "test_send_recv_any_source_autograd_profiler": NO_SOURCE,
        "test_send_recv_any_source_torch_profiler": NO_SOURCE,
        "test_sparse_all_reduce_sum": "elements of sparse tensors are not one after the other",
    },
    "gloo": dict.fromkeys(
        ["test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"],
        "gloo has no all_to_all of lists",
    ),
}

SAMPLE = """
    DistributedDataParallelCPU accumulate_gradients_no_sync all_gather all_gather_coalesced_simple all_gather_complex
    all_gather_object_default_pg all_reduce_coalesced_sum all_reduce_complex_unsupported_ops
    all_reduce_full_group_max all_reduce_group_min all_reduce_product all_reduce_sum all_reduce_sum_async all_to_all
    all_to_all_single_equal_split all_to_all_single_unequal_split_group all_to_all_single_unequal_split barrier
    barrier_group batch_isend_irecv_gloo batch_isend_irecv_gloo_tags broadcast broadcast_full_group destroy_group gather
    gather_group irecv isend isend_autograd_profiler get_backend new_subgroups_with_group_param reduce_full_group_sum
    reduce_product reduce_scatter scatter scatter_complex scatter_object_list send_recv send_recv_with_tag
    """.split()


def tests_as_for(backend, tested, processes):
    """PyTorch's class of tests, without those that are not for this backend; for the one that is tested."""
    os.environ["BACKEND"] = backend
    origin = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test").origin
    found = importlib.util.spec_from_file_location(f"tests_as_for_{backend}", origin)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # The others do different things for the few backends that they know.
            module.BACKEND = tested if self._testMethodName == "test_get_backend" else backend
            self._start_processes(processes)

    return Tests


def chosen(options):
    """One test case for each test."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    if options.backend == "doorbell":
        # PyTorch finds it by itself where the package is installed, which it is not here.
        from doorbell_rdma.torch import register

        register()
    torch.set_num_threads(1)
    # The groups that it is for have ranks 1 and 2.
    common_distributed.skip_if_small_worldsize = lambda test: test
    common_distributed.get_timeout = lambda _: 120
    for feature in "ddp", "subgroup":
        common_distributed.DistTestCases.backend_feature[feature].add("mpi")
    # Not spawned, as PyTorch's own runner does: each would import PyTorch again.
    processes = torch.multiprocessing.get_context("fork").Process
    of_gloo, of_mpi = (tests_as_for(backend, options.backend, processes) for backend in ("gloo", "mpi"))
    os.environ["BACKEND"] = options.backend
    initialize = dist.init_process_group
    dist.init_process_group = lambda **given: initialize(**{**given, "backend": options.backend})

    def is_left_out(tests, name):
        return getattr(getattr(tests, name), "__unittest_skip__", False)

    names = unittest.TestLoader().getTestCaseNames(of_gloo)
    wanted = options.tests or ([] if options.full else [f"test_{name}" for name in SAMPLE])
    for name in names if not wanted else [name for name in names if name in wanted]:
        tests = of_mpi if is_left_out(of_gloo, name) and not is_left_out(of_mpi, name) else of_gloo
        yield tests(name)


class Result(unittest.TestResult):
    """Prints each result, and counts."""

    def __init__(self, printed, fail):
        super().__init__()
        self.printed = printed
        self.fail = fail
        self.counts = collections.Counter()

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def say(self, result, test, reason):
        self.counts[result] += 1
        took = time.monotonic() - self.began
        print(f"{result:<8} {took:5.1f} s {test._testMethodName}{reason and ': '}{reason}", file=self.printed)

    def addSuccess(self, test):
        is_wrong = test._testMethodName in self.fail
        self.say("FAILED" if is_wrong else "passed", test, "expected to fail, and passes" if is_wrong else "")

    def addSkip(self, test, reason):
        self.say("skipped", test, reason)

    def addError(self, test, error):
        reason = self.fail.get(test._testMethodName)
        self.say("FAILED" if reason is None else "failed", test, reason or self._exc_info_to_string(error, test))

    addFailure = addError


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="doorbell")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    options = parser.parse_args()
    # What the ranks print goes elsewhere.
    printed = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result = Result(printed, FAIL.get(options.backend, {}))
    with tempfile.TemporaryDirectory(prefix="doorbell-pytorch-") as folder:
        os.environ.update(WORLD_SIZE=str(options.ranks), TEMP_DIR=folder, GLOO_SOCKET_IFNAME="lo")
        for test in chosen(options):
            test.run(result)
    counts = result.counts
    print(
        f"{options.backend}, {options.ranks} ranks: {counts['passed']} of {result.testsRun} pass, {counts['failed']} fail "
        f"as expected, {counts['FAILED']} fail, {counts['skipped']} are skipped",
        file=printed,
    )
    return 1 if counts["FAILED"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
