# tgt and an initiator of libiscsi, in one folder: iser.sh target|bench|copy iser|tcp ADDRESS PORT
set -eu
export TGT_IPC_SOCKET="$PWD/ipc"
name=iqn.2026-11.test:disk
# QEMU's; tgt admits over iSER only initiators that it has by name.
initiator=iqn.2008-11.org.linux-kvm
# Buffers of libiscsi 1.19 for iSER are of 256 KiB, and larger requests overrun them.
image="driver=blkdebug,max-transfer=262144,image.driver=iscsi,image.transport=$2,image.portal=$3:$4"
image="$image,image.target=$name,image.lun=1"
if [ "$2" = iser ]; then
    driver=iser url="iser://$3:$4/$name/1"
    # Its listener of TCP is elsewhere: the usual port may be in use.
    portals="--iscsi portal=127.0.0.1:$4 --iser port=$4,pool_sz_mb=128"
else
    driver=iscsi url="iscsi://$3:$4/$name/1" portals="--iscsi portal=$3:$4"
fi
admin() { tgtadm -C 0 --lld "$driver" "$@"; }
perf="iscsi-perf -i $initiator -b 512 $url"

case $1 in
target)
    truncate -s 64M disk
    tgtd -f -C 0 $portals &
    until admin --op show --mode target 2>/dev/null; do sleep 0.1; done
    admin --op new --mode target --tid 1 -T "$name"
    admin --op new --mode logicalunit --tid 1 --lun 1 -b "$PWD/disk"
    admin --op bind --mode target --tid 1 -I ALL
    admin --op bind --mode target --tid 1 -Q "$initiator"
    echo the target is ready
    wait $!
    ;;
bench) exec qemu-img bench -c 1000000000 -d 8 -s 262144 --image-opts "$image" ;;
copy)
    $perf -t 60 >/dev/null &
    sleep 1
    kill -9 $!
    head -c 64M /dev/urandom >source
    qemu-img convert -n -f raw --target-image-opts source "$image"
    cmp source disk
    qemu-img convert --image-opts -O raw "$image" back
    cmp source back
    echo "verified $(stat -c %s back) bytes"
    $perf -t 2
    # Not by force: tgtd would call a function that its driver of iSER does not have.
    until admin --op delete --mode target --tid 1 2>/dev/null; do sleep 0.1; done
    admin --op delete --mode system
    ;;
esac
