#!/usr/bin/env bash
# run.sh [COMMAND...]: the README's two commands on a machine that has a compiler and a Rust
# toolchain, and no other program than those of Debian's smallest system: as root, and as a user.
# What a test lacks there must be reported as skipped. With words, that command runs in place of the
# two, for example `tests/minimal/run.sh cargo test -p netmem-cli --test all xsk`.
#
# The system is made by debootstrap in target/minimal/root, once; it needs root and an archive of
# Debian, the one that the system's apt uses. The tree is copied into it, this toolchain is mounted,
# and crates come from what cargo has fetched. What is built there stays in target/minimal/built.
# Each command has at most LIMIT seconds (3600). All of it takes 25 minutes with two CPUs, of which
# 12 build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tree=$PWD
export PATH=$PATH:/usr/sbin:/sbin
limit=${LIMIT:-3600}
target=${CARGO_TARGET_DIR:-$tree/target}
mkdir -p "$target/minimal"
base=$(cd "$target/minimal" && pwd)
root=$base/root
release=bookworm
packages=gcc,libc6-dev
skip() { echo "skipped: $*"; exit 0; }

((EUID == 0)) || skip "another root directory needs root"
for program in debootstrap unshare chroot; do
    command -v "$program" > /dev/null || skip "$program is not installed"
done
exec 9> "$base/lock"
flock 9

# ---- the system

if [[ ! -f $base/done || $(< "$base/done") != "$release $packages" ]]; then
    # The format is apt's, not the shell's.
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' |
        awk '$1 == "Debian" && $2 == "Debian" && !uri { uri = $3 } END { print uri }')
    [[ -n $mirror ]] || skip "the system's apt knows no archive of Debian (apt-get update?)"
    rm -rf "$root" "$base/done"
    timeout "$limit" debootstrap --variant=minbase --include="$packages" "$release" "$root" "$mirror" > "$base/debootstrap.txt" 2>&1 ||
        skip "Debian's packages cannot be had: $(tail -n 1 "$base/debootstrap.txt")"
    chroot "$root" useradd --create-home --shell /bin/bash user
    echo "$release $packages" > "$base/done"
fi

# ---- what it gets of this machine

cargo fetch --locked --quiet
rust=$(rustc --print sysroot)
cargo=${CARGO_HOME:-$HOME/.cargo}
mkdir -p "$base/built" "$root/rust" "$root/built" "$root/cargo/registry"
rm -rf "$root/netmem"
mkdir "$root/netmem"
# With their times, so that cargo builds again only what has changed.
tar --create --exclude=./target --exclude=./fuzz/target --exclude=./.git . | tar --extract --directory "$root/netmem"
for part in index cache; do
    rm -rf "$root/cargo/registry/$part"
    cp -a "$cargo/registry/$part" "$root/cargo/registry"
done

# within USER COMMAND...: runs it in the system. Mounts and processes end with it.
within() {
    local user=$1
    shift
    local ids
    ids=$(chroot "$root" id -u "$user"):$(chroot "$root" id -g "$user")
    chown -R "$ids" "$root/netmem" "$root/cargo" "$base/built"
    # Variables of the inner shell.
    # shellcheck disable=SC2016
    timeout --kill-after=10 "$limit" unshare --mount --pid --fork --kill-child bash -euc '
        root=$1 rust=$2 built=$3 user=$4
        shift 4
        mount --make-rprivate /
        mount --rbind /dev "$root/dev"
        mount --rbind /sys "$root/sys"
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmp "$root/tmp"
        mount --bind -o ro "$rust" "$root/rust"
        mount --bind "$built" "$root/built"
        chmod 1777 "$root/tmp"
        exec chroot --userspec="$user:$user" "$root" env -i HOME=/home/user USER="$user" PATH=/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            CARGO_HOME=/cargo CARGO_TARGET_DIR=/built CARGO_NET_OFFLINE=true CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 \
            bash -c "cd /netmem && exec \"\$@\"" sh "$@"
    ' sh "$root" "$rust" "$base/built" "$user" "$@"
}

# ---- the commands

# run USER COMMAND...: with its output in a file, of which the last lines are printed. An error does
# not end this script.
failed=0
run() {
    local name=$1-${*: -1} status=0 begin=$SECONDS
    name=${name//[^a-z-]/}
    echo "-- $1: ${*:2}"
    within "$@" > "$base/$name.txt" 2>&1 < /dev/null || status=$?
    grep -E '^(test .* FAILED|failed: |error: |warning: |thread .* panicked)' "$base/$name.txt" || true
    echo "exit status $status after $((SECONDS - begin)) s, $(grep -c '^skipped: ' "$base/$name.txt") skipped, in target/minimal/$name.txt"
    ((status == 0)) || failed=1
}
if (($#)); then
    within "${AS:-user}" "$@"
    exit
fi
for user in root user; do
    run $user cargo run --release
    run $user cargo test --workspace --no-fail-fast
done
exit $failed
