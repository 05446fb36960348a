#!/usr/bin/env bash
# The shell of action.yml: installs the command in a folder, and puts it on the path of later steps.
#
# Usage: install.sh FOLDER, with the variables that action.yml sets.
set -euo pipefail
folder=$1
mkdir -p "$folder"

from_tarball() {
    tar -xzf "$1" --strip-components=1 -C "$folder"
}

# A package of the release, by the beginning of its name.
from_release() {
    local name="$1-$INPUT_VERSION-$(uname -m)-unknown-linux-gnu.tar.gz" from="$RELEASES/v$INPUT_VERSION"
    local files
    files=$(mktemp -d)
    for file in "$name" SHA256SUMS; do
        curl --fail --silent --show-error --location --retry 3 --output "$files/$file" "$from/$file"
    done
    (cd "$files" && grep -F "  $name" SHA256SUMS | sha256sum --check --quiet --strict)
    from_tarball "$files/$name"
    rm -r "$files"
}

from_sources() {
    cargo install --locked --path "$(dirname "$0")/../cli" --root "$folder"
}

if [ -n "${INPUT_TARBALL:-}" ]; then
    from_tarball "$INPUT_TARBALL"
elif [ -n "${INPUT_VERSION:-}" ]; then
    from_release doorbell
    if [ "${INPUT_NCCL:-false}" = true ]; then
        from_release doorbell-nccl
    fi
else
    from_sources
fi

"$folder/bin/doorbell" --version
echo "$folder/bin" >> "$GITHUB_PATH"
if [ "${INPUT_DEVICE:-false}" = true ]; then
    # shellcheck disable=SC2086 # options are words
    "$folder/bin/doorbell" env --plain ${INPUT_OPTIONS:-} >> "$GITHUB_ENV"
fi
