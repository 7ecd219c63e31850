#!/usr/bin/env bash
# run.sh DIR SOCKET [WORD...]: boot DIR's guest (see build.sh) with its network card on the
# vhost-user back end at SOCKET. WORDs are for init: netmem_addr=.. netmem_peer=.. and what to do.
# Prints the guest's RESULT lines; DIR/console.log has everything. Exits 0 if the guest reached its
# end. Env: QUEUES (1), TIMEOUT (150 seconds), MEM (256, in MiB).
set -euo pipefail

dir=${1:?usage: run.sh DIR SOCKET [WORD...]}
socket=${2:?usage: run.sh DIR SOCKET [WORD...]}
shift 2
command -v qemu-system-x86_64 > /dev/null || { echo "skipped: qemu-system-x86_64 is not installed"; exit 0; }
queues=${QUEUES:-1} mem=${MEM:-256}

# Software emulation, for nested virtualisation is rarely to be had. The guest's memory must be a
# shared file: the back end maps it. vectors=0, no MSI-X: Debian 12's QEMU (7.2.22) follows a null
# pointer there when a vhost-user device starts without KVM. What the guest does not need to boot
# (VGA, floppies, option ROMs) is left out, and with it seconds.
timeout "${TIMEOUT:-150}" qemu-system-x86_64 \
    -accel tcg -M q35 -cpu max -smp 1 -m "$mem" -nodefaults -no-user-config -display none -no-reboot \
    -object "memory-backend-memfd,id=mem,size=${mem}M,share=on" -numa node,memdev=mem \
    -chardev "socket,id=vhost,path=$socket" \
    -netdev "vhost-user,id=net,chardev=vhost,queues=$queues" \
    -device "virtio-net-pci,netdev=net,mac=02:00:00:00:00:02,romfile=,vectors=0,mq=$([[ $queues -gt 1 ]] && echo on || echo off)" \
    -kernel "$dir/vmlinuz" -initrd "$dir/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable $*" \
    -serial stdio < /dev/null > "$dir/console.log" 2>&1 || { tail -n 20 "$dir/console.log" >&2; exit 1; }

tr -d '\r' < "$dir/console.log" | grep '^RESULT'
grep -q '^RESULT end ok' "$dir/console.log"
