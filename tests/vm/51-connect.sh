#!/usr/bin/env bash
# The userspace device's own connection manager with the kernel's, which the stock programs of librdmacm use: connections from either side, with data, disconnected by either; rejected and
# refused by either; datagram services from either side; IPv4 and IPv6.
# limit: 240
set -euo pipefail

soft() {
    local address=$1
    shift
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups "$DOORBELL_BIN/connect" "$address" "$@"
}

# Waits until a service of that name listens: one of the kernel's manager is seen nowhere, so for the clients of stock programs, which give up at once, ours says so.
both() {
    local server=$1 client=$2 pid
    echo "== $server, $client"
    $server > /tmp/server.log 2>&1 &
    pid=$!
    $client || { cat /tmp/server.log; return 1; }
    wait $pid || { cat /tmp/server.log; return 1; }
}

# Our client asks until the server listens.
both "rdma_server -p 7471" "soft 10.9.0.2 client 7471 10.9.0.1"
both "ucmatose -p 7472" "soft 10.9.0.2 client 7472 10.9.0.1 10 100"
both "ucmatose -p 7472 -b fd09::1" "soft fd09::2 client 7472 fd09::1 10 100"
both "udaddy -p 7473" "soft 10.9.0.2 ud-client 7473 10.9.0.1 10 100"
soft 10.9.0.2 refused 7474 10.9.0.1
