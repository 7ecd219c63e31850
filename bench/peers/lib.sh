# Functions for the comparisons in this folder: set up, run one side, compute medians, clean up.
# shellcheck shell=bash

RUNS=${RUNS:-7}                                        # interleaved rounds
SECS=${SECS:-2}                                        # seconds of CPU time that are measured in each round
NETMEM=${NETMEM:-$(dirname "${BASH_SOURCE[0]}")/../../target/release/netmem}
EXAMPLES=${NETMEM%/*}/examples                          # virtio_peer, turns and others, of the same build
TURN_MS=${TURN_MS:-20}                                 # milliseconds of a turn
DRIVER_CPU=${DRIVER_CPU:-0}                            # CPU of the side under test
DEVICE_CPU=${DEVICE_CPU:-1}                            # CPU of its back end

BURST=${BURST:-64}                                     # packets that DPDK's programs receive or send at once
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEBIAN13=${DEBIAN13:-$HERE/../../target/tmp/debian13}   # where DPDK 24.11 is unpacked, also for the tests

# The features that both sides are asked to negotiate: virtio_user's devargs, the receive path that
# these select, and netmem's mode and features of rings. virtio_user always negotiates
# INDIRECT_DESC. It vectorises a split ring only without IN_ORDER and MRG_RXBUF; in_order=1 is the
# default, and overrides vectorized=1 without an error. It vectorises a packed ring with IN_ORDER,
# if the CPU has AVX-512. Its log names the path. `bench/examples/virtio_peer.rs` has netmem's
# features of each set.
SETS=(split mergeable in_order packed packed_in_order)
declare -A DEVARGS=(
    [split]=",mrg_rxbuf=0,in_order=0,vectorized=1"
    [mergeable]=",in_order=0"
    [in_order]=""
    [packed]=",packed_vq=1,mrg_rxbuf=0,in_order=0"
    [packed_in_order]=",packed_vq=1,mrg_rxbuf=0,in_order=1,vectorized=1"
)
declare -A RX_PATH=(
    [split]="vectorized"
    [mergeable]="mergeable buffer"
    [in_order]="inorder"                               # virtio_user's defaults, with mergeable buffers
    [packed]="packed ring standard"
    [packed_in_order]="packed ring vectorized"
)
RING_BITS=(15:MRG_RXBUF 28:INDIRECT_DESC 29:EVENT_IDX 34:RING_PACKED 35:IN_ORDER 38:NOTIFICATION_DATA)

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

# begin MEBIBYTES COMMAND...: skips if a command is missing, otherwise provides $TMP and that much
# free huge-page memory.
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
        # Surplus pages are not counted. They are freed when the processes that use them end.
        HUGEPAGES_BEFORE=$(($(< $HUGEPAGES/nr_hugepages) - $(< $HUGEPAGES/surplus_hugepages)))
        echo $((HUGEPAGES_BEFORE + want - free)) > $HUGEPAGES/nr_hugepages
        free=$(< $HUGEPAGES/free_hugepages)
        ((free >= want)) || skip "$want huge pages of 2 MiB are needed, and only $free could be had"
    fi
}

# have_netmem: succeeds if there is a binary. Otherwise prints why netmem's rows will be missing,
# and fails.
have_netmem() {
    [[ -x $NETMEM ]] || { echo "skipped: netmem rows: no binary at $NETMEM (cargo build --release, or set NETMEM)"; false; }
}

# have_examples: succeeds if the programs that take turns are built. Otherwise prints how to build
# them, and fails.
have_examples() {
    local program
    for program in virtio_peer turns; do
        [[ -x $EXAMPLES/$program ]] || {
            echo "skipped: no $EXAMPLES/$program (cargo build --release -p netmem-bench --example virtio_peer --example turns)"
            return 1
        }
    done
}

# start NAME COMMAND...: starts the command in the background, with input from a FIFO (see tell) and
# output to $TMP/NAME.log.
start() {
    local name=$1
    shift
    rm -f "$TMP/$name.in"
    : > "$TMP/$name.log"
    mkfifo "$TMP/$name.in"
    # The FIFO is opened for writing, too, so that the process does not see the end of the file
    # between two commands.
    "$@" <> "$TMP/$name.in" > "$TMP/$name.log" 2>&1 &
    PID[$name]=$!
}

tell() { printf '%s\n' "$2" > "$TMP/$1.in"; }

# await NAME REGEX: waits until a line of the log matches.
await() {
    local _ ended=
    for _ in {1..200}; do
        grep -aqE "$2" "$TMP/$1.log" && return
        [[ -z $ended ]] || break
        # The log of a process that has ended is read once more: it may have said so last.
        kill -0 "${PID[$1]}" 2> /dev/null || ended=1
        [[ -n $ended ]] || sleep 0.1
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

# stop NAME: SIGTERM, and SIGKILL after ten seconds. By pid only, because another testpmd may be
# running on this machine.
stop() {
    local pid=${PID[$1]:-} _
    [[ -n $pid ]] || return 0
    unset "PID[$1]"
    kill "$pid" 2> /dev/null || true
    # It may be stopped, off its turn.
    kill -CONT "$pid" 2> /dev/null || true
    for _ in {1..100}; do
        kill -0 "$pid" 2> /dev/null || break
        sleep 0.1
    done
    kill -KILL "$pid" 2> /dev/null || true
    wait "$pid" 2> /dev/null || true
}

# ---- the two sides

# dpdk_system: makes the program in port/dpdk.c for the system's DPDK, and adds its version to DPDK;
# or reports why its rows will be missing.
DPDK=()
dpdk_system() {
    local said flags
    for said in gcc pkg-config; do
        command -v "$said" > /dev/null || { echo "skipped: rows of DPDK: $said is not installed"; return 0; }
    done
    if flags=$(pkg-config --cflags --libs libdpdk 2> /dev/null); then
        # shellcheck disable=SC2086
        gcc -O3 -march=native -Wall -o "$TMP/dpdk-port" "$HERE/port/dpdk.c" $flags
        DPDK+=("$(pkg-config --modversion libdpdk | cut -d. -f1,2)")
    else
        echo "skipped: rows of the system's DPDK: libdpdk-dev is not installed"
    fi
}

# dpdk_versions: makes the program for each DPDK that can be had. Leaves the versions in DPDK, at
# least one.
dpdk_versions() {
    local root=$DEBIAN13/root said
    local lib=$root/usr/lib/x86_64-linux-gnu
    for said in gcc pkg-config; do
        command -v "$said" > /dev/null || skip "$said is not installed"
    done
    dpdk_system
    said=$("$HERE/../../tests/peers/debian13.sh" "$DEBIAN13")
    if [[ $said == skipped:* ]]; then
        echo "skipped: rows of DPDK 24.11: ${said#skipped: }"
    else
        # Linked with the system's C library, which is older than that of the unpacked root. So the
        # program runs with both. The root's headers come last: DPDK's need those of libbsd, which
        # the system may lack.
        gcc -O3 -march=native -Wall -include rte_config.h -I"$root/usr/include/dpdk" -I"$root/usr/include/x86_64-linux-gnu/dpdk" \
            -idirafter "$root/usr/include/x86_64-linux-gnu" -o "$TMP/dpdk-port-24.11" "$HERE/port/dpdk.c" \
            "$lib"/librte_{ethdev,mbuf,mempool,ring,eal,log,net,telemetry,kvargs}.so -Wl,--allow-shlib-undefined -Wl,--as-needed
        DPDK+=(24.11)
    fi
    [[ ${#DPDK[@]} -gt 0 ]] || skip "there is no DPDK"
}

# dpdk_port NAME VERSION CPU VDEV ARGUMENT...: starts that program on one CPU, with the arguments
# that port/dpdk.c describes.
dpdk_port() {
    local name=$1 version=$2 cpu=$3 vdev=$4 program=("$TMP/dpdk-port") lib=$DEBIAN13/root/usr/lib/x86_64-linux-gnu
    shift 4
    [[ $version != 24.11 ]] || program=("$DEBIAN13/root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$lib" "$TMP/dpdk-port-24.11" \
        -d "$lib/dpdk/pmds-25.0")
    start "$name" "${NETNS[@]}" "${program[@]}" -l "$cpu" --no-pci --no-telemetry -m 48 --in-memory --single-file-segments \
        --file-prefix="netmem-$$-$name" --force-max-simd-bitwidth=512 --log-level=pmd.net.virtio.init:debug \
        --log-level=pmd.net.virtio.driver:debug --vdev="$vdev" "${EAL[@]}" -- "$@"
}

# dpdk_vhost NAME VERSION SOCKET [RATE]: starts DPDK's back end, which sends 64-byte frames (without
# CRC, as virtio counts them) as fast as it can, or so many a second.
dpdk_vhost() {
    dpdk_port "$1" "$2" "$DEVICE_CPU" "net_vhost0,iface=$3,queues=1" send 1024 "$BURST" 64 "${4:-0}"
    await "$1" '^ready'
    await_socket "$1" "$3"
}

# netmem_device NAME SOCKET
netmem_device() {
    start "$1" "$NETMEM" device --listen "$2" --port gen --size 64 --queues 1 --cpu "$DEVICE_CPU"
    await_socket "$1" "$2"
}

# netmem_driver NAME SET SOCKET pass|drop: starts netmem's receiver on a vhost-user socket.
netmem_driver() {
    start "$1" "$EXAMPLES/virtio_peer" "$3" "$2" "$4" --cpu "$DRIVER_CPU" --ring 1024 --burst "$BURST" --duration "$SECS"
    await "$1" '^ready'
}

# virtio_user NAME SET VERSION SOCKET read|count: starts DPDK's.
virtio_user() {
    dpdk_port "$1" "$3" "$DRIVER_CPU" "virtio_user0,path=$4,queues=1,queue_size=1024${DEVARGS[$2]}" receive 1024 "$BURST" 0.3 "$SECS" "$5"
    await "$1" '^ready'
    await "$1" "using (${RX_PATH[$2]}) Rx path"
}

# result NAME: waits for a receiver. Sets ROW to "PACKETS_PER_SECOND NS_PER_PACKET", by the time in
# which it had its CPU, and FEATURES to the negotiated features of rings.
result() {
    local log=$TMP/$1.log mask bit pid=${PID[$1]}
    unset "PID[$1]"
    wait "$pid" || { tail -n 20 "$log" >&2; fail "$1 has failed"; }
    ROW=$(awk '/^packets/ { for (i = 1; i < NF; i += 2) v[$i] = $(i + 1)
        print v["packets"] * 1e9 / v["ran_ns"], v["busy_ns"] / v["packets"] }' "$log")
    mask=0x$(sed -nE 's/.*features after negotiate = ([0-9a-f]+).*/\1/p' "$log" | tail -n 1)
    FEATURES=
    for bit in "${RING_BITS[@]}"; do
        (((mask >> ${bit%:*} & 1) == 0)) || FEATURES+=" ${bit#*:}"
    done
}

