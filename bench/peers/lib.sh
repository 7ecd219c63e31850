# Functions for the comparisons in this folder: set up, run one side, compute medians, clean up.
# shellcheck shell=bash

RUNS=${RUNS:-7}                                        # interleaved rounds
SECS=${SECS:-2}                                        # seconds that are measured in each round
NETMEM=${NETMEM:-$(dirname "${BASH_SOURCE[0]}")/../../target/release/netmem}
DRIVER_CPU=${DRIVER_CPU:-0}                            # CPU of the side under test
DEVICE_CPU=${DEVICE_CPU:-1}                            # CPU of its back end

BURST=${BURST:-64}                                     # packets that DPDK's programs receive or send at once
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEBIAN13=${DEBIAN13:-$HERE/../../target/tmp/debian13}   # where DPDK 24.11 is unpacked, also for the tests

# The features that both sides are asked to negotiate: virtio_user's devargs, the receive path that these select, and
# netmem's mode and features of rings. virtio_user always negotiates INDIRECT_DESC. It vectorises a split ring only
# without IN_ORDER and MRG_RXBUF; in_order=1 is the default, and overrides vectorized=1 without an error. It vectorises
# a packed ring with IN_ORDER, if the CPU has AVX-512. Its log says which path was taken.
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
declare -A NETMEM_SET=(
    [split]="small split,indirect"
    [mergeable]="mergeable split,indirect"
    [in_order]="mergeable split,indirect,in-order"
    [packed]="small packed,indirect"
    [packed_in_order]="small packed,indirect,in-order"
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
        # Surplus pages are not counted. They are freed when the processes that use them end.
        HUGEPAGES_BEFORE=$(($(< $HUGEPAGES/nr_hugepages) - $(< $HUGEPAGES/surplus_hugepages)))
        echo $((HUGEPAGES_BEFORE + want - free)) > $HUGEPAGES/nr_hugepages
        free=$(< $HUGEPAGES/free_hugepages)
        ((free >= want)) || skip "$want huge pages of 2 MiB are needed, and only $free could be had"
    fi
}

# have_netmem: succeeds if there is a binary. Otherwise prints why netmem's rows will be missing, and fails.
have_netmem() {
    [[ -x $NETMEM ]] || { echo "skipped: netmem rows: no binary at $NETMEM (cargo build --release, or set NETMEM)"; false; }
}

