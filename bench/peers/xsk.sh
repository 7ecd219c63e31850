#!/usr/bin/env bash
# What does an AF_XDP program cost? Netmem's queues, xsk-rs, netring and DPDK's net_af_xdp take
# turns on one end of a veth pair. The kernel's live frames come in at the other end.
#
# Jobs (JOBS): `drop` receives and drops, `echo` sends each frame back with its addresses exchanged,
# `thread` hands each packet to a second thread, which reads 16 bytes and lets it go, `transmit`
# sends as fast as the kernel accepts, without the sender at the other end.
#
# Variants with `_busy` poll busily: the driver works in the system calls of the program, and not
# after the sender's. They are left out where the driver does not tell a socket what to poll: that
# of veth does not on Linux 6.18. `kernel` is an XDP program that drops: the upper bound of `drop`.
#
# More settings: WORKER_CPU (where the second thread is: the sender's CPU, unless said otherwise),
# XSK_RS, NETRING (binaries).
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

XSK_RS=${XSK_RS:-$HERE/xsk_rs/target/release/xsk-rs-peer}
NETRING=${NETRING:-$HERE/netring/target/release/netring-peer}
read -ra JOBS <<< "${JOBS:-drop echo thread transmit}"
MAC=02:00:00:00:00:02
declare -A VARIANTS=(
    [drop]="netmem xsk_rs netring dpdk netmem_busy dpdk_busy kernel"
    [echo]="netmem xsk_rs netring dpdk netmem_busy dpdk_busy"
    [thread]="netmem xsk_rs"
    [transmit]="netmem xsk_rs netring dpdk"
)
declare -A PROGRAM=([netmem]=$EXAMPLES/xsk_peer [kernel]=$EXAMPLES/xdp_drop)
# The largest ratio of user time that is a goal, where it is not 1.
declare -A USER_GOAL=([drop-xsk_rs]=0.8 [echo-xsk_rs]=0.8 [drop-dpdk]=0.7 [echo-dpdk]=0.7)

