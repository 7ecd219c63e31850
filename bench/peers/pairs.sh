#!/usr/bin/env bash
# Two processes and a vhost-user socket, all netmem against all DPDK: our device and driver, and DPDK's vhost and virtio_user.
set -euo pipefail
# shellcheck source=bench/peers/lib.sh
source "$(dirname "$0")/lib.sh"

begin 384 dpdk-testpmd
have_netmem || exit 0

for ((run = 1; run <= RUNS; run++)); do
    echo "run $run of $RUNS" >&2
    netmem_device "$TMP/device.sock"
    run_netmem "$TMP/device.sock"
    stop device
    record netmem
    dpdk_vhost "$TMP/vhost.sock"
    run_virtio_user virtio_user "$TMP/vhost.sock"
    stop vhost
    record virtio_user
done

echo "device and driver, netmem's and DPDK's, 64 B:"
table netmem virtio_user
ratio "netmem pair / DPDK pair, packets/s" 1 netmem virtio_user ">=" 4
echo "DPDK's side includes building its frames: txonly fills in each one as it sends it, where netmem's generator built its frames once."
