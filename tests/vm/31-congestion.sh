#!/usr/bin/env bash
# Congestion control with the kernel's rxe at the other end, which knows no CNPs: the userspace
# device reacts and marks what it sends, and rxe sends packets that are marked. Both go on; the CNPs
# are on the wire.
# limit: 120
set -euo pipefail

soft() {
    ip netns exec peer env DOORBELL_SOFT_ADDR=10.9.0.2 DOORBELL_CONGESTION=dcqcn DOORBELL_FAULTS=mark=0.5 \
        "$DOORBELL_BIN/doorbell" "$@"
}
ipv4=$(grep -l ffff:0a09:0001 /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename)

# Waits until the TCP port has a listener in the namespace of "$@".
listening() {
    for _ in $(seq 100); do
        ! "$@" grep -q ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6 || return 0
        sleep 0.1
    done
    echo "no server after 10 s"
    return 1
}

# Marked packets to rxe, ECT(0) and CE: it answers none.
"$DOORBELL_BIN/doorbell" bw write -d rxe0 --gid-index "$ipv4" --server --bind 10.9.0.1 -n 50 &
pid=$!
listening
soft bw write -d soft0 -n 50 10.9.0.1
wait $pid

# Marked packets from rxe, whose traffic class 3 is CE: CNPs, which it drops.
rm -f /tmp/cnp.pcap
ip netns exec peer env DOORBELL_SOFT_ADDR=10.9.0.2 DOORBELL_PCAP=/tmp/cnp.pcap \
    bash -c 'exec -a ib_write_bw "$0" -d soft0 -n 50' "$DOORBELL_BIN/doorbell" &
pid=$!
listening ip netns exec peer
ib_write_bw -d rxe0 -x "$ipv4" -n 50 -F --tclass=3 10.9.0.2
wait $pid
# Opcode, migrated, partition, BECN.
LC_ALL=C grep -qaP '\x81\x40\xff\xff\x40' /tmp/cnp.pcap
