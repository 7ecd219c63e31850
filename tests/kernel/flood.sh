#!/usr/bin/env bash
# The Linux kernel floods a tap that netmem reads: UDP and ping, in a network namespace, counted on
# both sides.
#
# How the kernel counts, found by trying (6.18): `tx_packets` of a tap are the frames its reader
# took, added as it reads; `tx_dropped` those that found the tap's queue full; their sum is what was
# sent. So received + netmem's own drops must equal tx_packets exactly, and tx_packets + tx_dropped
# what the senders say. UdpOutDatagrams does not do: it counts a segmented send once. The counters
# go with a tap that is not persistent, so they are read while netmem still runs. No frame is on the
# wire but ours: IPv6 is off before there is a tap (router solicitations), and the neighbour is
# permanent (ARP).
#
# Env: NETMEM, FRAMES (400000), PINGS (200).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/peers/lib.sh
source "$here/../../bench/peers/lib.sh"

FRAMES=${FRAMES:-400000} PINGS=${PINGS:-200}
begin 0 python3 ping ip
[[ $EUID == 0 ]] || skip "a network namespace and a tap need root"
[[ -c /dev/net/tun ]] || skip "there is no /dev/net/tun"
[[ -x $NETMEM ]] || skip "no binary at $NETMEM (cargo build --release, or set NETMEM)"

ns=netmem-kernel-$$ tap=nmk$$
trap 'cleanup; ip netns del "$ns" 2> /dev/null || true' EXIT
ip netns add "$ns"
NETNS=(ip netns exec "$ns")
"${NETNS[@]}" sysctl -qw net.ipv6.conf.default.disable_ipv6=1

# In small mode the tap gets no segmentation offload, so that each frame of a segmented send counts
# once here and there. The run ends when it is told to, however long sending takes here.
"${NETNS[@]}" "$NETMEM" perf --device embedded --port "tap:$tap" --mode small --alloc pool --consumer same \
    --duration 3600 --runs 1 --json > "$TMP/perf.json" 2> "$TMP/perf.log" &
PID[perf]=$!
until [[ -n $(ip -n "$ns" link show "$tap" 2> /dev/null) ]]; do
    kill -0 "${PID[perf]}" 2> /dev/null || fail "netmem made no tap: $(< "$TMP/perf.log")"
    sleep 0.1
done
ip -n "$ns" addr add 10.78.0.1/24 dev "$tap"
ip -n "$ns" link set "$tap" up
ip -n "$ns" neigh add 10.78.0.2 lladdr 02:00:00:00:00:02 dev "$tap"

flood=$("${NETNS[@]}" python3 "$here/flood.py" 10.78.0.2 "$FRAMES")
# No station answers, which ping reports as a failure.
pings=$({ "${NETNS[@]}" ping -q -f -c "$PINGS" -W 1 10.78.0.2 || true; } | awk '/packets transmitted/ { print $1 }')
# What is still queued for the reader counts once it is read, which takes longer on a machine that
# has much else to do.
for _ in {1..600}; do
    sleep 0.1
    kill -0 "${PID[perf]}" 2> /dev/null || fail "netmem ended before the traffic did"
    read -r taken dropped < <(ip -n "$ns" -s -j link show "$tap" | jq -r '.[0].stats64.tx | "\(.packets) \(.dropped)"')
    refused=$("${NETNS[@]}" tc -s -j qdisc show dev "$tap" | jq '[.[].drops] | add // 0')
    ((taken + dropped + refused < flood + pings)) || break
done
sleep 0.5                                              # the driver's thread receives the last ones
kill -TERM "${PID[perf]}"
wait "${PID[perf]}" || fail "netmem perf: $(< "$TMP/perf.log")"
unset "PID[perf]"
seen=$(jq '[.variants[] | .frames + .dropped] | add' "$TMP/perf.json")

echo "sent $flood UDP + $pings ping; the kernel's tap: $taken taken, $dropped dropped, $refused dropped by its qdisc; netmem: $seen"
((taken + dropped + refused == flood + pings)) || fail "the tap does not account for what was sent"
((seen == taken)) || fail "netmem accounts for $seen of the $taken frames that it took"
echo "passed: kernel traffic"
