#!/usr/bin/env bash
# tests/transports on the kernel's rxe, both ends on it: UC, UD and the attributes of queue pairs in
# use, by the safe API.
set -euo pipefail

DOORBELL_TRANSPORTS_DEVICE=rxe0 "$DOORBELL_TEST_TRANSPORTS" --test-threads 1
