#!/usr/bin/env bash
# UC, UD and the attributes of queue pairs in use, by the safe API on the kernel's rxe, both ends on it: what tests/transports shows of the soft device.
set -euo pipefail

DOORBELL_TRANSPORTS_DEVICE=rxe0 "$DOORBELL_TEST_TRANSPORTS" --test-threads 1
