#!/usr/bin/env bash
# Shared receive queues between the userspace device and the kernel's rxe, both ways: several queue
# pairs on each, RC and UD, IPv4 and IPv6, every byte verified; messages that find the queue empty,
# the limit event, a queue pair that fails; and with the stock ibv_srq_pingpong as either end.
# limit: 240
set -euo pipefail

gid() { grep -l "$1" /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename; }
ipv4=$(gid 0000:0000:0000:0000:0000:ffff:0a09:0001)
ipv6=$(gid fd09:0000:0000:0000:0000:0000:0000:0001)

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

# Waits until the pingpong's TCP port has a listener in the namespace of "$@".
listening() {
    for _ in $(seq 100); do
        ! "$@" cat /proc/net/tcp /proc/net/tcp6 | grep -q ":$(printf %04X 18515) .* 0A " || return 0
        sleep 0.1
    done
    echo "no server after 10 s"
    return 1
}

# The stock tool on rxe, as the server and as the client.
stock() {
    local soft=$1 index=$2 pid
    ibv_srq_pingpong -d rxe0 -g "$index" -n 400 &
    pid=$!
    listening
    soft "$soft" --transport rc --qps 16 --stock 400 --connect 10.9.0.1:18515
    wait $pid
    soft "$soft" --transport rc --qps 16 --stock 400 --listen 10.9.0.2:18515 &
    pid=$!
    listening ip netns exec peer
    ibv_srq_pingpong -d rxe0 -g "$index" -n 400 10.9.0.2
    wait $pid
}

for pair in "10.9.0.2 10.9.0.1" "fd09::2 fd09::1"; do
    for transport in rc ud; do
        both $pair --transport $transport
    done
done

stock 10.9.0.2 "$ipv4"
stock fd09::2 "$ipv6"