[[ $EUID == 0 ]] || skip "network namespaces and AF_XDP need root"
memory=0
! pkg-config --exists libdpdk 2> /dev/null || memory=192
begin $memory ip ethtool perf
dpdk_system
[[ ${#DPDK[@]} == 0 ]] || PROGRAM[dpdk]=$TMP/dpdk-port
for binary in xsk_peer xdp_flood xdp_drop turns; do
    [[ -x $EXAMPLES/$binary ]] ||
        skip "no binary at $EXAMPLES/$binary (cargo build --release -p netmem-bench --example xsk_peer --example xdp_flood --example xdp_drop --example turns)"
done
if [[ -x $XSK_RS ]]; then
    PROGRAM[xsk_rs]=$XSK_RS
else
    echo "skipped: xsk-rs rows: no binary at $XSK_RS (apt-get install clang libclang-dev libelf-dev m4;" \
        "cargo build --release --manifest-path bench/peers/xsk_rs/Cargo.toml)"
fi
if [[ -x $NETRING ]]; then
    PROGRAM[netring]=$NETRING
else
    echo "skipped: netring rows: no binary at $NETRING (cargo build --release --manifest-path bench/peers/netring/Cargo.toml)"
fi
echo "left out: busy polling of xsk-rs (no option for it) and of netring (no call in which the driver polls);" \
    "\`thread\` of netring (a packet is a loan that ends with its batch) and of DPDK (its program has no such job)"
WORKER_CPU=${WORKER_CPU:-$DEVICE_CPU}
BUSY=1

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
flood() { start flood "${NETNS[@]}" taskset -c "$DEVICE_CPU" "$EXAMPLES/xdp_flood" wire $MAC; }

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

# sampled JOB VARIANT: whether the job makes system calls, so that samples must tell the process
# from the kernel.
sampled() { [[ $1 == echo || $1 == transmit || $2 == *_busy ]]; }

# row JOB VARIANT PACKETS ELAPSED_NS BUSY_NS IDLE_NS: where a job makes system calls, samples say
# what the process and the kernel took of the CPU's time, because BUSY_NS, of polls that found
# packets, has both in it. Samples also hit polls that found nothing, so their time is taken off in
# `echo`. With busy polling such a poll is a system call, and a sender has none: all time is theirs.
row() {
    local job=$1 variant=$2 packets=$3 elapsed=$4 busy=$5 idle=$6
    if sampled "$job" "$variant"; then
        [[ $job == echo && $variant != *_busy ]] || idle=0
        busy=$(awk -v user="$USER" -v elapsed="$elapsed" -v idle="$idle" 'BEGIN { print user * elapsed - idle }')
        awk -v kernel="$KERNEL" -v packets="$packets" -v elapsed="$elapsed" 'BEGIN { print (packets > 0 ? kernel * elapsed / packets : 0) }' >> "$TMP/$job-$variant.kernel"
    fi
    ROW=$(awk -v packets="$packets" -v elapsed="$elapsed" -v busy="$busy" 'BEGIN { print packets * 1e9 / elapsed, packets ? busy / packets : 0 }')
    record "$job-$variant"
}

# defer POLLS NANOSECONDS: how long the driver leaves polling to a program that polls busily.
defer() {
    # shellcheck disable=SC2016
    "${NETNS[@]}" bash -c 'cd /sys/class/net/port && echo "$1" > napi_defer_hard_irqs && echo "$2" > gro_flush_timeout' - "$1" "$2" ||
        fail "the interface cannot defer interrupts"
}

# begin_peer JOB VARIANT: starts a program on the interface. All but DPDK's have the same arguments.
# port/dpdk.c has as many buffers, entries and packets in a burst as they have.
begin_peer() {
    local job=$1 variant=$2 arguments=() work=$1 budget=0
    case $variant in
        dpdk*)
            [[ $job != drop ]] || work=count
            [[ $variant != *_busy ]] || budget=64
            dpdk_port peer "${DPDK[0]}" "$DRIVER_CPU" "net_af_xdp0,iface=port,start_queue=0,queue_count=1,force_copy=1,busy_budget=$budget" \
                receive 2048 "$BURST" 0.3 "$SECS" "$work"
            ;;
        *)
            [[ $job != thread ]] || arguments+=("$WORKER_CPU")
            [[ $variant != *_busy ]] || arguments+=(--busy-poll)
            start peer "${NETNS[@]}" "${PROGRAM[${variant%_busy}]}" port "$job" "$(awk -v s="$SECS" 'BEGIN { print int(s * 1000) }')" \
                "$DRIVER_CPU" "${arguments[@]}"
            ;;
    esac
    await peer '^ready'
}

# measure JOB VARIANT
measure() {
    local job=$1 variant=$2 packets elapsed busy idle began pid log=$TMP/peer.log
    hand_over
    [[ $variant != *_busy ]] || defer 2 200000
    # Before the program, because one that sends does not wait.
    ! sampled "$job" "$variant" || sample
    begin_peer "$job" "$variant"
    pid=${PID[peer]}
    [[ $job == transmit ]] || flood
    wait "$pid" || {
        if [[ $variant != netmem_busy ]] || ! grep -q "no NAPI" "$log"; then
            cat "$log" >&2
            fail "$variant: $job"
        fi
        BUSY=
    }
    unset "PID[peer]"
    stop flood
    [[ $variant != *_busy ]] || defer 0 0
    if [[ $variant == *_busy && -z $BUSY ]]; then
        stop perf
        echo "left out: busy polling: $(sed -n 's/^Error: //p' "$log")"
        return
    fi
    read -r packets elapsed busy idle began < <(awk '/^result/ { print $2, $3, $4, $5, $6 } /^packets/ { print $2, $4, $6, $10, $12 }' "$log")
    ! sampled "$job" "$variant" || parts "$pid" "$began" "$elapsed"
    row "$job" "$variant" "$packets" "$elapsed" "$busy" "$idle"
}

# variants JOB: those whose programs are here.
variants() {
    local variant
    for variant in ${VARIANTS[$1]}; do
        [[ -z ${PROGRAM[${variant%_busy}]+there} || ($variant == *_busy && -z $BUSY) ]] || echo "$variant"
    done
}

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    for job in "${JOBS[@]}"; do
        for variant in $(variants "$job"); do
            [[ $variant == *_busy && -z $BUSY ]] || measure "$job" "$variant"
        done
    done
done

echo "AF_XDP on a veth pair, copy mode, 60 B; receiver on CPU $DRIVER_CPU, sender on CPU $DEVICE_CPU, second thread on CPU $WORKER_CPU:"
for job in "${JOBS[@]}"; do
    mapfile -t names < <(variants "$job" | grep -v kernel)
    table "${names[@]/#/$job-}"
    # Its packets cost no time of a process.
    [[ $job != drop ]] ||
        awk '{ print $1 / 1e6 }' "$TMP/drop-kernel.rows" | spread | xargs printf '%-26s %8.2f (%.2f..%.2f) Mpps: the upper bound\n' drop-kernel
    for variant in "${names[@]}"; do
        ! sampled "$job" "$variant" ||
            spread < "$TMP/$job-$variant.kernel" | xargs printf "%-18s in the kernel beside that: %.0f (%.0f..%.0f) ns/packet\n" "$job-$variant"
    done
done
echo "goals:"
for job in "${JOBS[@]}"; do
    for variant in $(variants "$job"); do
        case $variant in
            netmem) ;;
            kernel) ratio "$job: netmem / kernel, packets/s" 1 "$job-netmem" "$job-kernel" ;;
            netmem_busy) ratio "$job: netmem_busy / netmem, packets/s" 1 "$job-netmem_busy" "$job-netmem" ;;
            *)
                ours=netmem
                [[ $variant != *_busy ]] || ours=netmem_busy
                ratio "$job: $ours / $variant, packets/s" 1 "$job-$ours" "$job-$variant" ">=" 1
                ratio "$job: $ours / $variant, ns of user time a packet" 2 "$job-$ours" "$job-$variant" "<=" "${USER_GOAL[$job-${variant%_busy}]:-1}"
                ;;
        esac
    done
done
