#!/usr/bin/env bash
# The guest's environment that the other scripts rely on: rxe0 is up in both address families, the
# stock tools reach it over themselves, the namespace `peer` is at the other end of the wire, and an
# unprivileged user can use RDMA. None of our programs run here.
# limit: 180
set -euo pipefail

uname -srv
[ "$(cat /sys/class/infiniband/rxe0/ports/1/state)" = "4: ACTIVE" ]
# The GID table's index of an address, as the kernel prints it there.
gid() { grep -l "$1" /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename; }
ipv4=$(gid 0000:0000:0000:0000:0000:ffff:0a09:0001)
ipv6=$(gid fd09:0000:0000:0000:0000:0000:0000:0001)

# Runs a server, then the client until it reaches the server; both must succeed.
pair() {
    local server=$1 client=$2 pid try
    $server > /tmp/server.log 2>&1 &
    pid=$!
    for try in $(seq 50); do
        # State 0A in the kernel's table is LISTEN.
        ! grep -qi ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6 || break
        sleep 0.1
    done
    $client || { cat /tmp/server.log; return 1; }
    wait $pid || { cat /tmp/server.log; return 1; }
}

for index in "$ipv4" "$ipv6"; do
    pair "ibv_rc_pingpong -d rxe0 -g $index -n 100 -c" "ibv_rc_pingpong -d rxe0 -g $index -n 100 -c 10.9.0.1"
    pair "ib_write_bw -d rxe0 -x $index -n 100 -F" "ib_write_bw -d rxe0 -x $index -n 100 -F 10.9.0.1"
done
pair "ib_read_lat -d rxe0 -x $ipv4 -n 100 -F" "ib_read_lat -d rxe0 -x $ipv4 -n 100 -F 10.9.0.1"

# The MTU follows the wire's.
ip link set v0 mtu 4200
ip -n peer link set v1 mtu 4200
ibv_devinfo -d rxe0 | grep 'active_mtu.*4096'

setpriv --reuid 65534 --regid 65534 --clear-groups bash -c 'ulimit -l; ibv_devinfo -d rxe0 > /dev/null'
ip netns exec peer bash -c 'exec 3<> /dev/udp/10.9.0.1/9 && echo "peer has a route to us"'
ip -n peer address show dev v1 | grep -q 'inet 10.9.0.2/24'
ip -n peer address show dev v1 | grep -q 'inet6 fd09::2/64'
