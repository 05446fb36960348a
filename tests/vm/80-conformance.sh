#!/usr/bin/env bash
# The conformance suite on the kernel's rxe, through the system's libibverbs: what rxe lacks or does otherwise stands, with reasons, in docs/waivers/rxe.txt,
# and nothing else fails; nor does anything pass that is waived.
# limit: 240
set -euo pipefail

"$DOORBELL_BIN/conformance" --device rxe0 --waivers docs/waivers/rxe.txt --quiet-ms 100 --patience-ms 6000
