#!/usr/bin/env bash
# Compares the page pool with a page per packet and with page fragments, on netmem's device in the
# same process. Needs neither DPDK nor root.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 0
have_netmem || exit 0
have_examples || exit 0

# row ALLOC: "PACKETS_PER_SECOND NS_PER_PACKET" of the report. Fails if pages were not returned.
row() {
    jq -er --arg alloc "$1" '
        .[$alloc] as $pool
        | if $pool | .allocated > 0 and .allocated == .returned and .mapped == .unmapped and .inflight == 0 and .leaked == 0
            then . else error("the pool does not balance: \($pool)") end
        | .variants[] | select(.alloc == $alloc and .unit == "packets/s") | "\(.median) \(.ns_per_packet)"'
}

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    hand_over
    "$NETMEM" perf --device embedded --mode small --size 64 --alloc pool,page,frags --queues 1 --consumer same --xdp pass --ring 1024 \
        --duration "$SECS" --runs 1 --cpus "net=$DRIVER_CPU,device=$DEVICE_CPU" --json > "$TMP/all.json"
    for alloc in pool page frags; do
        ROW=$(row "$alloc" < "$TMP/all.json")
        record "$alloc"
    done
done

echo "netmem perf, embedded device, 64 B:"
table pool page frags
ratio "pool / page, packets/s" 1 pool page ">=" 1.5
ratio "pool / page fragments, packets/s" 1 pool frags ">=" 1.018
