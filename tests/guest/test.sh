#!/usr/bin/env bash
# test.sh netmem|dpdk tap|echo|xsk [DIR]: a Linux guest with its own virtio-net driver on a
# vhost-user back end. The port is a tap in a network namespace of this test (20 pings, then iperf3
# for five seconds each way), or sends every frame back (100 frames), or is one end of a veth pair
# by AF_XDP (netmem only; 20 pings, and iperf3 for two seconds each way with the kernel at the other
# end, which has no offloads, while the guest has all of them; the device is killed at the end, and
# leaves no program). `dpdk` runs the same on testpmd, which shows whether a failure is the guest's
# or ours. DIR keeps the guest between runs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/peers/lib.sh
source "$here/../../bench/peers/lib.sh"

backend=${1:?usage: test.sh netmem|dpdk tap|echo|xsk [DIR]} port=${2:?usage: test.sh netmem|dpdk tap|echo|xsk [DIR]}
dir=${3:-$here/../../target/guest}
case $backend in
    dpdk) begin 192 qemu-system-x86_64 dpdk-testpmd ;;
    netmem)
        begin 0 qemu-system-x86_64
        [[ -x $NETMEM ]] || skip "no binary at $NETMEM (cargo build --release, or set NETMEM)"
        ;;
esac
built=$("$here/build.sh" "$dir")
[[ $built != skipped:* ]] || { echo "$built"; exit 0; }

ns=netmem-guest-$$ tap=nmg$$ socket=$TMP/guest.sock
words=(netmem_addr=10.77.0.2/24 netmem_peer=10.77.0.1)
if [[ $port != echo ]]; then
    [[ $EUID == 0 ]] || skip "a network namespace and a tap need root"
    command -v iperf3 > /dev/null || skip "iperf3 is not installed"
    trap 'cleanup; ip netns del "$ns" 2> /dev/null || true' EXIT
    ip netns add "$ns"
    NETNS=(ip netns exec "$ns")
    # Before there is a tap: no router solicitation may be on its wire.
    "${NETNS[@]}" sysctl -qw net.ipv6.conf.default.disable_ipv6=1
    [[ $port == tap ]] && seconds=5 || seconds=2
    words+=(netmem_ping=20 "netmem_iperf=$seconds")
else
    words+=(netmem_echo=100)
fi

wire=$tap
if [[ $port == xsk ]]; then
    command -v ethtool > /dev/null || skip "ethtool is not installed"
    wire=${tap}w
    ip -n "$ns" link add "$tap" type veth peer name "$wire"
    for end in "$tap" "$wire"; do
        "${NETNS[@]}" ethtool -K "$end" tx off rx off gso off tso off gro off txvlan off rxvlan off > /dev/null
        ip -n "$ns" link set "$end" up
    done
fi

case $backend-$port in
    dpdk-tap) testpmd back "$DEVICE_CPU" "net_vhost0,iface=$socket,queues=1 net_tap0,iface=$tap" io ;;
    dpdk-echo) testpmd back "$DEVICE_CPU" "net_vhost0,iface=$socket,queues=1" io ;;
    netmem-tap) start back "${NETNS[@]}" "$NETMEM" device --listen "$socket" --port "tap:$tap" --queues 1 ;;
    netmem-xsk) start back "${NETNS[@]}" "$NETMEM" device --listen "$socket" --port "xsk:$tap" --queues 1 ;;
    netmem-echo) start back "$NETMEM" device --listen "$socket" --port echo --queues 1 ;;
esac
await_socket back "$socket"

if [[ $port != echo ]]; then
    ip -n "$ns" addr add 10.77.0.1/24 dev "$wire"
    ip -n "$ns" link set "$wire" up
    start iperf3 "${NETNS[@]}" iperf3 -s
fi

SECONDS=0
"$here/run.sh" "$dir" "$socket" "${words[@]}" | tee "$TMP/results" || fail "the guest did not reach its end: $(tail -n 5 "$TMP/back.log")"
echo "guest ran for $SECONDS s"
for want in boot $([[ $port != echo ]] && echo 'ping sent=20 received=20' 'direction=up' 'direction=down' || echo 'echo sent=100 received=100'); do
    grep -q "$want" "$TMP/results" || fail "the guest did not report '$want'"
done
if [[ $port == xsk ]]; then
    ip -n "$ns" link show "$tap" | grep -q xdp || fail "the device has no program on its interface"
    kill -KILL "${PID[back]}"
    wait "${PID[back]}" || true
    unset "PID[back]"
    ! ip -n "$ns" link show "$tap" | grep -q xdp || fail "the device was killed, and its program is still there"
fi
echo "passed: guest on $backend, $port"
