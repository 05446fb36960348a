#!/usr/bin/env bash
# The conformance suite on the kernel's rxe, through the system's libibverbs: rxe's deviations are
# waived, with reasons, in docs/waivers/rxe.txt; nothing else fails, and no waived case passes.
# limit: 240
set -euo pipefail

"$DOORBELL_BIN/conformance" --device rxe0 --waivers docs/waivers/rxe.txt --quiet-ms 100 --patience-ms 6000
