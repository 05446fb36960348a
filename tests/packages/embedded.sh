#!/bin/sh
# Runs programs with the libraries that are in the command.
#
# Usage: embedded.sh COMMAND
set -eu
doorbell=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Another user finds its way, but for what doorbell makes.
chmod 755 "$folder"
export HOME="$folder/home" TMPDIR="$folder/tmp" XDG_RUNTIME_DIR=
mkdir "$HOME" "$TMPDIR"

"$doorbell" bw write -n 1000

# The number of devices that a program has which knows nothing of doorbell.
devices='
import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.c_void_p
count = ctypes.c_int()
verbs.ibv_get_device_list(ctypes.byref(count))
print(count.value, __import__("os").listdir("/sys/class/infiniband"))'
python=$(PATH=/usr/bin:/bin:$PATH command -v python3)
test "$("$doorbell" run -- "$python" -c "$devices")" = "1 ['soft0']"
test "$(eval "$("$doorbell" env)" && "$python" -c "$devices")" = "1 ['soft0']"
rm -r "$TMPDIR"/doorbell-*

# It has no library of NCCL's API in it.
"$doorbell" run --nccl -- true 2> "$HOME/missing" && exit 1
test "$(wc -l < "$HOME/missing")" = 1
grep -q 'install the package doorbell-nccl' "$HOME/missing"
rm "$HOME/missing"

# What a killed command leaves is removed by the next.
"$doorbell" run -- sleep 600 &
until ls "$TMPDIR"/doorbell-run-*/libdoorbell_sysfs.so > /dev/null 2>&1; do sleep 0.1; done
kill -9 $!
wait $! || true
"$doorbell" run -- true
test -z "$(ls -A "$TMPDIR")"
test -z "$(ls -A "$HOME")"

if [ "$(id -u)" = 0 ]; then
    # Another user can load them too, whatever the umask.
    for mask in 000 077; do
        test "$(umask $mask && "$doorbell" run -- setpriv --reuid 65534 --regid 65534 --clear-groups "$python" -c "$devices")" = "1 ['soft0']"
    done
    # Where they cannot be loaded from, they are not unpacked.
    unshare --mount sh -euc '
        mount -t tmpfs -o noexec none "$TMPDIR"
        test "$("$0" run -- "$1" -c "$2")" = "1 ['"'soft0'"']"
        mount -o remount,bind,noexec /dev/shm
        "$0" run -- true 2> "$HOME/refused" && exit 1
        test $(wc -l < "$HOME/refused") = 1
        grep -q "mounted noexec.*set TMPDIR" "$HOME/refused"' "$doorbell" "$python" "$devices"
fi
