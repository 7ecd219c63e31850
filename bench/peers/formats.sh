#!/usr/bin/env bash
# Packed and split rings on DPDK's vhost port: netmem's driver and DPDK's virtio_user take turns. netmem passes every frame to the
# application, which drops it, so that the page pool is in the way; or its XDP program drops it (`_drop`). Either way the program
# reads the first 16 bytes of each frame, which virtio_user never does.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 384 dpdk-testpmd
have_netmem || exit 0
packed=(netmem_packed netmem_packed_drop virtio_user_packed)
if grep -q avx512vl /proc/cpuinfo; then packed+=(virtio_user_packed_vec); else echo "left out: virtio_user_packed_vec, for there is no AVX-512"; fi
split=(netmem_split netmem_split_drop virtio_user_vec)

dpdk_vhost "$TMP/vhost.sock"
for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    for variant in "${packed[@]}" "${split[@]}"; do
        ring=${variant#netmem_}
        case $variant in
            netmem_*_drop) RING_FEATURES=${ring%_drop} XDP=drop run_netmem "$TMP/vhost.sock" ;;
            netmem_*) RING_FEATURES=$ring XDP=pass run_netmem "$TMP/vhost.sock" ;;
            *) run_virtio_user "$variant" "$TMP/vhost.sock" ;;
        esac
        record "$variant"
    done
done

echo "DPDK vhost (txonly, 64 B) feeding:"
table "${packed[@]}" "${split[@]}"
ratio "packed: netmem / virtio_user, packets/s" 1 netmem_packed virtio_user_packed ">=" 1.0
ratio "packed: netmem / virtio_user, ns/packet" 2 netmem_packed virtio_user_packed "<=" 0.6
ratio "packed, dropped by XDP: netmem / virtio_user, ns/packet" 2 netmem_packed_drop virtio_user_packed "<=" 0.6
ratio "split: netmem / virtio_user vectorised, ns/packet" 2 netmem_split virtio_user_vec "<=" 1.2
ratio "split, dropped by XDP: netmem / virtio_user vectorised, ns/packet" 2 netmem_split_drop virtio_user_vec "<=" 1.2
if [[ ${#packed[@]} -gt 3 ]]; then
    ratio "packed: netmem / virtio_user vectorised, ns/packet" 2 netmem_packed virtio_user_packed_vec "<=" 1.2
fi
