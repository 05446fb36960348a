#!/usr/bin/env bash
# Runs the shell of action.yml and the lines of the GitLab include as a job does, on a release that is a folder.
#
# Usage: ci.sh DIST, with the folder that `cargo xtask dist` has written
set -euo pipefail
dist=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
version=$(basename "$dist"/doorbell-*.cdx.json .cdx.json)
version=${version#doorbell-}
mkdir -p "$folder/releases/v$version"
tarball=$(echo "$dist"/doorbell-[0-9]*.tar.gz)
cp "$tarball" "$dist"/doorbell-nccl-*.tar.gz "$dist/SHA256SUMS" "$folder/releases/v$version"
export TMPDIR=$folder

# The number of devices that a program has which knows nothing of doorbell.
devices='import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.c_void_p
count = ctypes.c_int()
verbs.ibv_get_device_list(ctypes.byref(count))
print(count.value)'

# A step of a job in which the action has run with these inputs.
action() {
    local job=$folder/$1
    shift
    mkdir "$job"
    env GITHUB_PATH="$job/path" GITHUB_ENV="$job/env" RELEASES="file://$folder/releases" "$@" "$here/bindings/ci/install.sh" "$job/doorbell" >&2
    local variables=()
    if [ -e "$job/env" ]; then
        mapfile -t variables < "$job/env"
    fi
    env PATH="$(cat "$job/path"):$PATH" "${variables[@]}" "${step[@]}"
}

step=(doorbell run -- python3 -c "$devices")
test "$(action tarball INPUT_TARBALL="$tarball")" = 1
step=(python3 -c "$devices")
test "$(action release INPUT_VERSION="$version" INPUT_DEVICE=true INPUT_OPTIONS='--rails 3')" = 3
step=(doorbell run --nccl -- python3 -c 'import ctypes
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
print(version.value)')
test "$(action nccl INPUT_VERSION="$version" INPUT_NCCL=true)" = 23007

# A file that is not the release's is not installed.
echo >> "$folder/releases/v$version/$(basename "$tarball")"
step=(true)
action changed INPUT_VERSION="$version" 2> /dev/null || true
test ! -e "$folder/changed/doorbell/bin"
cp "$tarball" "$folder/releases/v$version"

lines=$(sed -n 's/^    - //p' "$here/bindings/ci/gitlab.yml")
cd "$folder"
counted=$(env HOME="$folder/home" DOORBELL_VERSION="$version" DOORBELL_RELEASES="file://$folder/releases" bash -ec "$lines
python3 -c '$devices'" | tail -n 1)
test "$counted" = 1
