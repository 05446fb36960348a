#!/bin/sh
# Installs the Debian packages in a Debian that has nothing else, uses them with and without a stock program, and
# purges them.
#
# Usage, as root: unshare --mount --pid --fork deb.sh SUITE CACHE DIST PROGRAM
# The folder CACHE keeps an unpacked Debian of each suite, which is not changed; DIST has the packages; PROGRAM, of
# c.sh, needs the C library.
set -eu
suite=$1 base=$2/$1 dist=$3 program=$4
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
unset TMPDIR

if [ ! -d "$base" ]; then
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | head -n 1)
    rm -rf "$base.new"
    debootstrap --variant=minbase "$suite" "$base.new" "$mirror"
    cp /etc/resolv.conf "$base.new/etc/"
    chroot "$base.new" apt-get --quiet update
    chroot "$base.new" apt-get --quiet --yes --no-install-recommends --download-only install ibverbs-utils
    mv "$base.new" "$base"
fi

root=$(mktemp -d)
trap 'umount --recursive --lazy "$root/proc" "$root/dev"; rm -rf --one-file-system "$root"' EXIT
cp -a "$base/." "$root"
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp "$dist"/*.deb "$program" "$root/tmp"
all='doorbell doorbell-nccl libdoorbell-dev'

# All files but the package managers' own notes.
list() {
    chroot "$root" find / -xdev \( -path /tmp -o -path /var/lib/dpkg -o -path /var/log -o -path /var/cache \) -prune -o -print | sort
}

list > "$root/tmp/before"
chroot "$root" sh -c 'dpkg -i /tmp/doorbell_*.deb'
# Without the package, it is named in one line.
chroot "$root" sh -c '! doorbell run --nccl -- true 2> /tmp/missing'
test "$(wc -l < "$root/tmp/missing")" = 1
grep -q 'install the package doorbell-nccl' "$root/tmp/missing"
chroot "$root" sh -c 'dpkg -i /tmp/doorbell-nccl_*.deb /tmp/libdoorbell-dev_*.deb'
for package in $all; do
    chroot "$root" dpkg --verify "$package"
    test -s "$root/usr/share/doc/$package/copyright"
done
chroot "$root" doorbell bw write -n 1000
chroot "$root" doorbell run -- true
chroot "$root" doorbell run --nccl -- grep -q /usr/lib/doorbell/libdoorbell_nccl.so /proc/self/maps
chroot "$root" env DOORBELL_SECRET='sixteen characters or more' "/tmp/$(basename "$program")" 0 1 127.0.0.1:18600
# shellcheck disable=SC2086 # names are words
chroot "$root" dpkg --purge $all
list > "$root/tmp/after"
diff "$root/tmp/before" "$root/tmp/after"

chroot "$root" sh -c 'dpkg -i /tmp/doorbell_*.deb'
chroot "$root" apt-get --quiet --yes --no-install-recommends --no-download install ibverbs-utils
# The server may not listen yet when the client starts.
chroot "$root" doorbell run -- sh -ec '
    ibv_rc_pingpong -g 0 -n 100 &
    for try in 1 2 3 4 5 6 7 8 9 10; do
        ibv_rc_pingpong -g 0 -n 100 127.0.0.1 && break
        sleep 0.3
    done
    wait $!'
