#!/usr/bin/env bash
# Compares two pairs of processes on a vhost-user socket: netmem's device and driver, and DPDK's
# vhost and virtio_user, with the features that virtio_user negotiates by default. Neither generator
# makes frames while it sends, and both receivers read 16 bytes of each frame. The pairs take turns.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 384
dpdk_versions
have_netmem && have_examples || exit 0

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    netmem_device netmem-device "$TMP/netmem.sock"
    netmem_driver netmem in_order "$TMP/netmem.sock" pass
    off_turn netmem
    names=(netmem)
    for version in "${DPDK[@]}"; do
        dpdk_vhost "dpdk-$version-device" "$version" "$TMP/$version.sock"
        virtio_user "dpdk-$version" in_order "$version" "$TMP/$version.sock" read
        off_turn "dpdk-$version"
        names+=("dpdk-$version")
    done
    take_turns "${names[@]}"
    for name in "${names[@]}"; do
        result "$name"
        stop "$name-device"
        features in_order "$name"
        record "$name"
    done
    rm -f "$TMP"/*.sock
done

echo "device and driver, netmem's and DPDK's, 64 B, turns of $TURN_MS ms, negotiated:${NEGOTIATED[in_order]}"
table netmem "${DPDK[@]/#/dpdk-}"
# The goal is of machines and moments in which a line costs at most 40 ns.
for version in "${DPDK[@]}"; do
    ratio "netmem pair / DPDK $version pair, packets/s" 1 netmem "dpdk-$version" ">=" 3
done
