#!/usr/bin/env bash
# The stock ibv_rc_pingpong on the kernel's rxe with that of tests/rc_pingpong on the userspace
# device: either as the server, IPv4 and IPv6, contents verified.
# limit: 120
set -euo pipefail

gid() { grep -l "$1" /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename; }
ipv4=$(gid 0000:0000:0000:0000:0000:ffff:0a09:0001)
ipv6=$(gid fd09:0000:0000:0000:0000:0000:0000:0001)

ours() {
    local address=$1
    shift
    ip netns exec peer env DOORBELL_SOFT_ADDR="$address" "$DOORBELL_BIN/rc_pingpong" -d soft0 "$@"
}

# Waits until the pingpong's TCP port has a listener in the namespace of "$@".
listening() {
    for _ in $(seq 100); do
        ! "$@" grep -q ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6 || return 0
        sleep 0.1
    done
    echo "no server after 10 s"
    return 1
}

# Our server, the stock client.
serve() {
    local address=$1 index=$2
    shift 2
    ours "$address" "$@" &
    local pid=$!
    listening ip netns exec peer
    ibv_rc_pingpong -d rxe0 -g "$index" "$@" 10.9.0.2
    wait $pid
}

# The stock server, which checks contents; our client.
connect() {
    local address=$1 index=$2
    shift 2
    ibv_rc_pingpong -d rxe0 -g "$index" -c "$@" > /tmp/pingpong.log &
    local pid=$!
    listening
    ours "$address" "$@" 10.9.0.1
    wait $pid
    cat /tmp/pingpong.log
    ! grep -i invalid /tmp/pingpong.log
}

for role in serve connect; do
    $role 10.9.0.2 "$ipv4" -n 300
    $role fd09::2 "$ipv6" -s 100000 -n 100
done
