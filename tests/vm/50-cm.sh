#!/usr/bin/env bash
# The connection manager on the kernel's rxe, through the system's librdmacm: both ends ours, IPv4
# and IPv6, data and private data verified, every kind of refusal distinguished, also without any
# privilege; and where its device node is missing, one error that names it.
# limit: 180
set -euo pipefail

"$DOORBELL_BIN/cm" 10.9.0.1
"$DOORBELL_BIN/cm" fd09::1
setpriv --reuid 65534 --regid 65534 --clear-groups "$DOORBELL_BIN/cm" 10.9.0.1

unshare -m bash -c 'mount -t tmpfs none /dev/infiniband && ! "$DOORBELL_BIN/cm" 10.9.0.1 2> /tmp/cm.log'
cat /tmp/cm.log
[ "$(wc -l < /tmp/cm.log)" -eq 1 ]
grep -q 'rdma_create_event_channel.*modprobe rdma_ucm' /tmp/cm.log
