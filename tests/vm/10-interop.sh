#!/usr/bin/env bash
# The userspace device against the kernel's rxe: every RC operation from either end, 0 B to 1 MiB
# and streams, IPv4 and IPv6, path MTU 1024 and 4096, every byte verified by both ends. The
# userspace device runs in the namespace `peer`, without any privilege.
# limit: 240
set -euo pipefail

interop() {
    local soft=$1 rxe=$2 mtu=$3 port=$4 pid
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$DOORBELL_BIN/interop" --device soft0 --address "$soft" --mtu "$mtu" --listen "10.9.0.2:$port" &
    pid=$!
    "$DOORBELL_BIN/interop" --device rxe0 --address "$rxe" --mtu "$mtu" --connect "10.9.0.2:$port"
    wait $pid
}

interop 10.9.0.2 10.9.0.1 1024 7001
interop fd09::2 fd09::1 1024 7002

ip link set v0 mtu 4200
ip -n peer link set v1 mtu 4200
interop 10.9.0.2 10.9.0.1 4096 7003
interop fd09::2 fd09::1 4096 7004
