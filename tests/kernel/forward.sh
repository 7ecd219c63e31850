#!/usr/bin/env bash
# TCP between two network namespaces, through two taps, two devices, and our driver between them:
# examples/forward.rs.
#
#   namespace a: iperf3 ── tap ── netmem device ──┐
#                                                 ├── forward: two drivers in one process
#   namespace b: iperf3 ── tap ── netmem device ──┘
#
# Each side with offloads and without, in all four combinations: bytes arrive as they were sent, in
# both directions, compared by their hash. With iperf3, the throughput of each combination is
# printed, and how many times that with offloads on both sides is that without any. A kernel that
# sends and receives segments of 64 KiB has 40 times fewer frames to look at.
#
# Argument: the example's binary, if it is not beside NETMEM.
# Env: NETMEM, SECS (2), MIB (32), BASE (another netmem, for the devices of one more row "off off"),
# MTU (1500), DEVICE_OPTIONS (more arguments of `netmem device`).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/peers/lib.sh
source "$here/../../bench/peers/lib.sh"

MIB=${MIB:-32} MTU=${MTU:-1500} DEVICE_OPTIONS=${DEVICE_OPTIONS:-}
begin 0 python3 ip
[[ $EUID == 0 ]] || skip "network namespaces and taps need root"
[[ -c /dev/net/tun ]] || skip "there is no /dev/net/tun"
[[ -x $NETMEM ]] || skip "no binary at $NETMEM (cargo build --release, or set NETMEM)"
FORWARD=${1:-$(dirname "$NETMEM")/examples/forward}
[[ -x $FORWARD ]] || skip "no binary at $FORWARD (cargo build --release -p netmem --all-features --example forward, or name it as the argument)"

a=netmem-a-$$ b=netmem-b-$$
trap 'cleanup; for ns in $a $b; do ip netns del "$ns" 2> /dev/null || true; done' EXIT
for ns in "$a" "$b"; do
    ip netns add "$ns"
    ip netns exec "$ns" sysctl -qw net.ipv6.conf.default.disable_ipv6=1
    ip -n "$ns" link set lo up
done

# device SIDE BINARY ADDRESS OPTIONS
device() {
    local ns=netmem-$1-$$
    rm -f "$TMP/$1.sock"
    # shellcheck disable=SC2086
    ip netns exec "$ns" "$2" device --listen "$TMP/$1.sock" --port "tap:nmf$1" --mtu "$MTU" $4 > "$TMP/$1.log" 2>&1 &
    PID[$1]=$!
    until [[ -S $TMP/$1.sock ]] && ip -n "$ns" link show "nmf$1" > /dev/null 2>&1; do
        kill -0 "${PID[$1]}" 2> /dev/null || fail "device $1: $(< "$TMP/$1.log")"
        sleep 0.05
    done
    ip -n "$ns" addr add "$3/24" dev "nmf$1"
    ip -n "$ns" link set "nmf$1" mtu "$MTU" up
}

# end NAME: asks a process to end, and waits for it.
end() {
    kill -TERM "${PID[$1]}" 2> /dev/null || true
    wait "${PID[$1]}" 2> /dev/null || true
    unset "PID[$1]"
}

# send FROM-SIDE TO-SIDE ADDRESS: random bytes by TCP; their hashes must be equal.
send() {
    local got sent
    ip netns exec "netmem-$2-$$" timeout 120 python3 "$here/stream.py" receive "$3" 5555 > "$TMP/got" &
    PID[receive]=$!
    sent=$(ip netns exec "netmem-$1-$$" timeout 120 python3 "$here/stream.py" send "$3" 5555 "$MIB") || fail "sending from $1: $(cat "$TMP"/*.log)"
    wait "${PID[receive]}" || fail "receiving at $2"
    unset "PID[receive]"
    got=$(< "$TMP/got")
    [[ $got == "$sent" ]] || fail "sent from $1 to $2: $sent, received: $got"
}

declare -A RATE=()
# row LABEL OFFLOAD-A OFFLOAD-B GRO DEVICE-BINARY DEVICE-OPTIONS
row() {
    local rate=-
    device a "$5" 10.79.0.1 "$6"
    device b "$5" 10.79.0.2 "$6"
    # shellcheck disable=SC2086
    "$FORWARD" "$TMP/a.sock,$2" "$TMP/b.sock,$3" $4 > "$TMP/forward.log" 2>&1 &
    PID[forward]=$!
    send a b 10.79.0.2
    send b a 10.79.0.1
    if command -v iperf3 > /dev/null; then
        ip netns exec "$b" iperf3 -s -1 > /dev/null 2>&1 &
        PID[iperf]=$!
        until [[ -n $(ip netns exec "$b" ss -Hltn sport = :5201) ]]; do sleep 0.05; done
        rate=$(ip netns exec "$a" iperf3 -c 10.79.0.2 -t "$SECS" -O 1 -J --connect-timeout 5000 | jq -r '.end.sum_received.bits_per_second // error(.error) | . / 1e9 * 100 | round / 100') ||
            fail "iperf3 from a to b: $(cat "$TMP"/*.log)"
        end iperf
    fi
    kill -0 "${PID[forward]}" 2> /dev/null || fail "forward ended: $(< "$TMP/forward.log")"
    end a
    end b
    for _ in {1..100}; do kill -0 "${PID[forward]}" 2> /dev/null || break; sleep 0.05; done
    end forward
    ! grep -q "[1-9][0-9]* dropped" "$TMP/forward.log" || fail "the forwarder dropped packets: $(< "$TMP/forward.log")"
    RATE[$1]=$rate
    echo "$1: $((2 * MIB)) MiB intact; $rate Gbit/s; $(grep "^a to b" "$TMP/forward.log" || true)"
}

row "off off" none none "" "$NETMEM" "$DEVICE_OPTIONS"
row "on  on " all all "" "$NETMEM" "$DEVICE_OPTIONS"
row "on  off" all none gro "$NETMEM" "$DEVICE_OPTIONS"
row "off on " none all gro "$NETMEM" "$DEVICE_OPTIONS"
[[ -z ${BASE:-} ]] || row "off off, base" none none "" "$BASE" ""
if [[ ${RATE[off off]} != - && ${RATE[on  on ]} != - ]]; then
    ratio=$(jq -n "${RATE[on  on ]} / ${RATE[off off]} * 10 | round / 10")
    echo "offloads on both sides: $ratio times the throughput without (the goal is 4)"
fi
echo "passed: forwarding"
