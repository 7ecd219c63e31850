#!/usr/bin/env bash
# abi.sh LIBRARY [--write]: compares the binary interface of the header with the committed dump,
# abi/netmem.abi, and the header's functions with those that LIBRARY (a libnetmem.so) exports. With
# --write the dump is written anew: when the interface has grown, and the changelog says so.
#
# The compiler of Rust describes its functions to debuggers in Rust's terms, so what is dumped is a C
# object that has a pointer to each function: the types are what a C program is compiled with.
set -euo pipefail
library=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

grep -oE '\bnetmem_[a-z_]+\(' include/netmem.h | tr -d '(' | sort -u > "$work/declared"
nm -D --defined-only "$library" | awk '$3 ~ /^netmem_/ { print $3 }' | sort > "$work/exported"
diff "$work/declared" "$work/exported" || { echo "the header's functions (<) are not those that $1 exports (>)" >&2; exit 1; }

{
    echo '#include <netmem.h>'
    awk '{ printf "__typeof__(%s) *const abi_%s = &%s;\n", $1, $1, $1 }' "$work/declared"
} > "$work/abi.c"
gcc -std=gnu11 -g -shared -fPIC -Iinclude "$work/abi.c" -o "$work/abi.so"
abidw --no-corpus-path --no-comp-dir-path --no-show-locs --no-architecture "$work/abi.so" --out-file "$work/netmem.abi"
if [[ ${2:-} == --write ]]; then
    mkdir -p abi
    cp "$work/netmem.abi" abi/
else
    abidiff abi/netmem.abi "$work/netmem.abi"
fi
