#!/usr/bin/env bash
# backports.sh DIR: the Linux kernel of Debian 13's backports with its modules, unpacked at
# DIR/backports, beside the root of debian13.sh. It is for tests of what Debian 13's own kernel
# lacks. As there, nothing is installed and root is not needed. It is finished once
# DIR/backports/done is there, and is then left as it is. Where the archive cannot be had, the
# output is a line that starts with `skipped:`, and the exit status is 0.
set -euo pipefail

dir=${1:?usage: backports.sh DIR}/backports
skip() { echo "skipped: $*"; exit 0; }
command -v flock > /dev/null || skip "flock is not installed"

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
exec 9> "$dir/lock"
flock 9
[[ ! -f $dir/done ]] || { echo "there: Linux $(< "$dir/done")"; exit 0; }
for command in apt-cache apt-get awk dpkg-deb grep; do
    command -v "$command" > /dev/null || skip "$command is not installed"
done
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -f $keyring ]] || skip "there is no Debian archive keyring"
# The format is apt's, not the shell's.
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $2 == "Debian"  && !uri { uri = $3 } END { print uri }')
[[ -n $mirror ]] || skip "the system's apt knows no mirror of Debian (apt-get update?)"

rm -rf "$dir/apt" "$dir/root"
mkdir -p "$dir"/apt/{etc,state/lists/partial,cache/archives/partial,packages} "$dir/root"
: > "$dir/apt/status"
echo "deb [signed-by=$keyring] $mirror trixie-backports main" > "$dir/apt/etc/sources.list"
apt() {
    local command=$1
    shift
    "$command" -q -q -o Dir::Etc::sourcelist="$dir/apt/etc/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o Dir::State="$dir/apt/state" -o Dir::State::status="$dir/apt/status" -o Dir::Cache="$dir/apt/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=2 "$@"
}
said=$(apt apt-get update 2>&1) || skip "the lists of Debian 13's backports cannot be had: ${said##*$'\n'}"
# The kernel and its parts; not the programs that would install it.
mapfile -t packages < <(apt apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
    linux-image-cloud-amd64 | grep -E '^linux-(image|binary|modules)-[0-9]')
((${#packages[@]})) || skip "Debian 13's backports have no kernel"
said=$(cd "$dir/apt/packages" && apt apt-get download "${packages[@]}" 2>&1) || skip "the kernel cannot be had: ${said##*$'\n'}"
for package in "$dir"/apt/packages/*.deb; do
    dpkg-deb --extract "$package" "$dir/root"
done
modules=("$dir"/root/usr/lib/modules/*)
[[ -f ${modules[0]}/vmlinuz ]] || { echo "failed: no kernel was unpacked" >&2; exit 1; }
rm -rf "$dir/apt"
echo "${modules[0]##*/}" > "$dir/done"
echo "made: Linux $(< "$dir/done")"
