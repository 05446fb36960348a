#!/usr/bin/env bash
# The userspace device against the kernel's rxe over a wire that drops, duplicates and reorders
# packets both ways: each transport recovers from losses, and every byte is still right.
# limit: 240
set -euo pipefail

# By its path: the host's own modprobe, which has other modules, may precede it in PATH.
/run/doorbell/bin/modprobe sch_netem
trap 'tc qdisc del dev v0 root; ip netns exec peer tc qdisc del dev v1 root' EXIT
tc qdisc add dev v0 root netem loss 1% duplicate 1% delay 1ms reorder 2% 10%
ip netns exec peer tc qdisc add dev v1 root netem loss 1% duplicate 1% delay 1ms reorder 2% 10%

ip netns exec peer "$DOORBELL_BIN/interop" --device soft0 --address 10.9.0.2 --listen 10.9.0.2:7011 &
pid=$!
"$DOORBELL_BIN/interop" --device rxe0 --address 10.9.0.1 --connect 10.9.0.2:7011
wait $pid
tc -s qdisc show dev v0 | grep dropped
ip netns exec peer tc -s qdisc show dev v1 | grep dropped
