#!/usr/bin/env bash
# `doorbell diagnose` and the warnings of a test on the kernel's rxe, from its sysfs and verbs: the
# interface's MTU, the GID, the locked-memory limit of an unprivileged process; each reported, and
# gone after its remedy.
# limit: 120
set -euo pipefail

# Restore the guest for the other scripts.
mtu() {
    ip link set dev v0 mtu "$1"
    ip -n peer link set dev v1 mtu "$1"
}
trap 'mtu 1500' EXIT

diagnose() { "$@" "$DOORBELL_BIN/doorbell" diagnose -d rxe0 --json > /tmp/diagnosis.json; }
has() { grep -q "\"about\":\"rxe0\",\"code\":\"$1\"" /tmp/diagnosis.json || { echo "no $1"; cat /tmp/diagnosis.json; return 1; }; }
lacks() { ! has "$1" > /dev/null || { echo "$1"; cat /tmp/diagnosis.json; return 1; }; }

diagnose env
has mtu
grep -q 'ip link set dev v0 mtu 4200' /tmp/diagnosis.json
lacks memlock

# Both ends of the wire, as the warning recommends.
mtu 4200
diagnose env
lacks mtu

# A user's default locked-memory limit is less than a test registers.
diagnose setpriv --reuid 65534 --regid 65534 --clear-groups prlimit --memlock=8388608:8388608
has memlock
diagnose setpriv --reuid 65534 --regid 65534 --clear-groups prlimit --memlock=unlimited:unlimited
lacks memlock

# A test that requests less than the maximum.
link_local=$(grep -l '^fe80' /sys/class/infiniband/rxe0/ports/1/gids/* | head -1 | xargs basename)
"$DOORBELL_BIN/doorbell" lat write -d rxe0 -n 20 --gid-index "$link_local" --mtu 1024 --json -v > /tmp/diagnosis.json 2> /tmp/warnings
for code in not-hardware path-mtu gid-link-local few-samples; do
    grep -q "\"code\":\"$code\"" /tmp/diagnosis.json || { echo "no $code"; cat /tmp/diagnosis.json; exit 1; }
done
[ "$(grep -c '^doorbell: warning: ' /tmp/warnings)" -eq "$(grep -o '"code":' /tmp/diagnosis.json | wc -l)" ]
