#!/bin/sh
# Builds the C library and installs it: PREFIX/lib, PREFIX/include and doorbell.pc for pkg-config.
#
# Usage: install.sh PREFIX [PROFILE | FOLDER]
# PROFILE is cargo's, release by default. From a FOLDER, which has a slash, the built libraries are taken.
set -eu
prefix=${1:?usage: install.sh PREFIX [PROFILE | FOLDER]}
profile=${2:-release}
here=$(cd "$(dirname "$0")" && pwd)
cargo() { command "${CARGO:-cargo}" "$@" --manifest-path "$here/Cargo.toml"; }

case $profile in
*/*) built=$profile ;;
*)
    cargo build --quiet --locked --lib --profile "$profile"
    metadata=$(cargo metadata --no-deps --format-version 1)
    built=$(printf '%s' "$metadata" | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
    case $profile in
    dev) built=$built/debug ;;
    *) built=$built/$profile ;;
    esac
    ;;
esac
version=$(cargo pkgid | sed 's/.*[#@]//')

mkdir -p "$prefix/include" "$prefix/lib/pkgconfig"
install -m 644 "$here/doorbell.h" "$prefix/include/"
install -m 644 "$built/libdoorbell.a" "$prefix/lib/"
# By the name that programs ask the loader for, and by the one that the linker takes.
soname=libdoorbell.so.${version%.*}
install -m 755 "$built/libdoorbell.so" "$prefix/lib/$soname"
ln -sf "$soname" "$prefix/lib/libdoorbell.so"
sed "s/@VERSION@/$version/" "$here/doorbell.pc.in" >"$prefix/lib/pkgconfig/doorbell.pc"
