#!/usr/bin/env bash
# run.sh [--tests]: makes the packages, unpacks them into target/packages, and builds and runs
# programs there that depend on them and not on the tree: the example of each front page, and netmem
# with each of its features alone. Counts the crates that such a program has in its tree, documents
# each package as docs.rs does, and tries a publication of all. With --tests, the packages' own tests
# are built there, too, which takes minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tree=$PWD
target=${CARGO_TARGET_DIR:-$tree/target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
out=$target/packages
# Unoptimised and without debug information: whether it builds is what is asked.
export RUSTFLAGS="-D warnings" CARGO_TARGET_DIR=$target/packages-built CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never

fail() { echo "failed: $*" >&2; exit 1; }

rm -rf "$out" "$CARGO_TARGET_DIR/package"
mkdir -p "$out"
cargo package --workspace --exclude netmem-bench --exclude netmem-api --exclude netmem-packetdrill --exclude netmem-structure --exclude netmem-testing \
    --exclude netmem-tests --no-verify --allow-dirty --quiet 2> "$out/package.txt" || { cat "$out/package.txt" >&2; exit 1; }
declare -A folders
for crate in "$CARGO_TARGET_DIR"/package/*.crate; do
    # With the current time (-m): cargo compares ages, and those in an archive are always the same.
    tar -xzmf "$crate" -C "$out"
    folder=$(basename "$crate" .crate)
    folders[${folder%-*}]=$folder
done
echo "${#folders[@]} packages"

# ---- what is in them

for folder in "${folders[@]}"; do
    for file in Cargo.toml README.md LICENSE-MIT LICENSE-APACHE; do
        [[ -f $out/$folder/$file ]] || fail "$folder has no $file"
    done
    # Targets have paths, dependencies must have none.
    ! grep -nE '^path *= *"(\.\.|/)' "$out/$folder/Cargo.toml" || fail "$folder has a path that leads out of it"
done
[[ -z $(find "$out" -type l) ]] || fail "there are links"

# ---- programs

# program NAME DEPENDENCIES: an empty program's package; its source is read from standard input.
program() {
    mkdir -p "$out/$1/src"
    printf '[package]\nname = "%s"\nversion = "0.0.0"\nedition = "2024"\n\n%s\n' "$1" "$2" > "$out/$1/Cargo.toml"
    cat > "$out/$1/src/main.rs"
}
# The crates beside its own that a front page's example names.
declare -A besides=(
    [netmem-packet]='netmem-pool = "0.1"'
    [netmem-xsk]=$'netmem-packet = "0.1"\nnetmem-pool = "0.1"'
    [netmem-virtio]=$'netmem-packet = "0.1"\nnetmem-pool = "0.1"'
    [netmem-inet]='netmem-pool = "0.1"'
    [netmem-measure]='netmem-pool = "0.1"'
)
libraries=()
for package in "${!folders[@]}"; do
    # Its backticks are not the shell's.
    # shellcheck disable=SC2016
    example=$(sed -n '/^```rust/,/^```$/p' "$out/${folders[$package]}/README.md" | sed '/^```/d')
    [[ -n $example ]] || continue
    libraries+=("$package")
    # As rustdoc does it, for an example without a function.
    [[ $example == *"fn main"* ]] || example="fn main() { $example }"
    program "with-$package" $'[dependencies]\n'"$package = \"0.1\"
${besides[$package]:-}" <<< "$example"
done
((${#libraries[@]} == 11)) || fail "of ${#libraries[@]} packages, the front page has an example"
program only-pool $'[dependencies]\nnetmem-pool = { version = "0.1", default-features = false }' <<< 'fn main() {}'
program only-xsk $'[dependencies]\nnetmem-xsk = { version = "0.1", default-features = false }' <<< 'fn main() {}'
program only-tcp $'[dependencies]\nnetmem-inet = { version = "0.1", default-features = false, features = ["tcp"] }' <<< 'fn main() {}'
program with-driver $'[dependencies]\nnetmem-pool = "0.1"\nnetmem-virtio = { version = "0.1", default-features = false }' <<< 'fn main() {}'
features=(virtio device pcap cuda xsk metadata inet tokio futures quinn devmem)
{
    echo '[dependencies]'
    echo 'netmem = { version = "0.1", default-features = false }'
    echo 'tokio = { version = "1", default-features = false, optional = true }'
    echo 'futures-io = { version = "0.3", optional = true }'
    echo 'quinn = { version = "0.11", default-features = false, optional = true }'
    echo '[features]'
    echo 'virtio = ["netmem/virtio"]'
    echo 'device = ["virtio", "netmem/device"]'
    echo 'pcap = ["device", "netmem/pcap"]'
    echo 'cuda = ["device", "netmem/cuda"]'
    echo 'xsk = ["netmem/xsk"]'
    echo 'metadata = ["xsk", "netmem/metadata"]'
    echo 'inet = ["netmem/inet"]'
    echo 'tokio = ["inet", "netmem/tokio", "dep:tokio"]'
    echo 'futures = ["inet", "netmem/futures", "dep:futures-io"]'
    echo 'quinn = ["inet", "netmem/quinn", "dep:quinn"]'
    echo 'devmem = ["netmem/devmem"]'
} > "$out/features.toml"
program with-feature "$(< "$out/features.toml")" < tests/packages/main.rs

{
    printf '[workspace]\nresolver = "3"\nmembers = ["*-*"]\n\n[patch.crates-io]\n'
    for package in "${!folders[@]}"; do
        printf '%s = { path = "%s" }\n' "$package" "${folders[$package]}"
    done
} > "$out/Cargo.toml"
# The versions that the tree is tested with.
cp Cargo.lock "$out"
cd "$out"
cargo metadata --format-version 1 > metadata.json
# All that a package names, also what is built by none of the programs: documents are made offline.
cargo fetch --quiet
! grep -qF "\"$tree/crates/" metadata.json || fail "a path leads into the tree"

# crates PACKAGE MOST: how many crates are in the tree of a program, itself included.
crates() {
    local count
    count=$(cargo tree --quiet --package "$1" --edges normal --target x86_64-unknown-linux-gnu --prefix none | sed 's/ (\*)$//' | sort -u | wc -l)
    echo "$1: $count crates, at most $2"
    ((count <= $2)) || fail "$1 has too many crates"
}
crates with-netmem-pool 17
crates with-driver 20
crates with-netmem 25
# The program, the package, and the 12 and 15 below it.
crates only-pool 14
crates only-xsk 17

# ---- examples, documentation, publication

# The example of xsk needs an interface: it is built.
for package in "${libraries[@]}"; do
    how=run
    [[ $package != netmem-xsk ]] || how=build
    cargo $how --quiet --package "with-$package"
done

# The TCP core needs no operating system.
for triple in wasm32-unknown-unknown aarch64-apple-darwin; do
    if [[ -d $(rustc --print sysroot)/lib/rustlib/$triple/lib ]]; then
        cargo check --quiet --package only-tcp --target "$triple"
    else
        echo "skipped: the TCP core for $triple (rustup target add $triple)"
    fi
done
! cargo tree --quiet --package only-tcp --edges normal --prefix none | grep -E '^(netmem-(pool|packet)|libc|rustix) ' || fail "the TCP core is not alone"

# As docs.rs does it: by the package's own metadata, and without a network.
for package in "${!folders[@]}"; do
    flags=$(jq -r --arg name "$package" '.packages[] | select(.name == $name) | .metadata.docs.rs // {} | if ."all-features" then "--all-features" else "" end' metadata.json)
    # shellcheck disable=SC2086
    DOCS_RS=1 RUSTDOCFLAGS="-D warnings --cfg docsrs" cargo doc --offline --quiet --no-deps --package "$package" $flags
done

# Each prints what it has used.
cargo run --quiet --package with-feature
for feature in "${features[@]}"; do
    cargo run --quiet --package with-feature --features "$feature"
done
cargo run --quiet --package with-feature --all-features

if [[ ${1:-} == --tests ]]; then
    for package in "${!folders[@]}"; do
        echo "tests of $package"
        cargo test --quiet --no-run --all-features --package "$package"
    done
fi

# All packages, in the order in which each finds those that it needs. What was built above is not
# built again.
cd "$tree"
if cargo publish --workspace --dry-run --no-verify --allow-dirty --quiet 2> "$out/publish.txt"; then
    echo "a publication of all packages was tried"
elif grep -qiE 'could not resolve host|failed to (fetch|query)|network|dns' "$out/publish.txt"; then
    echo "skipped: a publication cannot be tried without the registry"
else
    cat "$out/publish.txt" >&2
    fail "the packages cannot be published"
fi

# ---- a release

# In a copy: each package has the new version, and what was unreleased has it, too. That is done
# offline.
cargo fetch --locked --quiet
mkdir -p "$out/release"
git ls-files -z | xargs -0 cp --parents -t "$out/release"
"$out/release/packaging/version.sh" 99.1.2 > /dev/null
cd "$out/release"
[[ $(cargo metadata --no-deps --offline --format-version 1 | jq '[.packages[] | select(.publish == null) | .version] | unique == ["99.1.2"]') == true ]] || fail "a package has another version"
cargo metadata --offline --locked --format-version 1 > /dev/null
grep -qE '^## 99\.1\.2 - 2' CHANGELOG.md || fail "the changelog has no section of the new version"
! packaging/version.sh 99.1.2 2> /dev/null || fail "the same version was accepted again"
echo "a release was tried"
