#!/bin/sh
# Reads and writes files from and to the memory of GPU 0, on a machine with a GPU and without Rust:
# tests/gpu/storage.sh DOORBELL FOLDER [BYTES]. The command compares every byte with what read(2) gives, of
# each path, of blocks of several sizes, and of files whose length is no multiple of a block. Then
# it prints the table of figures, to stdout as text and to FOLDER/bw-file-*.json as JSON.
set -eu
doorbell=$1
folder=$2
# 1 GiB and 12345 bytes.
size=${3:-1073754169}
mkdir -p "$folder"
odd=$folder/odd.bin
trap 'rm -f "$odd"' EXIT
head -c "$size" /dev/urandom >"$odd"
sync
before=$(sha256sum <"$odd")

echo "== paths, on this file system and on tmpfs"
"$doorbell" gpu --storage "$odd"
head -c 65536 /dev/urandom >/dev/shm/$$
"$doorbell" gpu --storage /dev/shm/$$ || true
rm -f /dev/shm/$$
df -T "$folder" | tail -1
ls /proc/driver/nvidia-fs 2>/dev/null || echo "nvidia-fs is not loaded"

failed=0
for path in auto cufile io_uring pread; do
    for options in "--block 1M --depth 16" "--block 64K --depth 1" "--block 8M --depth 4" "--size $size"; do
        force=
        [ "$path" = auto ] || force="--path $path"
        # shellcheck disable=SC2086
        if text=$("$doorbell" bw file --gpu 0 -n 1 $force $options "$odd" 2>&1); then
            echo "ok: $path $options"
        elif [ "$path" = cufile ] && echo "$text" | grep -q 'cufile is forced, and refused'; then
            echo "not here: $text"
            break
        else
            echo "FAILED: $path $options: $text"
            failed=1
        fi
    done
done
[ "$before" = "$(sha256sum <"$odd")" ] || { echo "FAILED: the file has changed"; failed=1; }

echo "== figures"
for memory in "--gpu 0" ""; do
    for path in auto io_uring pread; do
        for block in 1M 4M; do
            force=
            [ "$path" = auto ] || force="--path $path"
            # shellcheck disable=SC2086
            "$doorbell" bw file $memory $force --block $block --depth 16 -n 7 "$odd" || failed=1
        done
    done
done
# shellcheck disable=SC2086
"$doorbell" bw file --gpu 0 -n 9 --size 512M --json "$odd" >"$folder/bw-file-gpu.json"
"$doorbell" bw file -n 9 --size 512M --json "$odd" >"$folder/bw-file-host.json"
cat "$folder/bw-file-gpu.json" "$folder/bw-file-host.json"
exit $failed
