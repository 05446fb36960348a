#!/bin/sh
# Reads and writes files from and to the memory of GPU 0, on a machine with a GPU and without Rust:
# tests/gpu/storage.sh DOORBELL FOLDER [BYTES]. The command compares every byte with what read(2) gives, of
# each path, of blocks of several sizes, and of files whose length is no multiple of a block. Then
# it prints the table of figures, to stdout as text and to FOLDER/bw-file-*.json as JSON. cuFile's
# library, of DOORBELL_CUFILE_LIBRARY or the first below /usr, /opt and the folders of Python, is
# tried in its compatibility mode, too.
set -eu
doorbell=$1
folder=$2
# 1 GiB and 12345 bytes.
size=${3:-1073754169}
mkdir -p "$folder"
odd=$folder/odd.bin
served=
udev=
trap 'rm -f "$odd" $udev; [ -z "$served" ] || kill "$served"' EXIT
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
echo "== cuFile's library, in its compatibility mode where it has no better"
if [ -z "${DOORBELL_CUFILE_LIBRARY:-}" ] && ! ldconfig -p | grep -q 'libcufile\.so\.0'; then
    # shellcheck disable=SC2046
    found=$(find /usr /opt $(python3 -c 'import site; print(*site.getsitepackages())' 2>/dev/null || true) \
        -name libcufile.so.0 2>/dev/null | head -n 1)
    [ -z "$found" ] || export DOORBELL_CUFILE_LIBRARY="$found"
fi
# cuFile requires the database of udev, which containers lack: an entry for the disk, removed at the end.
entry=/run/udev/data/b$(findmnt -rno MAJ:MIN -T "$odd" | tail -n 1)
if [ ! -e "$entry" ] && mkdir -p /run/udev/data 2>/dev/null; then
    printf 'E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=%s\n' "$(findmnt -rno FSTYPE -T "$odd" | tail -n 1)" >"$entry" &&
        udev=$entry
    [ -e /run/udev/control ] || { : >/run/udev/control && udev="$udev /run/udev/control"; }
fi
echo "library: ${DOORBELL_CUFILE_LIBRARY:-of the loader}"
printf '{"properties": {"allow_compat_mode": true}, "logging": {"dir": "%s"}}\n' "$folder" >"$folder/cufile.json"
for set in "" CUFILE_FORCE_COMPAT_MODE=true "CUFILE_ENV_PATH_JSON=$folder/cufile.json"; do
    for options in "--block 1M --size $size" "--block 64K --depth 1 --size 1M"; do
        # shellcheck disable=SC2086
        if text=$(env $set "$doorbell" bw file --gpu 0 -n 1 --path cufile $options "$odd" 2>&1); then
            echo "ok: cufile $set $options: $(echo "$text" | grep '^# path')"
        elif echo "$text" | grep -q 'cannot load'; then
            echo "not here: $text"
        else
            echo "FAILED: cufile $set $options: $text"
            failed=1
        fi
    done
    # Without a choice of the user's, never the compatibility mode.
    # shellcheck disable=SC2086
    chosen=$(env $set "$doorbell" bw file --gpu 0 -n 1 --size 1M --no-write "$odd" | grep '^# ')
    if echo "$chosen" | grep -q compatibility.mode,; then
        echo "FAILED: chosen with $set: $chosen"
        failed=1
    fi
done

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

echo "== a file served by one process to another"
"$doorbell" bw file --serve --device soft0 --port 18517 "$odd" 2>"$folder/served.log" &
served=$!
for gpu in "" "--gpu 0"; do
    # shellcheck disable=SC2086
    "$doorbell" bw file --from 127.0.0.1 --device soft0 $gpu --beside "$odd" -n 5 odd.bin || failed=1
done
kill "$served"
served=
cat "$folder/served.log"

echo "== figures on tmpfs, which is of the bus' order of magnitude"
room=$(df --output=avail -k /dev/shm | tail -n 1)
# The command makes a file of four times the size.
bytes=$((room * 1024 / 5 / 4))
[ "$bytes" -lt 268435456 ] || bytes=268435456
for path in io_uring pread; do
    for block in 1M 4M; do
        "$doorbell" bw file --gpu 0 -n 7 --path $path --block $block --depth 16 --size $bytes /dev/shm || failed=1
    done
done

echo "== figures"
for memory in "--gpu 0" ""; do
    for path in auto cufile io_uring pread; do
        for block in 1M 4M; do
            [ "$path" != cufile ] || [ -n "$memory" ] || continue
            force=
            [ "$path" = auto ] || force="--path $path"
            # shellcheck disable=SC2086
            "$doorbell" bw file $memory $force --block $block --depth 16 -n 7 "$odd" ||
                [ "$path" = cufile ] || failed=1
        done
    done
done
# shellcheck disable=SC2086
"$doorbell" bw file --gpu 0 -n 9 --size 512M --json "$odd" >"$folder/bw-file-gpu.json"
"$doorbell" bw file -n 9 --size 512M --json "$odd" >"$folder/bw-file-host.json"
cat "$folder/bw-file-gpu.json" "$folder/bw-file-host.json"
exit $failed
