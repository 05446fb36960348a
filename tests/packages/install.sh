#!/bin/sh
# Installs the command by cargo from packed crates, in a registry that is a folder, and uses the libraries that are in it.
#
# Usage: install.sh CRATES TARGET
# CRATES has the workspace's as `cargo package` makes them, TARGET is the folder for the build.
set -eu
crates=$1 target=$2
here=$(dirname "$0")
cli=$here/../../bindings/cli/Cargo.toml
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cargo vendor --quiet --locked --versioned-dirs --manifest-path "$cli" "$folder/registry"
mkdir "$folder/.cargo"
cat > "$folder/.cargo/config.toml" <<CONFIG
[source.crates-io]
replace-with = "folder"
[source.folder]
directory = "$folder/registry"
CONFIG
add() {
    tar -xzf "$1" -C "$folder/registry"
    echo "{\"files\":{},\"package\":\"$(sha256sum "$1" | cut -d ' ' -f 1)\"}" > "$folder/registry/$(basename "$1" .crate)/.cargo-checksum.json"
}
for crate in "$crates"/doorbell-*.crate; do
    add "$crate"
done
cargo package --quiet --no-verify --allow-dirty --manifest-path "$cli" --config "$folder/.cargo/config.toml" --target-dir "$folder/packed"
add "$folder"/packed/package/doorbell-cli-*.crate

# Its own Cargo.lock counts, and no sources but those of the registry are reached: installing takes no configuration from the folder, building does.
cargo install --quiet --locked --offline --config "$folder/.cargo/config.toml" doorbell-cli --root "$folder/root" --target-dir "$target"
"$here/embedded.sh" "$folder/root/bin/doorbell"
