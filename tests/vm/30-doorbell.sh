#!/usr/bin/env bash
# The command on the kernel's rxe through the system's libibverbs: bandwidth and latency of all four
# operations, with verification; then between the userspace device and rxe, either as the server.
# limit: 240
set -euo pipefail

# Exactly one JSON object, of this test on this device, with a result.
check() {
    local test=$1 device=$2 file=$3
    [ "$(wc -l < "$file")" -eq 1 ]
    grep -q "^{.*\"test\":\"$test\",\"device\":\"$device\".*\"results\":\[{\"bytes\":.*}\]}$" "$file" || { cat "$file"; return 1; }
}

for kind in bw lat; do
    for operation in write read send atomic; do
        "$DOORBELL_BIN/doorbell" $kind $operation -d rxe0 -n 50 --json > /tmp/result.json
        check "${operation}_$kind" rxe0 /tmp/result.json
        echo "$kind $operation on rxe0: $(sed 's/.*"results"://' /tmp/result.json)"
    done
done
"$DOORBELL_BIN/doorbell" bw write -d rxe0 -n 50 --verify

soft() { ip netns exec peer env DOORBELL_SOFT_ADDR=10.9.0.2 "$DOORBELL_BIN/doorbell" "$@"; }
ipv4=$(grep -l ffff:0a09:0001 /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename)

# Waits until the command's TCP port has a listener in the namespace of "$@".
listening() {
    for _ in $(seq 100); do
        ! "$@" grep -q ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6 || return 0
        sleep 0.1
    done
    echo "no server after 10 s"
    return 1
}

for operation in write read send atomic; do
    soft bw $operation -d soft0 --server --bind 10.9.0.2 -n 50 &
    pid=$!
    listening ip netns exec peer
    "$DOORBELL_BIN/doorbell" bw $operation -d rxe0 --gid-index "$ipv4" -n 50 10.9.0.2
    wait $pid

    "$DOORBELL_BIN/doorbell" lat $operation -d rxe0 --gid-index "$ipv4" --server --bind 10.9.0.1 -n 50 &
    pid=$!
    listening
    soft lat $operation -d soft0 -n 50 10.9.0.1
    wait $pid
done
