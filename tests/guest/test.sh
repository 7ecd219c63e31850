#!/usr/bin/env bash
# test.sh netmem|dpdk tap|echo [DIR]: a Linux guest with its own virtio-net driver on a vhost-user back end. The port is a tap in a
# network namespace of this test (20 pings, then iperf3 for five seconds each way), or sends every frame back (100 frames).
# `dpdk` runs the same on testpmd, which shows whether a failure is the guest's or ours. DIR keeps the guest between runs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/peers/lib.sh
source "$here/../../bench/peers/lib.sh"

backend=${1:?usage: test.sh netmem|dpdk tap|echo [DIR]} port=${2:?usage: test.sh netmem|dpdk tap|echo [DIR]}
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
if [[ $port == tap ]]; then
    [[ $EUID == 0 ]] || skip "a network namespace and a tap need root"
    command -v iperf3 > /dev/null || skip "iperf3 is not installed"
    trap 'cleanup; ip netns del "$ns" 2> /dev/null || true' EXIT
    ip netns add "$ns"
    NETNS=(ip netns exec "$ns")
    # Before there is a tap: no router solicitation may be on its wire.
    "${NETNS[@]}" sysctl -qw net.ipv6.conf.default.disable_ipv6=1
    words+=(netmem_ping=20 netmem_iperf=5)
else
    words+=(netmem_echo=100)
fi

case $backend-$port in
    dpdk-tap) testpmd back "$DEVICE_CPU" "net_vhost0,iface=$socket,queues=1 net_tap0,iface=$tap" io ;;
    dpdk-echo) testpmd back "$DEVICE_CPU" "net_vhost0,iface=$socket,queues=1" io ;;
    netmem-tap) start back "${NETNS[@]}" "$NETMEM" device --listen "$socket" --port "tap:$tap" --queues 1 ;;
    netmem-echo) start back "$NETMEM" device --listen "$socket" --port echo --queues 1 ;;
esac
await_socket back "$socket"

if [[ $port == tap ]]; then
    ip -n "$ns" addr add 10.77.0.1/24 dev "$tap"
    ip -n "$ns" link set "$tap" up
    start iperf3 "${NETNS[@]}" iperf3 -s
fi

SECONDS=0
"$here/run.sh" "$dir" "$socket" "${words[@]}" | tee "$TMP/results" || fail "the guest did not reach its end: $(tail -n 5 "$TMP/back.log")"
echo "guest ran for $SECONDS s"
for want in boot $([[ $port == tap ]] && echo 'ping sent=20 received=20' 'direction=up' 'direction=down' || echo 'echo sent=100 received=100'); do
    grep -q "$want" "$TMP/results" || fail "the guest did not report '$want'"
done
echo "passed: guest on $backend, $port"
