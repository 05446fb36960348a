#!/bin/sh
# Installs the command by cargo, and runs a program with the libraries that are in it.
#
# Usage: install.sh SOURCES
set -eu
sources=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cargo install --quiet --locked --path "$sources/bindings/cli" --root "$folder/root" --target-dir "$sources/target/install"
export HOME="$folder/home" XDG_CACHE_HOME=
mkdir "$HOME"
doorbell=$folder/root/bin/doorbell
"$doorbell" bw write -n 1000
test ! -e "$HOME/.cache"
devices() {
    "$doorbell" run -- python3 -c '
import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.c_void_p
count = ctypes.c_int()
verbs.ibv_get_device_list(ctypes.byref(count))
print(count.value, __import__("os").listdir("/sys/class/infiniband"))'
}
test "$(devices)" = "1 ['soft0']"
test "$(devices)" = "1 ['soft0']"
test "$(find "$HOME/.cache/doorbell" -name '*.so' -perm 500 | wc -l)" = 2
test -z "$(find "$HOME/.cache/doorbell" -type d ! -perm 700)"
# A file that was changed is written anew, not loaded.
library=$(find "$HOME/.cache/doorbell" -name libdoorbell_dropin.so)
rm "$library"
echo changed > "$library"
test "$(devices)" = "1 ['soft0']"