# take_turns NAME...: runs receivers, each with the device NAME-device, in turns until each has its
# result. All are connected and stopped meanwhile. Sets LINE, which is measured between two rounds.
take_turns() {
    local name groups=()
    for name; do
        groups+=("${PID[$name]},${PID[$name-device]}")
    done
    turns --turn "$TURN_MS" "${groups[@]}"
}

# hand_over: sets LINE while no side runs.
hand_over() { turns; }

# turns ARGUMENT...: leaves in LINE the state of the machine: the nanoseconds in which a cache line
# goes between the CPUs, the median and the smallest and largest of the rounds.
LINE=
turns() {
    "$EXAMPLES/turns" --cpus "$DRIVER_CPU,$DEVICE_CPU" "$@" > "$TMP/turns.log" || fail "the turns have failed"
    LINE=$(awk '/^hand-over/ { print $2, $3, $4 }' "$TMP/turns.log")
    [[ -n $LINE ]] || fail "the turns have not measured a hand-over"
}

# off_turn NAME: stops a pair that is connected, until its turn comes.
off_turn() { kill -STOP "${PID[$1]}" "${PID[$1-device]}"; }

# features SET VARIANT: fails if the negotiated features differ from those of the set's other
# variants.
declare -A NEGOTIATED=()
features() {
    [[ -z ${NEGOTIATED[$1]+there} || ${NEGOTIATED[$1]} == "$FEATURES" ]] ||
        fail "$2 negotiated$FEATURES on $1, and others${NEGOTIATED[$1]}"
    NEGOTIATED[$1]=$FEATURES
}

