#!/bin/busybox sh
# PID 1 of the kernel guest, run by busybox's shell. It runs twice:
#
#   early   in the initramfs: loads the modules, takes the job from the control port, lays the staged packages and a
#           writable layer over the host's file system, and moves there with switch_root;
#   guest   in that root: sets up /proc, /dev and the network, creates rxe0, runs the job's command and reports.
#
# Talks to the host over three virtio ports: 1 the command's stdout, 2 its stderr, 3 control. On the control port the
# host first sends the job (a shell fragment of known length, see vm/job.rs); the guest answers with lines:
#   up TEXT      the guest is ready and starts the command; TEXT names the kernel
#   exit N       the command ended with status N and all of its output has been handed over
#   fail TEXT    the guest could not be set up

stage=$1
umask 022

fail() {
    echo "doorbell guest: $*"
    [ -z "$control" ] || echo "fail $*" >&3
    # Time for the host to read the line and to stop the machine; it is switched off here if the host is gone.
    sleep 5
    poweroff -f
}

early() {
    /bin/busybox --install -s /bin
    mount -t devtmpfs dev /dev && mount -t proc proc /proc && mount -t sysfs sys /sys || fail "no /dev, /proc or /sys"

    while read -r module; do
        insmod "/modules/$module.ko" || fail "cannot load the kernel module $module"
    done < /modules/order

    # The ports appear a moment after their driver was loaded.
    tries=0
    until set -- /dev/vport*p3 && [ -e "$1" ]; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || fail "no control port"
        usleep 50000
    done
    ports=${1%p3}
    exec 3<> "${ports}p3"
    control=open
    head -c "$(sed -n 's/.*doorbell\.job=\([0-9]*\).*/\1/p' /proc/cmdline)" <&3 > /job
    . /job

    # Two mounts, as overlayfs takes no layer that lies inside another.
    options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro
    mount -t 9p -o $options host /host && mount -t 9p -o $options sysroot /sysroot ||
        fail "cannot mount the host's file system"
    mount -t tmpfs -o size=75% rw /rw && mkdir /rw/upper /rw/work || fail "no writable layer"
    mount -t overlay -o lowerdir=/sysroot:/host,upperdir=/rw/upper,workdir=/rw/work overlay /root ||
        fail "cannot stack the root file system"

    mount -t tmpfs -o mode=755 run /root/run || fail "no /run"
    mkdir -p /root/run/doorbell/bin
    cp /bin/busybox /init /job /root/run/doorbell/
    ln -s ../busybox /root/run/doorbell/bin/busybox
    ln -s ../busybox /root/run/doorbell/bin/modprobe
    mount --move /dev /root/dev && mount --move /proc /root/proc && mount --move /sys /root/sys || fail "no mounts moved"
    exec switch_root /root /run/doorbell/busybox sh /run/doorbell/init guest "$ports"
}

network() {
    mkdir -p /run/netns
    ip netns add peer || return
    # Addresses are to be usable at once: this wire has no other node, so skip duplicate address detection.
    echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
    ip netns exec peer /run/doorbell/busybox sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad' || return
    ip -batch - <<-LINKS || return
	link set lo up
	link add v0 mtu $MTU type veth peer name v1 mtu $MTU netns peer
	address add 10.9.0.1/24 dev v0
	address add fd09::1/64 dev v0 nodad
	link set v0 up
	LINKS
    ip -n peer -batch - <<-LINKS || return
	link set lo up
	address add 10.9.0.2/24 dev v1
	address add fd09::2/64 dev v1 nodad
	link set v1 up
	LINKS
    rdma link add rxe0 type rxe netdev v0 || return
    # A new link shows as up only when the kernel's link watcher has run, up to a second later.
    tries=0
    until ip -n peer link show v1 | grep -q 'state UP'; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || return
        usleep 50000
    done
    tries=0
    until [ "$(cat /sys/class/infiniband/rxe0/ports/1/state)" = "4: ACTIVE" ]; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || return
        usleep 50000
    done
    chmod 666 /dev/infiniband/*
}

guest() {
    ports=$1
    # Still open as descriptor 3; a port cannot be opened a second time.
    control=open
    # Commands are busybox's own, whatever the root has, except iproute2's.
    iproute=$(PATH=/usr/sbin:/usr/bin:/sbin:/bin which ip)
    ip() { "$iproute" "$@"; }
    PATH=/usr/sbin:/usr/bin:/sbin:/bin

    mkdir -p /dev/shm /dev/pts
    mount -t tmpfs -o mode=1777 shm /dev/shm
    mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
    ln -sf /proc/self/fd /dev/fd
    ln -sf fd/0 /dev/stdin
    ln -sf fd/1 /dev/stdout
    ln -sf fd/2 /dev/stderr
    ulimit -l unlimited
    ulimit -n 65536
    . /run/doorbell/job
    network || fail "the network or rxe0 could not be set up"

    # Pipes stand between the command and the ports: a port can be opened only once, and the command may open
    # /dev/stdout again; a pipe also shows when the last of the output was read.
    mkdir /run/doorbell/pipes
    mkfifo /run/doorbell/pipes/out /run/doorbell/pipes/err
    cat /run/doorbell/pipes/out > "${ports}p1" 3>&- &
    out=$!
    cat /run/doorbell/pipes/err > "${ports}p2" 3>&- &
    err=$!

    echo "up $(cat /proc/sys/kernel/osrelease) $(cat /proc/sys/kernel/version)" >&3
    (
        cd "$DIRECTORY" || exit 125
        environment
        export PATH="$PATH:/usr/sbin:/sbin:/run/doorbell/bin"
        # This shell would take its own `sh` or `ip` for a bare name; env takes the root's.
        case $1 in
            */*) exec "$@" ;;
            *) exec /usr/bin/env -- "$@" ;;
        esac
    ) < /dev/null > /run/doorbell/pipes/out 2> /run/doorbell/pipes/err 3>&-
    status=$?

    # Whatever the command left running holds the pipes open; the guest ends with its command.
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        case $pid in
            1 | "$out" | "$err") ;;
            *) kill -9 "$pid" 2> /dev/null ;;
        esac
    done
    wait "$out" "$err"
    echo "exit $status" >&3
    sleep 5
    poweroff -f
}

case $stage in
    guest) shift && guest "$@" ;;
    *) early ;;
esac
