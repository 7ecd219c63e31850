#!/usr/bin/env bash
# Shows that each fuzzer finds a bug: fuzz/planted.sh [SECONDS [TARGET...]]; up to 120 seconds and
# all of them by default.
#
# planted/TARGET.patch puts a bug into a copy of the tree, and the fuzzer must fail there. The tree
# itself is not changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
seconds=${1:-120}
[[ $seconds =~ ^[0-9]+$ ]] || { echo "usage: fuzz/planted.sh [SECONDS [TARGET...]]" >&2; exit 2; }
shift || true
targets=("$@")
if ((${#targets[@]} == 0)); then
    for file in planted/*.patch; do
        file=${file##*/}
        targets+=("${file%.patch}")
    done
fi
out=${CARGO_TARGET_DIR:-$PWD/../target}/planted
copy=$out/tree
rm -rf "$copy"
mkdir -p "$copy"
(cd .. && tar -c Cargo.toml Cargo.lock crates bench fuzz tests README.md) | tar -x -C "$copy"
missed=0
for target in "${targets[@]}"; do
    patch --quiet --strip=1 --directory="$copy" < "planted/$target.patch"
    rm -rf "$out/fuzz/corpus/$target" "$out/fuzz/artifacts/$target" "$out/fuzz/$target.log"
    if CARGO_TARGET_DIR=$out "$copy/fuzz/run.sh" "$seconds" "$target" > "$out/$target.out" 2>&1; then
        echo "$target: not found in $seconds s"
        missed=1
    elif [[ -n $(find "$out/fuzz/artifacts/$target" -type f 2> /dev/null) ]]; then
        inputs=$(awk '/^stat::number_of_executed_units/ { print $2 }' "$out/fuzz/$target.log")
        what=$(grep -m 1 -A 1 -E 'panicked at|^==[0-9]+==ERROR' "$out/fuzz/$target.log" | tr '\n' ' ' | cut -c -160)
        echo "$target: found after $inputs inputs: $what"
    else
        tail -20 "$out/$target.out" >&2
        exit 1
    fi
    patch --quiet --strip=1 --reverse --directory="$copy" < "planted/$target.patch"
done
exit $missed
