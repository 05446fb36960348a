#!/usr/bin/env bash
# The tests of the collectives executor on the kernel's rxe, all ranks on it. And communicators with
# a rank on rxe and two on the userspace device at the other end of the wire, which loses packets:
# every collective by every algorithm, before and after one rank is killed.
# limit: 300
set -euo pipefail

DOORBELL_COLLECTIVES_DEVICE=rxe0 "$DOORBELL_TEST_EXECUTOR" --test-threads 1 two_ranks three_ranks four_ranks types:: overlap:: never_begins an_abort a_dropped_rank

# On the wire alone, as rxe reaches itself without a packet on any interface.
/run/doorbell/bin/modprobe sch_netem
trap 'tc qdisc del dev v0 root; ip netns exec peer tc qdisc del dev v1 root' EXIT
tc qdisc add dev v0 root netem loss 2%
ip netns exec peer tc qdisc add dev v1 root netem loss 2%

# Rendezvous by torchrun's variables. Its connections lose packets, too.
ranked() {
    env RANK="$1" WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=10.9.0.1 MASTER_PORT=29600 DOORBELL_SOFT_ADDR=10.9.0.2 DOORBELL_COLLECTIVES_DEVICE="$2" \
        timeout 200 "$DOORBELL_TEST_COMMUNICATOR" --exact --ignored --nocapture wire::a_rank_does_every_collective_and_goes_on_when_another_is_killed
}
pids=()
for rank in 1 2; do
    ip netns exec peer bash -c "$(declare -f ranked); ranked \"\$@\"" ranked $rank soft0 &
    pids+=($!)
done
ranked 0 rxe0
wait "${pids[0]}"
# Killed by itself: 128 and the signal.
wait "${pids[1]}" && exit 1 || [ $? -eq 137 ]
tc -s qdisc show dev v0 | grep dropped
ip netns exec peer tc -s qdisc show dev v1 | grep dropped
