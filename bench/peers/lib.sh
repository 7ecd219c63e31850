# Shared by the comparisons in this folder: set up, run one side, take medians, leave nothing behind.
# shellcheck shell=bash

RUNS=${RUNS:-7}                                        # interleaved rounds
SECS=${SECS:-2}                                        # seconds measured in each
NETMEM=${NETMEM:-$(dirname "${BASH_SOURCE[0]}")/../../target/release/netmem}
DRIVER_CPU=${DRIVER_CPU:-0}                            # where the side under test polls
DEVICE_CPU=${DEVICE_CPU:-1}                            # where its back end polls

# virtio_user's receive paths. On a split ring, in_order=1 is its default and wins over vectorized=1 without a word; mrg_rxbuf=1, the
# other default, rules it out too. On a packed ring vectors need in_order=1, and AVX-512. Each run therefore checks in the log which
# path was really taken.
declare -A VIRTIO_USER=(
    [virtio_user]=""
    [virtio_user_vec]=",mrg_rxbuf=0,in_order=0,vectorized=1"
    [virtio_user_packed]=",packed_vq=1,mrg_rxbuf=0"
    [virtio_user_packed_vec]=",packed_vq=1,mrg_rxbuf=0,in_order=1,vectorized=1"
)
declare -A RX_PATH=(
    [virtio_user]="inorder|mergeable buffer"           # in order if the back end offers it, as DPDK's does
    [virtio_user_vec]="vectorized"
    [virtio_user_packed]="packed ring standard"
    [virtio_user_packed_vec]="packed ring vectorized"
)

skip() { echo "skipped: $*"; exit 0; }
fail() { echo "failed: $*" >&2; exit 1; }

# ---- set up and clean up

declare -A PID=()                                      # background processes by name
TMP=
HUGEPAGES=/sys/kernel/mm/hugepages/hugepages-2048kB
HUGEPAGES_BEFORE=
EAL=()                                                 # more options for DPDK
NETNS=()                                               # `ip netns exec NAME` where a side must run in one

cleanup() {
    local name
    for name in "${!PID[@]}"; do stop "$name" || true; done
    [[ -z $HUGEPAGES_BEFORE ]] || echo "$HUGEPAGES_BEFORE" > $HUGEPAGES/nr_hugepages
    [[ -z $TMP ]] || rm -rf "$TMP"
}

# begin MEBIBYTES COMMAND...: skips if a command is missing, otherwise provides $TMP and that much free huge-page memory.
begin() {
    local want=$(($1 / 2)) command cpu free
    shift
    for command in jq "$@"; do
        command -v "$command" > /dev/null || skip "$command is not installed"
    done
    for cpu in "$DRIVER_CPU" "$DEVICE_CPU"; do
        taskset -c "$cpu" true 2> /dev/null || skip "there is no CPU $cpu, and each side needs one of its own"
    done
    trap cleanup EXIT
    trap 'exit 130' INT TERM
    TMP=$(mktemp -d "${TMPDIR:-/tmp}/netmem-peers.XXXXXX")
    ((want > 0)) || return 0
    [[ $EUID == 0 ]] || skip "DPDK and reserving huge pages need root"
    [[ -w $HUGEPAGES/nr_hugepages ]] || skip "this kernel has no 2 MiB huge pages"
    free=$(< $HUGEPAGES/free_hugepages)
    if ((free < want)); then
        # Surplus pages go by themselves: others still use them after a reservation was given back.
        HUGEPAGES_BEFORE=$(($(< $HUGEPAGES/nr_hugepages) - $(< $HUGEPAGES/surplus_hugepages)))
        echo $((HUGEPAGES_BEFORE + want - free)) > $HUGEPAGES/nr_hugepages
        free=$(< $HUGEPAGES/free_hugepages)
        ((free >= want)) || skip "$want huge pages of 2 MiB are needed, and only $free could be had"
    fi
}

# have_netmem: true, or says why its rows will be missing.
have_netmem() {
    [[ -x $NETMEM ]] || { echo "skipped: netmem rows: no binary at $NETMEM (cargo build --release, or set NETMEM)"; false; }
}

