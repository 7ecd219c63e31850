#!/usr/bin/env bash
# dpdk-vhost.sh [SET...]: which driver receives fastest from a DPDK vhost port? netmem's driver and DPDK's virtio_user
# take turns on it, with the same features of rings (SETS in lib.sh). All do the same work: they receive each packet in
# a buffer of their pool, read its first 16 bytes and give the buffer back. Two variants do less, and are marked.
# `_drop` is netmem with an XDP program that drops each frame: its page stays in the ring, and the pool is not used.
# `_unread` is virtio_user without the read.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"
[[ $# == 0 ]] || SETS=("$@")

begin 384
dpdk_versions
have_netmem || exit 0
dpdk_vhost "${DPDK[-1]}" "$TMP/vhost.sock"
turns "$TMP/vhost.sock"

echo "DPDK ${DPDK[-1]} vhost (64 B) feeding, one CPU each:"
tables
for version in "${DPDK[@]}"; do
    goal in_order "$version" "packets/s" 1 ">=" 0.95
    goal in_order "$version" "ns/packet" 2 "<=" 0.55
    goal split "$version" "ns/packet" 2 "<=" 1.2
    goal packed "$version" "packets/s" 1 ">=" 1.0
    goal packed "$version" "ns/packet" 2 "<=" 0.6
    goal packed_in_order "$version" "ns/packet" 2 "<=" 1.2
done
