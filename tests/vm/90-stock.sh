#!/usr/bin/env bash
# Stock programs across the wire: one end on the kernel's rxe, the same program under `doorbell run` in the namespace `peer`, as an unprivileged user, at the
# other; each of them the server once, IPv4 and IPv6. What must come of it is in docs/STOCK.md.
# limit: 540
set -euo pipefail

"$DOORBELL_BIN/stock" wire --check docs/STOCK.md

# A watcher of asynchronous events hears of the wire that goes and comes back.
ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
    "$DOORBELL_BIN/doorbell" run --address 10.9.0.2 -- stdbuf -oL ibv_asyncwatch > /tmp/watch.log &
pid=$!
trap 'kill $pid' EXIT
# Waits until the watcher has said something.
says() {
    for _ in $(seq 100); do
        ! grep -q "$1" /tmp/watch.log || return 0
        sleep 0.1
    done
    cat /tmp/watch.log
    return 1
}
says 'async event FD'
ip -n peer link set v1 down
says IBV_EVENT_PORT_ERR
ip -n peer link set v1 up
says IBV_EVENT_PORT_ACTIVE
# The address of IPv6 went with the wire.
ip -n peer address replace fd09::2/64 dev v1 nodad
