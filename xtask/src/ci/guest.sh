# Runs in the guest: LIMIT SCRIPT [LIMIT SCRIPT…]. Ends with 0 unless it could not do its work; each script's end is
# reported in a line "guest-script-ended STATUS SCRIPT" that ci/guest.rs reads.

processes() {
    cd /proc && echo [0-9]*
}

while [ $# -ge 2 ]; do
    limit=$1 script=$2
    shift 2
    echo "-- $script"
    before=" $(processes) "
    SECONDS=0
    timeout --kill-after=5 "$limit" bash "$script" < /dev/null
    status=$?
    echo "-- $script: status $status after $SECONDS s$([ $status -ne 124 ] || echo ", its limit")"

    # What the script left running must not disturb the next one. Kernel threads take no notice of kill.
    for pid in $(processes); do
        case $before in
            *" $pid "*) ;;
            *) [ "$pid" = $$ ] || kill -9 "$pid" 2> /dev/null ;;
        esac
    done
    ip link set v0 mtu 1500 && ip -n peer link set v1 mtu 1500 || exit
    echo "guest-script-ended $status $script"
done
