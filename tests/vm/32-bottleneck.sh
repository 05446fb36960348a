#!/usr/bin/env bash
# DCQCN with marks of the kernel: two userspace devices in the network namespaces `a` and `b`, and a
# router between them whose link to `b` is slow and has RED with ECN. Packets arrive marked, `b` returns
# CNPs, and `a` receives each. That the queue stays short is not to be seen in an emulator: packets
# of a link that it can fill are further apart than the 55 µs after which DCQCN increases the rate.
# limit: 240
set -euo pipefail

modprobe -a sch_red sch_tbf || true
for name in a r b; do
    ip netns add $name
    ip -n $name link set lo up
done
ip -n a link add a0 type veth peer name r0 netns r
ip -n b link add b0 type veth peer name r1 netns r
# The control connection has a link of its own, as RED drops what is not ECN-capable.
ip -n a link add a1 type veth peer name b1 netns b
for end in a:a0:10.8.1.2 r:r0:10.8.1.1 r:r1:10.8.2.1 b:b0:10.8.2.2 a:a1:10.8.3.1 b:b1:10.8.3.2; do
    IFS=: read -r name device address <<< "$end"
    ip -n $name address add "$address/24" dev "$device"
    # So that RED marks packets of the path MTU of 4096, not GSO runs.
    ip -n $name link set "$device" mtu 4200 gso_max_segs 1 up
done
ip -n a route add 10.8.2.0/24 via 10.8.1.1
ip -n b route add 10.8.1.0/24 via 10.8.2.1
ip netns exec r sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
# RED drops ARP too, so that an entry which has aged would cut the way back for CNPs and ACKs.
address_of() { ip -n "$1" link show "$2" | grep -oP 'link/ether \K\S+'; }
ip -n b neigh replace 10.8.2.1 lladdr "$(address_of r r1)" dev b0 nud permanent
ip -n r neigh replace 10.8.2.2 lladdr "$(address_of b b0)" dev r1 nud permanent
# The kernel's link watcher, which may run seconds later on a busy machine, makes ports active.
for end in a:a0 b:b0; do
    IFS=: read -r name device <<< "$end"
    until ip -n $name link show "$device" | grep -q 'state UP'; do sleep 0.1; done
done

# The link to `b`, of a rate in Mb/s, with an empty queue and counters of 0.
slow_link() {
    tc -n r qdisc del dev r1 root 2> /dev/null || true
    tc -n r qdisc add dev r1 root handle 1: tbf rate "$1mbit" burst 10000 limit 500000 &&
        tc -n r qdisc add dev r1 parent 1: handle 2: red limit 500000 min 30000 max 90000 avpkt 4200 burst 15 \
            bandwidth "$1mbit" ecn
}

# ib_write_bw in a namespace, with DCQCN: its address, its capture, further arguments. The ACK timeout
# of 8.6 s is beyond the delay of a full queue.
soft() {
    ip netns exec "$1" env DOORBELL_SOFT_ADDR="$2" DOORBELL_PCAP="/tmp/$1.pcap" DOORBELL_LINK=udp \
        DOORBELL_CONGESTION=dcqcn,line=400Mb,min=1Mb \
        bash -c 'exec -a ib_write_bw "$@"' - "$DOORBELL_BIN/doorbell" -d soft0 -n 25 -u 21 "${@:3}"
}

listens() {
    ip netns exec b grep -q ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6
}

marks=0
# The first of these that the emulator fills, whose speed depends on the machine's load.
for rate in 10 3; do
    if ! slow_link $rate; then
        echo "skipped: the kernel has no tbf or no red"
        exit 77
    fi
    rm -f /tmp/[ab].pcap
    soft b 10.8.2.2 &
    pid=$!
    while ! listens && kill -0 $pid; do sleep 0.1; done
    soft a 10.8.1.2 10.8.3.2
    wait $pid
    marks=$(tc -n r -s qdisc show dev r1 | grep -oP '\bmarked \K[0-9]+')
    [ "$marks" -eq 0 ] || break
done

# Packets of the capture of $1 that begin with a pattern: an IPv4 header with CE; a BTH with opcode,
# migrated, partition, BECN.
count() { LC_ALL=C grep -oaP "$2" "/tmp/$1.pcap" | wc -l; }
cnp='\x81\x40\xff\xff\x40'
received=$(count b '\x45\x03') sent=$(count b $cnp) back=$(count a $cnp)
echo "$rate Mb/s: $marks packets marked, $received received so; $sent CNPs sent, $back received"
[ "$marks" -gt 0 ] && [ "$received" -gt 0 ] && [ "$sent" -gt 0 ]
[ "$sent" -le "$received" ] && [ "$back" -gt 0 ] && [ "$back" -le "$sent" ]
