#!/usr/bin/env bash
# netmem-device.sh [SET...]: which driver receives fastest from netmem's own device, which is faster than the drivers?
# The variants of dpdk-vhost.sh take turns on `netmem device --port gen`. The device is started anew for each, so that
# no variant benefits from caches that another one has filled.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"
[[ $# == 0 ]] || SETS=("$@")

begin 192
dpdk_versions
have_netmem || exit 0
before() { netmem_device "$TMP/device.sock"; }
after() { stop device; }
turns "$TMP/device.sock"

echo "netmem device (gen, 64 B) feeding, one CPU each:"
tables
for version in "${DPDK[@]}"; do
    goal in_order "$version" "packets/s" 1 ">=" 2.5
    goal split "$version" "packets/s" 1 ">=" 1.3
done
