#!/usr/bin/env bash
# What does an AF_XDP program cost? Netmem's queues, an xsk-rs program and DPDK's net_af_xdp take
# turns on one end of a veth pair. The kernel's live frames come in at the other end.
#
# Jobs (JOBS): `drop` receives and drops, `echo` sends each frame back with its addresses exchanged,
# `thread` hands each packet to a second thread, which reads 16 bytes and lets it go. DPDK's program
# (port/dpdk.c) has no job like the last.
#
# More settings: WORKER_CPU (where the second thread is: the sender's CPU, unless said otherwise),
# XSK_PEER, XDP_FLOOD, XSK_RS (binaries).
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

here=$(cd "$(dirname "$0")" && pwd)
XSK_PEER=${XSK_PEER:-$here/../../target/release/examples/xsk_peer}
XDP_FLOOD=${XDP_FLOOD:-$here/../../target/release/examples/xdp_flood}
XSK_RS=${XSK_RS:-$here/xsk_rs/target/release/xsk-rs-peer}
read -ra JOBS <<< "${JOBS:-drop echo thread}"
MAC=02:00:00:00:00:02

[[ $EUID == 0 ]] || skip "network namespaces and AF_XDP need root"
memory=0
! pkg-config --exists libdpdk 2> /dev/null || memory=192
begin $memory ip ethtool perf
dpdk_system
for binary in "$XSK_PEER" "$XDP_FLOOD"; do
    [[ -x $binary ]] || skip "no binary at $binary (cargo build --release -p netmem-bench --example xsk_peer --example xdp_flood)"
done
have_xsk_rs=1
if [[ ! -x $XSK_RS ]]; then
    echo "skipped: xsk-rs rows: no binary at $XSK_RS (apt-get install clang libclang-dev libelf-dev m4;" \
        "cargo build --release --manifest-path bench/peers/xsk_rs/Cargo.toml)"
    have_xsk_rs=
fi
WORKER_CPU=${WORKER_CPU:-$DEVICE_CPU}

# ---- the wire: a veth pair in a namespace of its own, one queue, no offloads, no addresses

namespace=netmem-xsk-$$
finish() {
    cleanup
    ip netns del $namespace 2> /dev/null || true
}
ip netns add $namespace || skip "network namespaces cannot be made"
trap finish EXIT
NETNS=(ip netns exec "$namespace")
"${NETNS[@]}" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1 2> /dev/null || true
"${NETNS[@]}" ip link add wire type veth peer name port
for name in wire port; do
    "${NETNS[@]}" ethtool -K $name rx off tx off gso off tso off gro off rxvlan off txvlan off > /dev/null 2>&1 || true
done
"${NETNS[@]}" ip link set port address $MAC
"${NETNS[@]}" ip link set wire up
"${NETNS[@]}" ip link set port up

# flood: the sender, on its CPU until it is stopped.
flood() { start flood "${NETNS[@]}" taskset -c "$DEVICE_CPU" "$XDP_FLOOD" wire $MAC; }

# sample: begins to sample the receiver's CPU. The counter is a timer of the kernel's: it needs no
# hardware, and is far finer than the ticks that `times` counts.
sample() {
    rm -f "$TMP/perf.data"
    start perf perf record -q -k CLOCK_MONOTONIC -e cpu-clock -F 19997 -C "$DRIVER_CPU" -o "$TMP/perf.data"
    for _ in {1..100}; do [[ ! -s $TMP/perf.data ]] || break; sleep 0.05; done
    sleep 0.2
}

