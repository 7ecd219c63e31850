#!/usr/bin/env bash
# run.sh [SEEDS [FIRST]]: simulates SEEDS connections (100,000) from the seed FIRST (0) on,
# optimised, on all CPUs. Prints the seeds that fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
seeds=${1:-100000} first=${2:-0} cpus=$(nproc)
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true
program=$(cargo test --release --package netmem-inet --test sim --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
cd ../../../..
pids=()
for ((cpu = 0; cpu < cpus; cpu++)); do
    from=$((first + seeds * cpu / cpus)) to=$((first + seeds * (cpu + 1) / cpus - 1))
    NETMEM_SIM_SEEDS=$from-$to "$program" two_connections_over_a_bad_link 2>&1 | grep -E '^(seed|test result)|panicked|^[a-z]+: ' &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait "$pid"
done
