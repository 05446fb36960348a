#!/usr/bin/env bash
# `doorbell coll` on the kernel's rxe: every operation among three ranks, with each protocol; also
# with ranks on the userspace device at the other end of the wire, which loses packets. Every result
# is checked on every rank.
# limit: 300
set -euo pipefail

# The command's one JSON object must report no errors, out of place and in place, and the link.
right() {
    [ "$(wc -l < /tmp/result.json)" -eq 1 ]
    grep -q "\"link\":\"$1\".*\"results\":\[{" /tmp/result.json || { cat /tmp/result.json; return 1; }
    ! grep -q '"wrong":[1-9n]' /tmp/result.json || { cat /tmp/result.json; return 1; }
}
coll() {
    echo "== coll $*"
    timeout 120 "$DOORBELL_BIN/doorbell" coll "$@" -n 2 -w 1 --deadline 60s --json > /tmp/result.json
    right kernel-soft
}

coll allreduce --ranks 3 --device rxe0 -b 40 -e 40000 -f 1000
# Measuring the costs takes most of the time of an emulated processor.
export DOORBELL_CALIBRATE=no
for operation in allgather reduce-scatter broadcast reduce gather scatter alltoall alltoallv sendrecv barrier; do
    coll $operation --ranks 3 --device rxe0 -b 40 -e 40000 -f 1000
done
for protocol in simple ll ll128; do
    coll allreduce --ranks 4 --device rxe0 -b 1000 -e 1000 -d bf16 --protocol $protocol
done

# Rank 0 is on rxe, the others on the userspace device at the other end of the wire; rendezvous by torchrun's variables.
launched() {
    env RANK="$1" WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 DOORBELL_SOFT_ADDR=10.9.0.2 \
        timeout 120 "$DOORBELL_BIN/doorbell" coll "${@:3}" --device "$2" -n 2 -w 1 --deadline 60s --json
}
mixed() {
    local pids=() rank pid
    echo "== coll rxe0 with soft0 $*"
    for rank in 1 2; do
        ip netns exec peer bash -c "$(declare -f launched); launched \"\$@\"" launched $rank soft0 "$@" &
        pids+=($!)
    done
    launched 0 rxe0 "$@" > /tmp/result.json
    for pid in "${pids[@]}"; do wait "$pid"; done
    right soft-udp
}
for operation in allreduce alltoall; do
    mixed $operation -b 40 -e 40000 -f 1000
done

# On the wire alone, as rxe reaches itself without a packet on any interface.
/run/doorbell/bin/modprobe sch_netem
trap 'tc qdisc del dev v0 root; ip netns exec peer tc qdisc del dev v1 root' EXIT
tc qdisc add dev v0 root netem loss 2%
ip netns exec peer tc qdisc add dev v1 root netem loss 2%
for protocol in simple ll128; do
    mixed allreduce -b 40000 -e 40000 --protocol $protocol
done
tc -s qdisc show dev v0 | grep dropped
ip netns exec peer tc -s qdisc show dev v1 | grep dropped
