#!/usr/bin/env bash
# Builds the fuzz targets and runs each for a while, one on each CPU: fuzz/run.sh [SECONDS
# [TARGET...]]; 600 seconds and all of them by default.
#
# Needs a nightly toolchain and a C++ compiler, and no `cargo fuzz`: the flags below are those that
# it sets. New inputs go to target/fuzz/corpus/TARGET, and an input that fails to
# target/fuzz/artifacts/TARGET. README.md states what to do with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
seconds=${1:-600}
[[ $seconds =~ ^[0-9]+$ ]] || { echo "usage: fuzz/run.sh [SECONDS [TARGET...]]" >&2; exit 2; }
shift || true
targets=("$@")
if ((${#targets[@]} == 0)); then
    for file in fuzz_targets/*.rs; do
        file=${file##*/}
        targets+=("${file%.rs}")
    done
fi
out=${CARGO_TARGET_DIR:-$PWD/../target}/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')

RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address \
    -Ccodegen-units=1" CARGO_TARGET_DIR=$out CARGO_INCREMENTAL=0 \
    cargo +nightly build --quiet --release --target "$host" "${targets[@]/#/--bin=}"

fuzz() {
    local target=$1
    mkdir -p "$out/corpus/$target" "$out/artifacts/$target" "corpus/$target"
    # Leaks are for the targets to find: their books are exact, and the sanitizer counts what lives
    # in statics.
    if ! ASAN_OPTIONS=detect_leaks=0 "$out/$host/release/$target" -max_total_time="$seconds" -max_len=2048 -timeout=20 -rss_limit_mb=1024 \
        -print_final_stats=1 -artifact_prefix="$out/artifacts/$target/" "$out/corpus/$target" "corpus/$target" \
        > "$out/$target.log" 2>&1; then
        tail -40 "$out/$target.log" >&2
        echo "$target failed; the whole log is in $out/$target.log" >&2
        return 1
    fi
    awk -v target="$target" '/^stat::number_of_executed_units/ { runs = $2 } /^stat::average_exec_per_sec/ { rate = $2 }
        / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") edges = $(i + 1) }
        END { printf "%-15s %10d inputs, %6d a second, %5d edges\n", target, runs, rate, edges }' "$out/$target.log"
}
export -f fuzz
export out host seconds
# A target is one thread: as many run at a time as there are CPUs.
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'fuzz {}'
