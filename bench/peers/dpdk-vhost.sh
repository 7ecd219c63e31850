#!/usr/bin/env bash
# Who receives best from one DPDK vhost port? netmem's driver, DPDK's virtio_user as it comes, and virtio_user vectorised take
# turns on it. The back end is the limit for packets per second on a split ring, so the CPU time per packet tells them apart.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 384 dpdk-testpmd
variants=(virtio_user virtio_user_vec)
if have_netmem; then variants=(netmem "${variants[@]}"); fi

dpdk_vhost "$TMP/vhost.sock"
for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    for variant in "${variants[@]}"; do
        case $variant in
            netmem) run_netmem "$TMP/vhost.sock" ;;
            *) run_virtio_user "$variant" "$TMP/vhost.sock" ;;
        esac
        record "$variant"
    done
done

echo "DPDK vhost (txonly, 64 B) feeding:"
table "${variants[@]}"
if [[ ${variants[0]} == netmem ]]; then
    ratio "netmem / virtio_user, packets/s" 1 netmem virtio_user ">=" 0.95
    ratio "netmem / virtio_user, ns/packet" 2 netmem virtio_user "<=" 0.55
    ratio "netmem / virtio_user vectorised, ns/packet" 2 netmem virtio_user_vec "<=" 1.00
fi