# parts PID BEGIN_NS ELAPSED_NS: ends sampling. Leaves in KERNEL which part of this time the process
# was in the kernel, and in USER which part it was in itself.
parts() {
    local rate
    stop perf
    read -r KERNEL USER rate < <(perf script --ns -i "$TMP/perf.data" -F pid,time,ip 2> /dev/null |
        awk -v pid="$1" -v begin="$2" -v elapsed="$3" '{ at = $2 * 1e9 } at < begin || at > begin + elapsed { next }
            { all++ } $1 == pid { if ($3 ~ /^ffff/) kernel++; else user++ }
            END { if (all) printf "%.5f %.5f %d\n", kernel / all, user / all, all * 1e9 / elapsed; else print 0, 0, 0 }')
    # Where a sample in two is missing, perf did not have the CPU, or began too late.
    ((rate > 10000)) || fail "perf took $rate samples a second of 19997: the machine is not quiet"
}

# row JOB VARIANT PACKETS ELAPSED_NS BUSY_NS IDLE_NS: where a job makes system calls, samples say
# what the process and the kernel took of the CPU's time, because BUSY_NS, of polls that found
# packets, has both in it. Samples also hit polls that found nothing, so their time is taken off.
row() {
    local job=$1 variant=$2 pps ns
    read -r pps ns < <(awk -v job="$job" -v user="$USER" -v packets="$3" -v elapsed="$4" -v busy="$5" -v idle="$6" 'BEGIN {
        if (job == "echo") busy = user * elapsed - idle
        print packets * 1e9 / elapsed, packets ? busy / packets : 0 }')
    ROW="$pps $ns"
    awk -v pps="$pps" -v kernel="$KERNEL" 'BEGIN { print (pps > 0 ? kernel * 1e9 / pps : 0) }' >> "$TMP/$job-$variant.kernel"
    record "$job-$variant"
}

# program JOB VARIANT BINARY: netmem's program or that of xsk-rs; both have the same arguments and
# the same result.
program() {
    local job=$1 variant=$2 binary=$3 second=() packets elapsed busy idle began pid log=$TMP/peer.log
    [[ $job != thread ]] || second=("$WORKER_CPU")
    start peer "${NETNS[@]}" "$binary" port "$job" "$(awk -v s="$SECS" 'BEGIN { print int(s * 1000) }')" "$DRIVER_CPU" "${second[@]}"
    await peer '^ready'
    pid=${PID[peer]} KERNEL=0 USER=0
    [[ $job != echo ]] || sample
    flood
    wait "$pid" || { cat "$log" >&2; fail "$variant: $job"; }
    unset "PID[peer]"
    stop flood
    read -r packets elapsed busy idle began < <(sed -n 's/^result //p' "$log")
    [[ $job != echo ]] || parts "$pid" "$began" "$elapsed"
    row "$job" "$variant" "$packets" "$elapsed" "$busy" "$idle"
}

# dpdk JOB: port/dpdk.c on the same interface, with as many buffers, entries and packets in a burst.
dpdk() {
    local job=$1 work=count packets elapsed busy idle began pid log=$TMP/peer.log
    [[ $job != echo ]] || work="echo"
    dpdk_port peer "${DPDK[0]}" "$DRIVER_CPU" "net_af_xdp0,iface=port,start_queue=0,queue_count=1,force_copy=1,busy_budget=0" \
        receive 2048 "$BURST" 0.3 "$SECS" "$work"
    await peer '^ready'
    pid=${PID[peer]} KERNEL=0 USER=0
    [[ $job != echo ]] || sample
    flood
    wait "$pid" || { cat "$log" >&2; fail "DPDK: $job"; }
    unset "PID[peer]"
    stop flood
    read -r packets elapsed busy idle began < <(awk '/^packets/ { print $2, $4, $6, $10, $12 }' "$log")
    [[ $job != echo ]] || parts "$pid" "$began" "$elapsed"
    row "$job" dpdk "$packets" "$elapsed" "$busy" "$idle"
}

peers_of() {
    [[ -z $have_xsk_rs ]] || echo xsk_rs
    [[ ${#DPDK[@]} == 0 || $1 == thread ]] || echo dpdk
}

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    for job in "${JOBS[@]}"; do
        program "$job" netmem "$XSK_PEER"
        for peer in $(peers_of "$job"); do
            case $peer in
                xsk_rs) program "$job" xsk_rs "$XSK_RS" ;;
                dpdk) dpdk "$job" ;;
            esac
        done
    done
done

echo "AF_XDP on a veth pair, copy mode, 60 B; receiver on CPU $DRIVER_CPU, sender on CPU $DEVICE_CPU, second thread on CPU $WORKER_CPU:"
for job in "${JOBS[@]}"; do
    mapfile -t peers < <(peers_of "$job")
    table "$job-netmem" "${peers[@]/#/$job-}"
    if [[ $job == echo ]]; then
        for variant in netmem "${peers[@]}"; do
            spread < "$TMP/echo-$variant.kernel" | xargs printf "%-18s in the kernel beside that: %.0f (%.0f..%.0f) ns/packet\n" "echo-$variant"
        done
    fi
done
echo "goals:"
for job in "${JOBS[@]}"; do
    for peer in $(peers_of "$job"); do
        ratio "$job: netmem / $peer, packets/s" 1 "$job-netmem" "$job-$peer" ">=" 1
        ratio "$job: netmem / $peer, ns of user time a packet" 2 "$job-netmem" "$job-$peer" "<=" 1
    done
done