# ---- the figures

# record VARIANT: keeps ROW, and the state of the machine in which it was measured. Fails if the
# receiver received nothing, because the comparison is then broken.
record() {
    awk -v name="$1" -v line="$LINE" '{ if (!($1 > 0 && $2 > 0)) exit 1
        split(line, state); printf "  %-26s %8.2f Mpps %7.1f ns/packet, a line in %d ns\n", name, $1 / 1e6, $2, state[1] }' \
        >&2 <<< "$ROW" || fail "$1 received nothing ($ROW)"
    echo "$ROW" >> "$TMP/$1.rows"
    echo "$LINE" >> "$TMP/$1.line"
}

# state VARIANT: the time in which a cache line went between the CPUs: the median of the runs'
# medians, the smallest and the largest.
state() {
    printf '%.0f (%.0f..%.0f)' "$(awk '{ print $1 }' "$TMP/$1.line" | spread | cut -d' ' -f1)" \
        "$(awk '{ print $2 }' "$TMP/$1.line" | spread | cut -d' ' -f2)" "$(awk '{ print $3 }' "$TMP/$1.line" | spread | cut -d' ' -f3)"
}

# spread: reads one number a line, prints "MEDIAN MIN MAX".
spread() { sort -g | awk '{ v[NR] = $1 } END { m = int((NR + 1) / 2); print NR % 2 ? v[m] : (v[m] + v[m + 1]) / 2, v[1], v[NR] }'; }

