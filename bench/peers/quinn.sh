#!/usr/bin/env bash
# What does QUIC cost? A server of quinn on netmem's UDP over AF_XDP, and the same server on the
# kernel's socket, take turns on one end of a veth pair. The client at the other end is quinn on the
# kernel's socket. Both directions: `put`, the server receives; `get`, the server sends.
#
# quinn's and rustls's own time is measured with both ends in memory, in the same rounds, and
# subtracted; the whole is printed, too.
#
# More settings: MIB (of a transfer, 256), QUIC_QUINN (binary).
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

here=$(cd "$(dirname "$0")" && pwd)
QUIC_QUINN=${QUIC_QUINN:-$here/../../target/release/examples/quic_quinn}
MIB=${MIB:-256}
SERVER=198.18.12.2
CLIENT=198.18.12.1

[[ $EUID == 0 ]] || skip "network namespaces and AF_XDP need root"
begin 0 ip ethtool
[[ -x $QUIC_QUINN ]] || skip "no binary at $QUIC_QUINN (cargo build --release -p netmem --all-features --example quic_quinn)"

# ---- the wire: a veth pair, one queue, each end in a namespace of its own

near=netmem-quinn-$$
far=netmem-quinn-$$-peer
finish() {
    cleanup
    ip netns del $near 2> /dev/null || true
    ip netns del $far 2> /dev/null || true
}
ip netns add $near || skip "network namespaces cannot be made"
trap finish EXIT
ip netns add $far
NEAR=(ip netns exec "$near")
FAR=(ip netns exec "$far")
"${NEAR[@]}" ip link add wire type veth peer name port netns $far

# wire OFFLOADS ADDRESS: a pair with offloads or without them. The kernel has ADDRESS, if there is
# one. AF_XDP needs them off, because it does not mark what a sender has left to the device.
wire() {
    "${NEAR[@]}" ip link del wire
    "${NEAR[@]}" ip link add wire type veth peer name port netns $far
    if [[ $1 == off ]]; then
        "${NEAR[@]}" ethtool -K wire rx off tx off gso off tso off gro off rxvlan off txvlan off > /dev/null 2>&1 || true
        "${FAR[@]}" ethtool -K port rx off tx off gso off tso off gro off rxvlan off txvlan off > /dev/null 2>&1 || true
    fi
    "${NEAR[@]}" ip link set wire up
    "${FAR[@]}" ip link set port up
    "${FAR[@]}" ip addr add $CLIENT/24 dev port
    [[ -z $2 ]] || "${NEAR[@]}" ip addr add "$2/24" dev wire
}

# serve VARIANT: starts the server.
serve() {
    rm -f "$TMP/certificate"
    case $1 in
        netmem)
            wire off ""
            start server "${NEAR[@]}" "$QUIC_QUINN" serve xsk wire $SERVER/24 "$TMP/certificate"
            ;;
        netmem_task)
            wire off ""
            start server "${NEAR[@]}" "$QUIC_QUINN" serve xsk wire task $SERVER/24 "$TMP/certificate"
            ;;
        kernel)
            wire off $SERVER
            start server "${NEAR[@]}" "$QUIC_QUINN" serve kernel $SERVER "$TMP/certificate"
            ;;
        kernel_offloads)
            wire on $SERVER
            start server "${NEAR[@]}" "$QUIC_QUINN" serve kernel $SERVER "$TMP/certificate"
            ;;
    esac
    await server '^serves'
}

# keep NAME CLIENT_LINE SERVER_LINE: milliseconds of CPU time a gigabyte of the server, of both
# ends, and gigabits a second.
keep() {
    awk '$1 == "client" { bytes = $3; client = $5; us = $8; lost = $10 } $1 == "server" { server = $5 }
        END { if (!(bytes > 0 && client > 0 && server > 0)) exit 1
          print server / bytes * 1e3, (server + client) / bytes * 1e3, bytes * 8 / us / 1e3, lost }' <<< "$2"$'\n'"$3" > "$TMP/row" ||
        fail "$1 transferred nothing ($2 / $3)"
    awk -v name="$1" '{ printf "  %-22s server %7.0f, both %7.0f ms/GB, %5.2f Gbit/s, %d lost\n", name, $1, $2, $3, $4 }' "$TMP/row" >&2
    cat "$TMP/row" >> "$TMP/$1.rows"
}

# transfer DIRECTION VARIANT
transfer() {
    local client server
    if [[ $2 == memory ]]; then
        client=$("$QUIC_QUINN" memory "$1" "$MIB")
        server=$(grep '^server' <<< "$client" || true)
        client=$(grep '^client' <<< "$client")
    else
        serve "$2"
        client=$("${FAR[@]}" "$QUIC_QUINN" "$1" $SERVER "$TMP/certificate" "$MIB")
        await server '^server'
        server=$(grep '^server' "$TMP/server.log")
        stop server
    fi
    keep "$1-$2" "$client" "$server"
}

VARIANTS=(memory netmem netmem_task kernel kernel_offloads)
for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    for direction in put get; do
        for variant in "${VARIANTS[@]}"; do transfer $direction "$variant"; done
    done
done

# column FILE N: the median of a column, with the smallest and the largest.
column() { awk -v c="$2" '{ print $c }' "$TMP/$1.rows" | spread | xargs printf "$3 ($3..$3)"; }

echo "QUIC (quinn, CUBIC, ring) on a veth pair, $MIB MiB a transfer, CPU time in ms/GB:"
printf '%-22s %24s %24s %22s\n' "$RUNS runs" "server: median (min..max)" "both ends" "Gbit/s"
for direction in put get; do
    for variant in "${VARIANTS[@]}"; do
        name=$direction-$variant
        printf '%-22s %24s %24s %22s\n' "$name" "$(column "$name" 1 %.0f)" "$(column "$name" 2 %.0f)" "$(column "$name" 3 %.2f)"
    done
done

# own DIRECTION VARIANT BASELINE COLUMN WHAT: the ratio of the variant to the baseline within each
# round, after quinn's and rustls's own time was subtracted from both. If nothing is left of the
# baseline in a round, there is no ratio.
own() {
    local median min max verdict rounds
    rounds=$(paste "$TMP/$1-$2.rows" "$TMP/$1-$3.rows" "$TMP/$1-memory.rows" |
        awk -v c="$4" '$(c + 4) > $(c + 8) { print ($c - $(c + 8)) / ($(c + 4) - $(c + 8)) }')
    if (($(grep -c . <<< "$rounds") < RUNS)); then
        echo "$1: $2 / $3, $5 without quinn and rustls: no ratio, because $3 takes no more than quinn and rustls in memory"
        return
    fi
    read -r median min max < <(spread <<< "$rounds")
    verdict=$(awk -v m="$median" 'BEGIN { print m <= 0.5 ? "reached" : "missed" }')
    printf '%s: %s / %s, %s without quinn and rustls: %.2f (%.2f..%.2f), goal <= 0.5: %s\n' "$1" "$2" "$3" "$5" "$median" "$min" "$max" "$verdict"
}
echo "goals:"
for direction in put get; do
    for variant in netmem netmem_task; do
        for baseline in kernel kernel_offloads; do
            own $direction $variant $baseline 1 "CPU time of the server"
            own $direction $variant $baseline 2 "CPU time of both ends"
        done
    done
done