# start NAME COMMAND...: starts the command in the background, with input from a FIFO (see tell) and output to
# $TMP/NAME.log.
start() {
    local name=$1
    shift
    rm -f "$TMP/$name.in"
    : > "$TMP/$name.log"
    mkfifo "$TMP/$name.in"
    # The FIFO is opened for writing, too, so that the process does not see the end of the file between two commands.
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

# stop NAME: SIGTERM, and SIGKILL after ten seconds. By pid only, because another testpmd may be running on this
# machine.
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

# dpdk_system: makes the program in port/dpdk.c for the system's DPDK, and adds its version to DPDK; or says why its rows will be missing.
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

# dpdk_versions: makes the program for each DPDK that can be had. Leaves the versions in DPDK, at least one.
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
        # Linked with the system's C library, which is older than that of the unpacked root. So the program runs with
        # both. The root's headers come last: DPDK's need those of libbsd, which the system may lack.
        gcc -O3 -march=native -Wall -include rte_config.h -I"$root/usr/include/dpdk" -I"$root/usr/include/x86_64-linux-gnu/dpdk" \
            -idirafter "$root/usr/include/x86_64-linux-gnu" -o "$TMP/dpdk-port-24.11" "$HERE/port/dpdk.c" \
            "$lib"/librte_{ethdev,mbuf,mempool,ring,eal,log,net,telemetry,kvargs}.so -Wl,--allow-shlib-undefined -Wl,--as-needed
        DPDK+=(24.11)
    fi
    [[ ${#DPDK[@]} -gt 0 ]] || skip "there is no DPDK"
}

# dpdk_port NAME VERSION CPU VDEV ARGUMENT...: starts that program on one CPU, with the arguments that port/dpdk.c
# describes.
dpdk_port() {
    local name=$1 version=$2 cpu=$3 vdev=$4 program=("$TMP/dpdk-port") lib=$DEBIAN13/root/usr/lib/x86_64-linux-gnu
    shift 4
    [[ $version != 24.11 ]] || program=("$DEBIAN13/root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$lib" "$TMP/dpdk-port-24.11" \
        -d "$lib/dpdk/pmds-25.0")
    start "$name" "${NETNS[@]}" "${program[@]}" -l "$cpu" --no-pci --no-telemetry -m 128 --in-memory --single-file-segments \
        --file-prefix="netmem-$$-$name" --force-max-simd-bitwidth=512 --log-level=pmd.net.virtio.init:debug \
        --log-level=pmd.net.virtio.driver:debug --vdev="$vdev" "${EAL[@]}" -- "$@"
}

# dpdk_vhost VERSION SOCKET: starts DPDK's back end, which sends 64-byte frames (without CRC, as virtio counts them) as
# fast as it can.
dpdk_vhost() {
    dpdk_port vhost "$1" "$DEVICE_CPU" "net_vhost0,iface=$2,queues=1" send 1024 "$BURST" 64
    await vhost '^ready'
    await_socket vhost "$2"
}

netmem_device() {
    start device "$NETMEM" device --listen "$1" --port gen --size 64 --queues 1 --cpu "$DEVICE_CPU"
    await_socket device "$1"
}

# Each run_* sets ROW to "PACKETS_PER_SECOND NS_PER_PACKET", and FEATURES to the negotiated features of rings. They do
# not print these values, because a command substitution is a subshell: cleanup would not know of the processes that are
# started in it.

# run_virtio_user SET VERSION SOCKET read|count
run_virtio_user() {
    local log=$TMP/front.log mask bit
    dpdk_port front "$2" "$DRIVER_CPU" "virtio_user0,path=$3,queues=1,queue_size=1024${DEVARGS[$1]}" receive 1024 "$BURST" 0.3 "$SECS" "$4"
    await front '^packets'
    await front "using (${RX_PATH[$1]}) Rx path"
    stop front
    ROW=$(awk '/^packets/ { print $2 * 1e9 / $4, $6 / $2 }' "$log")
    mask=0x$(sed -nE 's/.*features after negotiate = ([0-9a-f]+).*/\1/p' "$log" | tail -n 1)
    FEATURES=
    for bit in "${RING_BITS[@]}"; do
        (((mask >> ${bit%:*} & 1) == 0)) || FEATURES+=" ${bit#*:}"
    done
}

# netmem_perf DEVICE ALLOC: prints the JSON report.
netmem_perf() {
    "$NETMEM" perf --device "$1" --mode "${MODE:-small}" --size 64 --alloc "$2" --queues 1 --consumer same \
        --xdp "${XDP:-pass}" --ring "${RING:-1024}" ${RING_FEATURES:+--ring-features "$RING_FEATURES"} --duration "$SECS" --runs 1 --cpus "net=$DRIVER_CPU,device=$DEVICE_CPU" --json
}

# netmem_row ALLOC: the row of that report. Fails if pages were not returned.
netmem_row() {
    jq -er --arg alloc "$1" '
        .[$alloc] as $pool
        | if $pool | .allocated > 0 and .allocated == .returned and .mapped == .unmapped and .inflight == 0 and .leaked == 0
            then . else error("the pool does not balance: \($pool)") end
        | .variants[] | select(.alloc == $alloc and .unit == "packets/s") | "\(.median) \(.ns_per_packet)"'
}

# run_netmem SET SOCKET: netmem with `--xdp pass`, where the application drops each packet, so that the pool is used; or
# with XDP=drop.
run_netmem() {
    local name bit
    read -r MODE RING_FEATURES <<< "${NETMEM_SET[$1]}"
    RING=1024 netmem_perf "vhost-user:$2" pool > "$TMP/netmem.json"
    ROW=$(netmem_row pool < "$TMP/netmem.json")
    name=$(jq -r '.variants[].features[]' "$TMP/netmem.json")
    FEATURES=
    for bit in "${RING_BITS[@]}"; do
        ! grep -qE "_F_${bit#*:}\$" <<< "$name" || FEATURES+=" ${bit#*:}"
    done
}

# features SET VARIANT: fails if the negotiated features differ from those of the set's other variants.
declare -A NEGOTIATED=()
features() {
    [[ -z ${NEGOTIATED[$1]+there} || ${NEGOTIATED[$1]} == "$FEATURES" ]] ||
        fail "$2 negotiated$FEATURES on $1, and others${NEGOTIATED[$1]}"
    NEGOTIATED[$1]=$FEATURES
}

# ---- the figures

# record VARIANT: keeps ROW. Fails if the receiver received nothing, because the comparison is then broken.
record() {
    awk -v name="$1" '{ if (!($1 > 0 && $2 > 0)) exit 1; printf "  %-26s %8.2f Mpps %7.1f ns/packet\n", name, $1 / 1e6, $2 }' \
        >&2 <<< "$ROW" || fail "$1 received nothing ($ROW)"
    echo "$ROW" >> "$TMP/$1.rows"
}

# spread: reads one number a line, prints "MEDIAN MIN MAX".
spread() { sort -g | awk '{ v[NR] = $1 } END { m = int((NR + 1) / 2); print NR % 2 ? v[m] : (v[m] + v[m + 1]) / 2, v[1], v[NR] }'; }

# table VARIANT...
table() {
    local variant
    printf '%-26s %26s %26s\n' "$RUNS runs of $SECS s" 'Mpps: median (min..max)' 'ns/packet: median (min..max)'
    for variant; do
        printf '%-26s %26s %26s\n' "$variant" \
            "$(awk '{ print $1 / 1e6 }' "$TMP/$variant.rows" | spread | xargs printf '%.2f (%.2f..%.2f)')" \
            "$(awk '{ print $2 }' "$TMP/$variant.rows" | spread | xargs printf '%.1f (%.1f..%.1f)')"
    done
}

# turns SOCKET: runs all variants of all SETS, RUNS times. The functions `before` and `after`, if they are defined, are
# called around each run.
turns() {
    local socket=$1 set version variant kept=()
    for set in "${SETS[@]}"; do
        [[ -n ${DEVARGS[$set]+there} ]] || fail "there is no set $set"
        if [[ $set != packed_in_order ]] || grep -q avx512vl /proc/cpuinfo; then
            kept+=("$set")
        else
            echo "left out: $set: there is no AVX-512"
        fi
    done
    SETS=("${kept[@]}")
    for ((run = 1; run <= RUNS; run++)); do
        echo "run $run of $RUNS" >&2
        for set in "${SETS[@]}"; do
            for variant in netmem netmem_drop "${DPDK[@]}" "${DPDK[-1]}_unread"; do
                version=${variant%_unread}
                ! declare -F before > /dev/null || before
                case $variant in
                    netmem) XDP=pass run_netmem "$set" "$socket" ;;
                    netmem_drop) XDP=drop run_netmem "$set" "$socket" ;;
                    *_unread) run_virtio_user "$set" "$version" "$socket" count ;;
                    *) run_virtio_user "$set" "$version" "$socket" read ;;
                esac
                ! declare -F after > /dev/null || after
                features "$set" "$variant"
                record "$set-$variant"
            done
        done
    done
}

