#!/usr/bin/env bash
# Compares the page pool with a page per packet and with page fragments, on netmem's device in the same process. Needs
# neither DPDK nor root.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 0
have_netmem || exit 0

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    netmem_perf embedded pool,page,frags > "$TMP/all.json"
    for alloc in pool page frags; do
        ROW=$(netmem_row "$alloc" < "$TMP/all.json")
        record "$alloc"
    done
done

echo "netmem perf, embedded device, 64 B:"
table pool page frags
ratio "pool / page, packets/s" 1 pool page ">=" 1.5
ratio "pool / page fragments, packets/s" 1 pool frags ">=" 1.018
