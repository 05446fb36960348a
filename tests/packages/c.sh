#!/bin/sh
# Builds a program with the C library of its archive, by pkg-config, and runs it: with the shared library, and with
# the static one.
#
# Usage: c.sh ARCHIVE PROGRAM
# The program is left at PROGRAM, for those who have the shared library.
set -eu
archive=$1 program=$2
source=$(cd "$(dirname "$0")/../../bindings/c/examples" && pwd)/all_reduce.c
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tar -xzf "$archive" --strip-components=1 -C "$folder"
export PKG_CONFIG_PATH="$folder/lib/pkgconfig" DOORBELL_SECRET='sixteen characters or more'

# shellcheck disable=SC2046 # flags are words
cc -o "$program" "$source" $(pkg-config --cflags --libs doorbell)
LD_LIBRARY_PATH=$folder/lib "$program" 0 1 127.0.0.1:18600
rm "$folder"/lib/libdoorbell.so*
# shellcheck disable=SC2046
cc -o "$folder/program" "$source" $(pkg-config --cflags --libs --static doorbell)
"$folder/program" 0 1 127.0.0.1:18600
