#!/usr/bin/env bash
# netmem-device.sh [SET...]: which driver receives fastest from netmem's own device, which is faster
# than the drivers? The variants of dpdk-vhost.sh take turns, each on a `netmem device --port gen`
# of its own.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"
[[ $# == 0 ]] || SETS=("$@")

begin 320
dpdk_versions
have_netmem && have_examples || exit 0
known_sets
compare netmem_device netmem netmem_drop "${DPDK[@]}" "${DPDK[-1]}_unread"

echo "netmem device (gen, 64 B) feeding, one CPU each, turns of $TURN_MS ms; packets/s while it had its CPU:"
tables netmem netmem_drop "${DPDK[@]}" "${DPDK[-1]}_unread"
for version in "${DPDK[@]}"; do
    goal in_order "$version" "packets/s" 1 ">=" 2.5
    goal split "$version" "packets/s" 1 ">=" 1.3
done