# table VARIANT...
table() {
    local variant
    printf '%-26s %26s %26s %20s\n' "$RUNS runs of $SECS s" 'Mpps: median (min..max)' 'ns/packet: median (min..max)' 'a line between CPUs'
    for variant; do
        printf '%-26s %26s %26s %20s\n' "$variant" \
            "$(awk '{ print $1 / 1e6 }' "$TMP/$variant.rows" | spread | xargs printf '%.2f (%.2f..%.2f)')" \
            "$(awk '{ print $2 }' "$TMP/$variant.rows" | spread | xargs printf '%.1f (%.1f..%.1f)')" \
            "$(state "$variant") ns"
    done
}

# known_sets: leaves in SETS what this machine can run.
known_sets() {
    local set kept=()
    for set in "${SETS[@]}"; do
        [[ -n ${DEVARGS[$set]+there} ]] || fail "there is no set $set"
        if [[ $set != packed_in_order ]] || grep -q avx512vl /proc/cpuinfo; then
            kept+=("$set")
        else
            echo "left out: $set: there is no AVX-512"
        fi
    done
    SETS=("${kept[@]}")
}

# compare DEVICE VARIANT...: for each of SETS, RUNS times, the variants take turns. Each has a
# device of its own, which the function DEVICE starts: DEVICE NAME SOCKET. A variant is netmem,
# netmem_drop, or a version of DPDK, `_unread` without reading. SUFFIX distinguishes these rows from
# those of another call.
compare() {
    local device=$1 set variant name run names
    shift
    for ((run = 1; run <= RUNS; run++)); do
        echo "run $run of $RUNS" >&2
        for set in "${SETS[@]}"; do
            names=()
            for variant; do
                name=$set${SUFFIX:-}-$variant
                "$device" "$name-device" "$TMP/$variant.sock"
                case $variant in
                    netmem) netmem_driver "$name" "$set" "$TMP/$variant.sock" pass ;;
                    netmem_drop) netmem_driver "$name" "$set" "$TMP/$variant.sock" drop ;;
                    *_unread) virtio_user "$name" "$set" "${variant%_unread}" "$TMP/$variant.sock" count ;;
                    *) virtio_user "$name" "$set" "$variant" "$TMP/$variant.sock" read ;;
                esac
                off_turn "$name"
                names+=("$name")
            done
            take_turns "${names[@]}"
            for name in "${names[@]}"; do
                result "$name"
                stop "$name-device"
                features "$set" "$name"
                record "$name"
            done
            rm -f "$TMP"/*.sock
        done
    done
}

# tables VARIANT...: prints the table of each set, with its negotiated features.
tables() {
    local set
    for set in "${SETS[@]}"; do
        echo "$set: negotiated${NEGOTIATED[$set]:- none}; virtio_user's path is \"${RX_PATH[$set]}\""
        table "${@/#/$set${SUFFIX:-}-}"
    done
}

# goal SET VERSION WHAT COLUMN COMPARISON GOAL: the ratio of netmem (with the pool) to virtio_user
# of that version, if the set was measured.
goal() {
    [[ ! -e $TMP/$1-netmem.rows ]] || ratio "$1: netmem / virtio_user $2, $3" "$4" "$1-netmem" "$1-$2" "$5" "$6"
}

# ratio LABEL COLUMN VARIANT BASELINE [COMPARISON GOAL]: the ratio within each round, because runs
# of one round have the same noise, and the state of the machine. Column 1 is packets/s, 2
# ns/packet.
ratio() {
    local label=$1 column=$2 comparison=${5:-} goal=${6:-} median min max verdict
    read -r median min max < <(paste "$TMP/$3.rows" "$TMP/$4.rows" | awk -v c="$column" '{ print $c / $(c + 2) }' | spread)
    verdict=$(awk -v m="$median" -v g="$goal" -v c="$comparison" 'BEGIN { print (c == ">=" ? m >= g : m <= g) ? "reached" : "missed" }')
    printf '%s: %.2f (%.2f..%.2f)%s; a line in %s ns\n' "$label" "$median" "$min" "$max" "${goal:+, goal $comparison $goal: $verdict}" "$(state "$3")"
}
