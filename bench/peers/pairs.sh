#!/usr/bin/env bash
# Compares two pairs of processes on a vhost-user socket: netmem's device and driver, and DPDK's vhost and virtio_user,
# with the features that virtio_user negotiates by default. Neither generator makes frames while it sends, and both
# receivers read 16 bytes of each frame.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 384
dpdk_versions
have_netmem || exit 0

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    netmem_device "$TMP/device.sock"
    run_netmem in_order "$TMP/device.sock"
    stop device
    features in_order netmem
    record netmem
    for version in "${DPDK[@]}"; do
        dpdk_vhost "$version" "$TMP/vhost.sock"
        run_virtio_user in_order "$version" "$TMP/vhost.sock" read
        stop vhost
        features in_order "$version"
        record "dpdk-$version"
    done
done

echo "device and driver, netmem's and DPDK's, 64 B, negotiated:${NEGOTIATED[in_order]}"
table netmem "${DPDK[@]/#/dpdk-}"
for version in "${DPDK[@]}"; do
    ratio "netmem pair / DPDK $version pair, packets/s" 1 netmem "dpdk-$version" ">=" 4
done
