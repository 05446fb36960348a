#!/usr/bin/env bash
# DCQCN with marks of the kernel's own: two userspace devices in network namespaces `a` and `b`, with
# a router between them whose link to `b` is slower and has RED with ECN. First without control, though
# ECN-capable (the traffic class is ECT(0)): the queue fills up and drops. Then with DCQCN: marks are
# received, CNPs returned and handled, the rate is reduced, and the queue stays short. Times and rates
# are the emulator's; only both runs are compared.
# limit: 300
set -euo pipefail

modprobe sch_red && modprobe sch_tbf || true
rate=50mbit
limit=1000000

for name in a r b; do
    ip netns add $name
    ip -n $name link set lo up
done
ip -n a link add a0 type veth peer name r0 netns r
ip -n b link add b0 type veth peer name r1 netns r
# The control connection has a link of its own, as the queue drops it, too.
ip -n a link add a1 type veth peer name b1 netns b
for end in a:a0:10.8.1.2 r:r0:10.8.1.1 r:r1:10.8.2.1 b:b0:10.8.2.2 a:a1:10.8.3.1 b:b1:10.8.3.2; do
    IFS=: read -r name device address <<< "$end"
    ip -n $name address add "$address/24" dev "$device"
    # RED is to mark packets of the path MTU of 4096, not segments of GSO by the dozen.
    ip -n $name link set "$device" mtu 4200 gso_max_segs 1 up
done
ip -n a route add 10.8.2.0/24 via 10.8.1.1
ip -n b route add 10.8.1.0/24 via 10.8.2.1
ip netns exec r sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
if ! tc -n r qdisc add dev r1 root handle 1: tbf rate $rate burst 10000 limit $limit ||
    ! tc -n r qdisc add dev r1 parent 1: handle 2: red limit $limit min 30000 max 90000 avpkt 4200 burst 15 \
        bandwidth $rate ecn; then
    echo "skipped: this kernel has no tbf or no red"
    exit 0
fi

# The statistics of RED: $1 is what a name precedes, as `marked 12`.
red() { tc -n r -s qdisc show dev r1 | sed -n '/^qdisc red/,$p' | grep -oP "\b$1 \K[0-9]+" | head -1; }

# A write test of the seconds $1 from `a` to `b`, with the congestion control $2 and the traffic class
# $3; prints drops, marks, and the mean and the maximum of the queue in bytes.
run() {
    local before after pid client samples=0 sum=0 max=0 queue
    before="$(red dropped) $(red marked)"
    rm -f /tmp/a.pcap /tmp/b.pcap
    ip netns exec b env DOORBELL_SOFT_ADDR=10.8.2.2 DOORBELL_CONGESTION="$2" DOORBELL_PCAP=/tmp/b.pcap \
        bash -c 'exec -a ib_write_bw "$0" -d soft0 -D "$1" --tclass="$2"' "$DOORBELL_BIN/doorbell" "$1" "$3" > /tmp/server.log 2>&1 &
    pid=$!
    for _ in $(seq 100); do
        ! ip netns exec b grep -q ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6 || break
        sleep 0.1
    done
    ip netns exec a env DOORBELL_SOFT_ADDR=10.8.1.2 DOORBELL_CONGESTION="$2" DOORBELL_PCAP=/tmp/a.pcap \
        bash -c 'exec -a ib_write_bw "$0" -d soft0 -D "$1" --tclass="$2" 10.8.3.2' "$DOORBELL_BIN/doorbell" "$1" "$3" > /tmp/client.log 2>&1 &
    client=$!
    while kill -0 $client 2> /dev/null; do
        queue=$(red backlog)
        samples=$((samples + 1)) sum=$((sum + queue))
        [ "$queue" -le $max ] || max=$queue
    done
    wait $client || { cat /tmp/client.log /tmp/server.log >&2; exit 1; }
    wait $pid || { cat /tmp/server.log >&2; exit 1; }
    after="$(red dropped) $(red marked)"
    cat /tmp/client.log >&2
    tc -n r -s qdisc show dev r1 >&2
    echo "$((${after% *} - ${before% *})) $((${after#* } - ${before#* })) $((sum / samples)) $max"
}

# Packets of a capture that match.
count() { LC_ALL=C grep -oaP "$1" "$2" | wc -l; }

read -r off_drops off_marks off_mean off_max <<< "$(run 5 none 2)"
echo "none:  $off_drops drops, $off_marks marks, queue of $off_mean bytes in the mean, $off_max at most"
read -r drops marks mean max <<< "$(run 5 dcqcn,line=400Mb,min=5Mb 0)"
echo "dcqcn: $drops drops, $marks marks, queue of $mean bytes in the mean, $max at most"
# IPv4 with traffic class 3; opcode, migrated, partition, BECN.
echo "CE at b: $(count '\x45\x03' /tmp/b.pcap), CNPs at b and a: $(count '\x81\x40\xff\xff\x40' /tmp/b.pcap), $(count '\x81\x40\xff\xff\x40' /tmp/a.pcap)"