# tables: prints the table of each set, with its negotiated features.
tables() {
    local set variants
    for set in "${SETS[@]}"; do
        echo "$set: negotiated${NEGOTIATED[$set]:- none}; virtio_user's path is \"${RX_PATH[$set]}\""
        variants=("$set-netmem" "$set-netmem_drop" "${DPDK[@]/#/$set-}" "$set-${DPDK[-1]}_unread")
        table "${variants[@]}"
    done
}

# goal SET VERSION WHAT COLUMN COMPARISON GOAL: the ratio of netmem (with the pool) to virtio_user of that version, if
# the set was measured.
goal() {
    [[ ! -e $TMP/$1-netmem.rows ]] || ratio "$1: netmem / virtio_user $2, $3" "$4" "$1-netmem" "$1-$2" "$5" "$6"
}

# ratio LABEL COLUMN VARIANT BASELINE COMPARISON GOAL: the ratio within each round, because runs of one round have the
# same noise. Column 1 is packets/s, 2 ns/packet.
ratio() {
    local label=$1 column=$2 comparison=$5 goal=$6 median min max verdict
    read -r median min max < <(paste "$TMP/$3.rows" "$TMP/$4.rows" | awk -v c="$column" '{ print $c / $(c + 2) }' | spread)
    verdict=$(awk -v m="$median" -v g="$goal" -v c="$comparison" 'BEGIN { print (c == ">=" ? m >= g : m <= g) ? "reached" : "missed" }')
    printf '%s: %.2f (%.2f..%.2f), goal %s %s: %s\n' "$label" "$median" "$min" "$max" "$comparison" "$goal" "$verdict"
}
