#!/usr/bin/env bash
# The userspace device's own connection manager with the kernel's, which the stock programs of
# librdmacm use: connections from either side, with data, disconnected by either side; rejected and
# refused; datagram services from either side; IPv4 and IPv6.
# limit: 240
set -euo pipefail

soft() {
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups timeout 60 "$DOORBELL_BIN/connect" "$@"
}

# A stock server; our client retries until it listens.
connect() {
    local server=$1 pid
    shift
    echo "== $server: $*"
    timeout 60 $server > /tmp/server.log 2>&1 &
    pid=$!
    soft "$@" || { cat /tmp/server.log; return 1; }
    wait $pid || { cat /tmp/server.log; return 1; }
}

# Our server; a stock client, which must exit with the given status.
serve() {
    local client=$1 wanted=$2 status=0 pid
    shift 2
    echo "== $client: $*"
    soft "$@" > /tmp/server.log 2>&1 &
    pid=$!
    for _ in $(seq 100); do
        ! grep -q listening /tmp/server.log || break
        sleep 0.1
    done
    timeout 60 $client > /tmp/client.log 2>&1 || status=$?
    cat /tmp/client.log
    wait $pid || { cat /tmp/server.log; return 1; }
    [ "$status" -eq "$wanted" ] || { cat /tmp/server.log; return 1; }
}

connect "rdma_server -p 7471" 10.9.0.2 client 7471 10.9.0.1
connect "ucmatose -p 7472" 10.9.0.2 client 7472 10.9.0.1 10 100
connect "ucmatose -p 7472 -b fd09::1" fd09::2 client 7472 fd09::1 10 100
connect udaddy 10.9.0.2 ud-client 7174 10.9.0.1 10 100
connect "udaddy -b fd09::1" fd09::2 ud-client 7174 fd09::1 10 100
echo "== no listener"
soft 10.9.0.2 refused 7474 10.9.0.1

serve "rdma_client -s 10.9.0.2 -p 7471" 0 10.9.0.2 server 7471
# ucmatose's client waits for its server to disconnect.
serve "ucmatose -s 10.9.0.2 -p 7472" 0 10.9.0.2 hang-up 7472 10 100
serve "ucmatose -s fd09::2 -p 7472" 0 fd09::2 hang-up 7472 10 100
serve "udaddy -s 10.9.0.2" 0 10.9.0.2 ud-server 7174 10 100
serve "udaddy -s fd09::2" 0 fd09::2 ud-server 7174 10 100
# Two servers on one address: the first owns the UDP port and forwards requests and data for the second.
soft 10.9.0.2 hang-up 7472 10 100 > /tmp/first.log 2>&1 &
first=$!
for _ in $(seq 100); do
    ! grep -q listening /tmp/first.log || break
    sleep 0.1
done
serve "ucmatose -s 10.9.0.2 -p 7473" 0 10.9.0.2 hang-up 7473 10 100
timeout 60 ucmatose -s 10.9.0.2 -p 7472
wait $first || { cat /tmp/first.log; exit 1; }
# Rejected: the program prints the reason.
serve "rdma_client -s 10.9.0.2 -p 7471" 255 10.9.0.2 reject 7471
grep -qi refused /tmp/client.log
