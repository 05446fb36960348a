#!/bin/sh
# Installs the wheel in a fresh environment of a Python, runs the command, the tests of the package, and tests
# under the pytest plugin.
#
# Usage: wheel.sh PYTHON WHEEL
set -eu
python=$1 wheel=$2
tests=$(cd "$(dirname "$0")/../../bindings/python/tests" && pwd)
export PYTHONDONTWRITEBYTECODE=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
"$bin/pip" install --quiet --disable-pip-version-check "$wheel" pytest numpy

test "$("$bin/doorbell" --version)" = "$("$bin/python" -m doorbell_rdma --version)"
"$bin/doorbell" bw write -n 1000
"$bin/doorbell" run --nccl -- grep -q /libdoorbell_nccl.so /proc/self/maps
"$bin/pytest" --quiet -p no:cacheprovider "$tests"
# As PyTorch finds the backend; it would call it.
"$bin/python" - <<'ENTRY'
from importlib.metadata import distribution

[entry] = [entry for entry in distribution("doorbell-rdma").entry_points if entry.group == "torch.backends"]
assert callable(entry.load())
ENTRY

cat > "$folder/test_device.py" <<'TEST'
import ctypes
import subprocess
import sys

COUNT = """
import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.c_void_p
count = ctypes.c_int()
verbs.ibv_get_device_list(ctypes.byref(count))
print(count.value)
"""


def test_a_process_has_the_device():
    assert subprocess.check_output([sys.executable, "-c", COUNT]).split() == [b"2"]


def test_output_is_captured(capfd):
    print("captured")
    assert capfd.readouterr().out == "captured\n"
TEST
cd "$folder"
for pytest in "$bin/pytest" "$bin/python -m pytest"; do
    # shellcheck disable=SC2086 # words
    $pytest --quiet --doorbell-options '--rails 2' test_device.py
done
# They count under doorbell run as well, whose device is then another one.
"$bin/doorbell" run -- "$bin/pytest" --quiet --doorbell-options '--rails 2' test_device.py
# Without the device that test fails, whatever the machine has; and its status is pytest's.
status=0
"$bin/pytest" --quiet --doorbell test_device.py > "$folder/one" || status=$?
test "$status" = 1
grep -q '1 failed, 1 passed' "$folder/one"
"$bin/pip" uninstall --quiet --yes doorbell-rdma
test ! -e "$bin/doorbell"
