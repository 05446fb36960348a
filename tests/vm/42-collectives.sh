#!/usr/bin/env bash
# The executor of collectives on the kernel's rxe, all ranks on it: what its tests show of the soft device.
# limit: 300
set -euo pipefail

DOORBELL_COLLECTIVES_DEVICE=rxe0 "$DOORBELL_TEST_EXECUTOR" --test-threads 1 two_ranks three_ranks four_ranks types:: overlap:: never_begins an_abort rank_that_goes
