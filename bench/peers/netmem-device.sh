#!/usr/bin/env bash
# Who receives best from netmem's own device, which is not the limit? netmem's driver and DPDK's virtio_user, as it comes and
# vectorised, take turns on `netmem device --port gen`. The device starts afresh for each, so that none inherits its caches.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 192 dpdk-testpmd
have_netmem || exit 0
variants=(netmem virtio_user virtio_user_vec)

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    for variant in "${variants[@]}"; do
        netmem_device "$TMP/device.sock"
        case $variant in
            netmem) run_netmem "$TMP/device.sock" ;;
            *) run_virtio_user "$variant" "$TMP/device.sock" ;;
        esac
        stop device
        record "$variant"
    done
done

echo "netmem device (gen, 64 B) feeding:"
table "${variants[@]}"
ratio "netmem / virtio_user, packets/s" 1 netmem virtio_user ">=" 2.5
ratio "netmem / virtio_user vectorised, packets/s" 1 netmem virtio_user_vec ">=" 1.3
