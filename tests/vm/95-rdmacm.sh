#!/usr/bin/env bash
# The drop-in librdmacm against the kernel's rdma_cm on rxe: the same stock programs at both ends,
# either of them the server; connections and datagram services, IPv4 and IPv6; an end that is
# killed. The drop-in runs in the namespace `peer`, without any privilege.
# limit: 300
set -euo pipefail

# Runs a command on the drop-in at an address.
soft() {
    local address=$1
    shift
    ip netns exec peer setpriv --reuid 65534 --regid 65534 --clear-groups \
        timeout -s KILL 100 "$DOORBELL_BIN/doorbell" run --address "$address" -- "$@"
}

# Runs a command on rxe.
rxe() {
    timeout -s KILL 100 "$@"
}

# Runs a client until it succeeds: it is rejected while its server does not listen yet. After a
# server was reached and failed, this fails too.
reach() {
    local try
    for try in $(seq 15); do
        ! $1 > /tmp/client.log 2>&1 || return 0
        sleep 1
    done
    tail -n 20 /tmp/client.log
    return 1
}

# Waits until the namespace has a device: without one the kernel repeats its request after seconds.
device_is_up() {
    for _ in $(seq 100); do
        ! ip netns exec peer grep -q ":$(printf %04X 4791) " /proc/net/udp /proc/net/udp6 || return 0
        sleep 0.1
    done
    echo "no device after 10 s"
    return 1
}

# Runs a server and its client; both must succeed.
pair() {
    local server=$1 client=$2 pid
    $server > /tmp/server.log 2>&1 &
    pid=$!
    [[ $server != soft* ]] || device_is_up
    if reach "$client" && wait $pid; then
        echo "ok: $server / $client"
        return 0
    fi
    echo "failed: $server / $client"
    tail -n 20 /tmp/server.log
    return 1
}

# A program both ways: "$1" is the server's command, "$2" the client's, which ends with the server's address.
ways() {
    local server=$1 client=$2
    pair "soft 10.9.0.2 $server" "rxe $client 10.9.0.2"
    pair "rxe $server" "soft 10.9.0.2 $client 10.9.0.1"
}

ways "rping -s -v -V -C 20" "rping -c -v -V -C 20 -a"
ways "ucmatose -c 4 -C 20 -S 500" "ucmatose -c 4 -C 20 -S 500 -s"
ways "udaddy -c 3 -C 10" "udaddy -c 3 -C 10 -s"
ways "rdma_server" "rdma_client -s"
ways "ib_write_bw -R -F -n 100" "ib_write_bw -R -F -n 100"
ways "ib_send_lat -R -F -n 100" "ib_send_lat -R -F -n 100"

pair "soft fd09::2 rping -s -v -C 5 -a fd09::2" "rxe rping -c -v -C 5 -a fd09::2"
pair "rxe rping -s -v -C 5 -a fd09::1" "soft fd09::2 rping -c -v -C 5 -a fd09::1"

# No listener: the client reports so at once, with the reason.
refused() {
    ! "$@" &> /tmp/client.log
    grep -q 'RDMA_CM_EVENT_REJECTED, error 8' /tmp/client.log || { cat /tmp/client.log; return 1; }
}
refused soft 10.9.0.2 rping -c -C 5 -a 10.9.0.1 -p 7999
soft 10.9.0.2 rping -s -C 1 -a 10.9.0.2 -p 7998 &> /tmp/server.log &
pid=$!
device_is_up
refused rping -c -C 1 -a 10.9.0.2 -p 7999
reach "rxe rping -c -C 1 -a 10.9.0.2 -p 7998"
wait $pid
echo "ok: rejected without a listener"

# A client on rxe that is killed: the kernel disconnects for it, and the server exits. Nothing is
# killed before data is exchanged, as the server serves one connection alone. The server's status is
# not judged: rping's CQ thread, with a completion from before, may overwrite the state that its event
# thread has set on DISCONNECTED, and then it fails in spite of it.
soft 10.9.0.2 rping -s -C 1000000 > /tmp/server.log 2>&1 &
pid=$!
device_is_up
for _ in $(seq 15); do
    timeout -s KILL 100 stdbuf -oL rping -c -v -C 1000000 -a 10.9.0.2 &> /tmp/client.log &
    client=$!
    # It exits when it is rejected, as the server does not listen yet.
    while ! grep -q 'ping data' /tmp/client.log && kill -0 $client 2> /dev/null; do
        sleep 0.2
    done
    ! grep -q 'ping data' /tmp/client.log || break
    wait $client || true
    sleep 1
done
grep -q 'ping data' /tmp/client.log
# The client, whose parent timeout(1) is.
kill -9 $(pgrep -P $client)
wait $client || true
status=0
wait $pid || status=$?
if [ $status -eq 137 ] || ! grep -q 'DISCONNECT EVENT' /tmp/server.log; then
    echo "failed: the server ended with $status"
    tail -n 20 /tmp/server.log
    exit 1
fi
echo "ok: a killed client"
