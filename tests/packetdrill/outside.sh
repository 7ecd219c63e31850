#!/usr/bin/env bash
# outside.sh: makes a project outside of the tree, whose object has the source of examples/smoltcp
# and depends on netmem-packetdrill, and runs packetdrill's scripts on it (run.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
tree=$(cd ../.. && pwd)
target=${CARGO_TARGET_DIR:-$tree/target}
project=$target/packetdrill-outside
rm -rf "$project"
mkdir -p "$project/src"
cp examples/smoltcp/lib.rs "$project/src/lib.rs"
# The versions that the tree is tested with.
cp "$tree/Cargo.lock" "$project"
{
    # Not a member of the tree, in which target/ is.
    printf '[workspace]\n\n[package]\nname = "outside"\nversion = "0.1.0"\nedition = "2024"\n\n[lib]\ncrate-type = ["cdylib"]\n\n[dependencies]\n'
    printf 'libc = "0.2"\nnetmem-packetdrill = { path = "%s" }\n' "$here"
    sed -n 's/^smoltcp = .*features = \[/&"medium-ip", "proto-ipv6", /p' "$tree/Cargo.toml"
} > "$project/Cargo.toml"
CARGO_TARGET_DIR=$target/packetdrill-outside-built cargo build --quiet --offline --manifest-path "$project/Cargo.toml"
./run.py --object "$target/packetdrill-outside-built/debug/liboutside.so" --expected examples/smoltcp/expected.txt "$@"
