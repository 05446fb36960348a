#!/usr/bin/env bash
# UC and UD between the userspace device and the kernel's rxe: SENDs, and over UC RDMA WRITEs, from
# either end, of one packet and of several, IPv4 and IPv6, every byte verified; and with the stock
# ibv_uc_pingpong and ibv_ud_pingpong as either end.
# limit: 240
set -euo pipefail

gid() { grep -l "$1" /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename; }
ipv4=$(gid 0000:0000:0000:0000:0000:ffff:0a09:0001)
ipv6=$(gid fd09:0000:0000:0000:0000:0000:0000:0001)

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

# Waits until the pingpong's TCP port has a listener in the namespace of "$@".
listening() {
    for _ in $(seq 100); do
        ! "$@" cat /proc/net/tcp /proc/net/tcp6 | grep -q ":$(printf %04X 18515) .* 0A " || return 0
        sleep 0.1
    done
    echo "no server after 10 s"
    return 1
}

# The stock tool on rxe: as the server, which echoes, and as the client.
stock() {
    local transport=$1 soft=$2 index=$3 size=$4 pid
    "ibv_${transport}_pingpong" -d rxe0 -g "$index" -s "$size" -n 100 &
    pid=$!
    listening
    soft "$soft" --transport "$transport" --size "$size" --rounds 100 --connect 10.9.0.1:18515
    wait $pid
    soft "$soft" --transport "$transport" --size "$size" --rounds 100 --listen 10.9.0.2:18515 &
    pid=$!
    listening ip netns exec peer
    "ibv_${transport}_pingpong" -d rxe0 -g "$index" -s "$size" -n 100 10.9.0.2
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

stock uc 10.9.0.2 "$ipv4" 4096
stock uc fd09::2 "$ipv6" 4096
stock ud 10.9.0.2 "$ipv4" 1000
stock ud fd09::2 "$ipv6" 1000
