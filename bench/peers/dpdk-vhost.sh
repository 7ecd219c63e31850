#!/usr/bin/env bash
# dpdk-vhost.sh [SET...]: which driver receives fastest from a DPDK vhost port? netmem's driver and
# DPDK's virtio_user take turns of 20 ms, each on a port of its own, with the same features of rings
# (SETS in lib.sh). All do the same work: they receive each packet in a buffer of their pool, read
# its first 16 bytes and return the buffer. Two variants do less, and are marked. `_drop` is netmem
# with an XDP program that drops each frame: its page stays in the ring, and the pool is not used.
# `_unread` is virtio_user without the read.
#
# The rows of the first tables receive as fast as they can. In the last, the port sends RATE packets
# a second, which all receivers keep up with: there the drivers find few packets at a time.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"
[[ $# == 0 ]] || SETS=("$@")
RATE=${RATE:-2000000}

begin 512
dpdk_versions
have_examples || exit 0
known_sets
full() { dpdk_vhost "$1" "${DPDK[-1]}" "$2"; }
paced() { dpdk_vhost "$1" "${DPDK[-1]}" "$2" "$RATE"; }
compare full netmem netmem_drop "${DPDK[@]}" "${DPDK[-1]}_unread"
SUFFIX="-paced" compare paced netmem "${DPDK[-1]}"

echo "DPDK ${DPDK[-1]} vhost (64 B) feeding, one CPU each, turns of $TURN_MS ms; packets/s while it had its CPU:"
tables netmem netmem_drop "${DPDK[@]}" "${DPDK[-1]}_unread"
echo "the same, $RATE packets/s:"
SUFFIX="-paced" tables netmem "${DPDK[-1]}"
for version in "${DPDK[@]}"; do
    goal split "$version" "ns/packet" 2 "<=" 0.75
    goal mergeable "$version" "ns/packet" 2 "<=" 0.4
    goal in_order "$version" "ns/packet" 2 "<=" 0.7
    goal packed "$version" "ns/packet" 2 "<=" 0.6
    goal packed_in_order "$version" "ns/packet" 2 "<=" 0.9
done
for set in "${SETS[@]}"; do
    ratio "$set: netmem / virtio_user ${DPDK[-1]} at $RATE packets/s, ns/packet" 2 "$set-paced-netmem" "$set-paced-${DPDK[-1]}" "<=" 1
done
