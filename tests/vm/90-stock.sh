#!/usr/bin/env bash
# Stock programs across the wire: one end on the kernel's rxe, the same program under `doorbell run`
# in the namespace `peer`, as an unprivileged user, at the other; each of them the server once, IPv4
# and IPv6. The expected results are in docs/STOCK.md.
# limit: 540
set -euo pipefail

"$DOORBELL_BIN/stock" wire --quick --check docs/STOCK.md

# ibv_asyncwatch reports the link going down and up.
ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
    "$DOORBELL_BIN/doorbell" run --address 10.9.0.2 -- stdbuf -oL ibv_asyncwatch > /tmp/watch.log &
pid=$!
trap 'kill $pid' EXIT
# Waits until the watcher has printed a string.
prints() {
    for _ in $(seq 100); do
        ! grep -q "$1" /tmp/watch.log || return 0
        sleep 0.1
    done
    cat /tmp/watch.log
    return 1
}
prints 'async event FD'
ip -n peer link set v1 down
prints IBV_EVENT_PORT_ERR
ip -n peer link set v1 up
prints IBV_EVENT_PORT_ACTIVE
# The IPv6 address was removed with the link.
ip -n peer address replace fd09::2/64 dev v1 nodad
