#!/usr/bin/env bash
# Memory windows of types 1 and 2 between the userspace device and the kernel's rxe, bound by
# either: READ, WRITE and atomics through them; refused out of range, without the right, when
# unbound, rebound or invalidated by the owner or by a SEND of the peer; every byte verified.
# limit: 240
set -euo pipefail

for pair in "10.9.0.2 10.9.0.1" "fd09::2 fd09::1"; do
    read -r soft rxe <<<"$pair"
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$DOORBELL_BIN/windows" --device soft0 --address "$soft" --listen 10.9.0.2:7040 &
    pid=$!
    "$DOORBELL_BIN/windows" --device rxe0 --address "$rxe" --connect 10.9.0.2:7040
    wait $pid
done
