#!/usr/bin/env bash
# Shared receive queues between the userspace device and the kernel's rxe, both ways: several queue
# pairs on each, RC and UD, IPv4 and IPv6, every byte verified; messages that find the queue empty,
# the limit event, a queue pair that fails. 90-stock.sh runs the stock ibv_srq_pingpong.
# limit: 240
set -euo pipefail

soft() {
    local address=$1
    shift
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$DOORBELL_BIN/shared" --device soft0 --address "$address" "$@"
}

# Our program on both devices; each receives from the other.
both() {
    local soft=$1 rxe=$2 pid
    shift 2
    soft "$soft" "$@" --listen 10.9.0.2:7000 &
    pid=$!
    "$DOORBELL_BIN/shared" --device rxe0 --address "$rxe" "$@" --connect 10.9.0.2:7000
    wait $pid
}

for pair in "10.9.0.2 10.9.0.1" "fd09::2 fd09::1"; do
    for transport in rc ud; do
        both $pair --transport $transport
    done
done