# start NAME COMMAND...: in the background, input from a FIFO (see tell), output to $TMP/NAME.log.
start() {
    local name=$1
    shift
    rm -f "$TMP/$name.in"
    : > "$TMP/$name.log"
    mkfifo "$TMP/$name.in"
    # Opened for reading too: the process must not see end of file between two commands.
    "$@" <> "$TMP/$name.in" > "$TMP/$name.log" 2>&1 &
    PID[$name]=$!
}

tell() { printf '%s\n' "$2" > "$TMP/$1.in"; }

# await NAME REGEX: until its log says so.
await() {
    local _
    for _ in {1..200}; do
        grep -aqE "$2" "$TMP/$1.log" && return
        kill -0 "${PID[$1]}" 2> /dev/null || break
        sleep 0.1
    done
    tail -n 20 "$TMP/$1.log" >&2
    fail "$1 never said '$2'"
}

await_socket() {
    local _
    for _ in {1..100}; do
        [[ -S $2 ]] && return
        kill -0 "${PID[$1]}" 2> /dev/null || break
        sleep 0.1
    done
    tail -n 20 "$TMP/$1.log" >&2
    fail "$1 did not listen on $2"
}

# stop NAME: a polite request, ten seconds, then force. By pid only: other people's testpmd may be running.
stop() {
    local pid=${PID[$1]:-} _
    [[ -n $pid ]] || return 0
    unset "PID[$1]"
    kill "$pid" 2> /dev/null || true
    for _ in {1..100}; do
        kill -0 "$pid" 2> /dev/null || break
        sleep 0.1
    done
    kill -KILL "$pid" 2> /dev/null || true
    wait "$pid" 2> /dev/null || true
}

# ---- the two sides

# testpmd NAME CPU "VDEV..." MODE [OPTION...]: one forwarding core, CPU; the main thread, which sleeps, takes the other side's.
testpmd() {
    local name=$1 cpu=$2 vdevs mode=$4 main=$((DRIVER_CPU + DEVICE_CPU - $2))
    read -ra vdevs <<< "$3"
    shift 4
    # By lines, or its tables would only reach a file when it ends.
    start "$name" "${NETNS[@]}" stdbuf -oL dpdk-testpmd -l "$main,$cpu" --main-lcore "$main" --no-pci --no-telemetry -m 128 --in-memory \
        "${EAL[@]}" --single-file-segments --file-prefix="netmem-$$-$name" --log-level='pmd.net.virtio.init:info' "${vdevs[@]/#/--vdev=}" \
        -- -i --total-num-mbufs=16384 --nb-cores=1 --forward-mode="$mode" --record-core-cycles "$@"
    await "$name" '^testpmd>'
    tell "$name" start
}

# dpdk_vhost SOCKET: DPDK's back end, sending 64-byte frames (without CRC, as virtio counts them) as fast as it is let.
dpdk_vhost() {
    testpmd vhost "$DEVICE_CPU" "net_vhost0,iface=$1,queues=1" txonly --txpkts=64
    await_socket vhost "$1"
}

netmem_device() {
    start device "$NETMEM" device --listen "$1" --port gen --size 64 --queues 1 --cpu "$DEVICE_CPU"
    await_socket device "$1"
}

# Each run_* leaves "PACKETS_PER_SECOND NS_PER_PACKET" in ROW. (Printing it would put what it starts out of cleanup's sight, in the
# subshell of a command substitution.)

