#!/usr/bin/env bash
# The classic tools on the kernel's rxe, and with one end on the userspace device at the other end
# of the wire: the package's server with our client, and our server with the package's client. Every
# tool, with queue pairs of each kind, bidirectional, on four queue pairs, of all sizes and for a
# duration; half of these cases, unless DOORBELL_SWEEP=all: `pairings host` has the others.
# Comparing the results takes long: pairings rxe --write docs/CLASSIC.md.
# limit: 600
set -euo pipefail

"$DOORBELL_BIN/pairings" rxe --quick
"$DOORBELL_BIN/pairings" wire --quick --only "_bw -n"
"$DOORBELL_BIN/pairings" wire --quick --only "_lat -n"
