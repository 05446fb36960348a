# A guest that migrates between two QEMUs of one folder: migrate.sh to|from|slowly FILES URI [COMMAND]
# The monitors read commands from a pipe; the source's runs COMMAND first.
set -eu
end=$1
as --32 -o "$end.o" "$2/guest.s"
ld -m elf_i386 -Ttext 0x100000 -o "$end" "$end.o"
: >"$end.log"
qemu="qemu-system-x86_64 -accel tcg -m 128 -nodefaults -display none -kernel $end -serial file:$end.log -monitor stdio"

# Waits until the guest has passed five rounds, or found a difference. The empty commands end the
# wait when QEMU has ended.
rounds() { until [ "$(grep -c round "$1.log")" -ge 5 ] || grep -q differs "$1.log"; do echo && sleep 0.1; done; }
# The source's commands; the monitor serves the next when the migration has ended.
migrate() { # BANDWIDTH URI [COMMAND]
    rounds "$end"
    echo "${3:-}"
    echo "migrate_set_parameter max-bandwidth $1"
    echo "migrate_set_parameter downtime-limit 1000"
    echo "migrate $2"
    echo info migrate
    echo quit
}

case $end in
to)
    {
        echo "migrate_incoming $3"
        echo info status
        rounds to
        echo quit
    } | $qemu -incoming defer
    ;;
from)
    migrate 10G "$3" "${4:-}" | $qemu
    rounds to
    cat from.log to.log
    ;;
slowly) migrate 4M "$3" | $qemu ;;
esac
