#!/bin/sh
# Installs the Debian package in a Debian that has nothing else, uses it with and without a stock program, and purges it.
#
# Usage, as root: unshare --mount --pid --fork deb.sh SUITE CACHE PACKAGE
# The folder CACHE keeps an unpacked Debian of each suite, which is not changed.
set -eu
suite=$1 base=$2/$1 package=$3
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
cp "$package" "$root/tmp/doorbell.deb"

# All files but the package managers' own notes.
list() {
    chroot "$root" find / -xdev \( -path /tmp -o -path /var/lib/dpkg -o -path /var/log -o -path /var/cache \) -prune -o -print | sort
}

list > "$root/tmp/before"
chroot "$root" dpkg -i /tmp/doorbell.deb
chroot "$root" dpkg --verify doorbell
test -s "$root/usr/share/doc/doorbell/copyright"
chroot "$root" doorbell bw write -n 1000
chroot "$root" doorbell run -- true
chroot "$root" dpkg --purge doorbell
list > "$root/tmp/after"
diff "$root/tmp/before" "$root/tmp/after"

chroot "$root" dpkg -i /tmp/doorbell.deb
chroot "$root" apt-get --quiet --yes --no-install-recommends --no-download install ibverbs-utils
# The server may not listen yet when the client starts.
chroot "$root" doorbell run -- sh -ec '
    ibv_rc_pingpong -g 0 -n 100 &
    for try in 1 2 3 4 5 6 7 8 9 10; do
        ibv_rc_pingpong -g 0 -n 100 127.0.0.1 && break
        sleep 0.3
    done
    wait $!'
