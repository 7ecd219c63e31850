#!/usr/bin/env bash
# The page pool against a page per packet, on netmem's device in the same process. Needs neither DPDK nor root.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 0
XDP=pass   # a page that the program drops stays where it is, and would not be compared with one that goes
have_netmem || exit 0

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    netmem_perf embedded both > "$TMP/both.json"
    for alloc in pool page; do
        ROW=$(netmem_row "$alloc" < "$TMP/both.json")
        record "$alloc"
    done
done

echo "netmem perf, embedded device, 64 B:"
table pool page
ratio "pool / page, packets/s" 1 pool page ">=" 1.5