# run_virtio_user KIND SOCKET
run_virtio_user() {
    local log=$TMP/front.log pps cycles mhz EAL=()
    # Vectors of 512 bits are only used where they are asked for.
    [[ $1 != virtio_user_packed_vec ]] || EAL=(--force-max-simd-bitwidth=512)
    testpmd front "$DRIVER_CPU" "virtio_user0,path=$2,queues=1,queue_size=1024${VIRTIO_USER[$1]}" rxonly
    await front "using (${RX_PATH[$1]}) Rx path"
    sleep 1
    # Rates are "since last show", so the first show only marks the start.
    tell front 'show port stats all'
    tell front 'clear fwd stats all'
    sleep "$SECS"
    tell front 'show port stats all'
    tell front 'show fwd stats all'
    await front 'CPU cycles/packet'
    tell front 'stop'
    tell front 'quit'
    wait "${PID[front]}" || fail "testpmd as virtio_user: see $log"
    unset "PID[front]"
    pps=$(awk '/Rx-pps:/ { pps = $2 } END { print pps }' "$log")
    read -r cycles mhz < <(sed -nE 's|.*CPU cycles/packet=([0-9.]+) .* at ([0-9]+) MHz.*|\1 \2|p' "$log" | head -n 1)
    ROW=$(awk -v pps="$pps" -v cycles="$cycles" -v mhz="$mhz" 'BEGIN { print pps, cycles * 1000 / mhz }')
}

# netmem_perf DEVICE ALLOC: the JSON report.
netmem_perf() {
    "$NETMEM" perf --device "$1" --mode "${MODE:-small}" --size 64 --alloc "$2" --queues 1 --consumer same \
        --xdp "${XDP:-drop}" --ring "${RING:-1024}" ${RING_FEATURES:+--ring-features "$RING_FEATURES"} --duration "$SECS" --runs 1 --cpus "net=$DRIVER_CPU,device=$DEVICE_CPU" --json
}

# netmem_row ALLOC: from that report, if every page came home.
netmem_row() {
    jq -er --arg alloc "$1" '
        .[$alloc] as $pool
        | if $pool | .allocated > 0 and .allocated == .returned and .mapped == .unmapped and .inflight == 0 and .leaked == 0
            then . else error("the pool does not balance: \($pool)") end
        | .variants[] | select(.alloc == $alloc and .unit == "packets/s") | "\(.median) \(.ns_per_packet)"'
}

# run_netmem SOCKET
run_netmem() { ROW=$(netmem_perf "vhost-user:$1" pool | netmem_row pool); }

# ---- the figures

# record VARIANT: keep ROW; a receiver that saw nothing is a broken comparison, not a slow one.
record() {
    awk -v name="$1" '{ if (!($1 > 0 && $2 > 0)) exit 1; printf "  %-18s %8.2f Mpps %7.1f ns/packet\n", name, $1 / 1e6, $2 }' \
        >&2 <<< "$ROW" || fail "$1 received nothing ($ROW)"
    echo "$ROW" >> "$TMP/$1.rows"
}

# spread: of one number a line, "MEDIAN MIN MAX".
spread() { sort -g | awk '{ v[NR] = $1 } END { m = int((NR + 1) / 2); print NR % 2 ? v[m] : (v[m] + v[m + 1]) / 2, v[1], v[NR] }'; }

# table VARIANT...
table() {
    local variant
    printf '%-18s %28s %28s\n' "$RUNS runs of $SECS s" 'Mpps: median (min..max)' 'ns/packet: median (min..max)'
    for variant; do
        printf '%-18s %28s %28s\n' "$variant" \
            "$(awk '{ print $1 / 1e6 }' "$TMP/$variant.rows" | spread | xargs printf '%.2f (%.2f..%.2f)')" \
            "$(awk '{ print $2 }' "$TMP/$variant.rows" | spread | xargs printf '%.1f (%.1f..%.1f)')"
    done
}

# ratio LABEL COLUMN VARIANT BASELINE COMPARISON GOAL: run by run, for neighbours in time share their noise. Column 1 is packets/s, 2 ns/packet.
ratio() {
    local label=$1 column=$2 comparison=$5 goal=$6 median min max verdict
    read -r median min max < <(paste "$TMP/$3.rows" "$TMP/$4.rows" | awk -v c="$column" '{ print $c / $(c + 2) }' | spread)
    verdict=$(awk -v m="$median" -v g="$goal" -v c="$comparison" 'BEGIN { print (c == ">=" ? m >= g : m <= g) ? "reached" : "missed" }')
    printf '%s: %.2f (%.2f..%.2f), goal %s %s: %s\n' "$label" "$median" "$min" "$max" "$comparison" "$goal" "$verdict"
}
