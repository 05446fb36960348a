#!/usr/bin/env bash
# UC and UD between the userspace device and the kernel's rxe: SENDs, and over UC RDMA WRITEs, from
# either end, of one packet and of several, IPv4 and IPv6, every byte verified. 90-stock.sh runs
# the stock ibv_uc_pingpong and ibv_ud_pingpong.
# limit: 240
set -euo pipefail

soft() {
    local address=$1
    shift
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$DOORBELL_BIN/unreliable" --device soft0 --address "$address" "$@"
}

rxe() {
    local address=$1
    shift
    "$DOORBELL_BIN/unreliable" --device rxe0 --address "$address" "$@"
}

# Our program on both devices; each is once the client, whose messages are echoed.
both() {
    local soft=$1 rxe=$2 pid
    shift 2
    soft "$soft" "$@" --listen 10.9.0.2:7000 &
    pid=$!
    rxe "$rxe" "$@" --connect 10.9.0.2:7000
    wait $pid
    rxe "$rxe" "$@" --listen 10.9.0.1:7000 &
    pid=$!
    soft "$soft" "$@" --connect 10.9.0.1:7000
    wait $pid
}

for pair in "10.9.0.2 10.9.0.1" "fd09::2 fd09::1"; do
    for size in 1 1023 1024; do
        both $pair --transport ud --size $size
    done
    for size in 1 1024 1025 10003; do
        both $pair --transport uc --size $size
        both $pair --transport uc --size $size --write yes
    done
done
