#!/usr/bin/env bash
# debian13.sh DIR: the programs of Debian 13 that the tests of real peers use, unpacked at DIR
# beside the system: QEMU 10, Open vSwitch 3.5 with DPDK, passt with vhost-user, DPDK 24.11's
# testpmd and headers, and for guests Linux 6.12, iperf3 and ethtool. Debian 12's own are too old:
# its QEMU crashes with vhost-user and MSI-X, its Open vSwitch comes with DPDK 22.11, its passt
# knows no vhost-user.
#
# Nothing is installed and no maintainer script runs, so this needs no root and no chroot: apt
# resolves the packages against an empty system of its own at DIR/apt, and dpkg-deb unpacks them.
# The mirror is the one that the system's apt uses. The programs are started by the root's own
# loader (see lib.py). DIR is finished once DIR/done lists the packages, and is then left as it is.
# Where the archive cannot be had, the output is a line that starts with `skipped:`, and the exit
# status is 0.
set -euo pipefail

dir=${1:?usage: debian13.sh DIR}
packages=(base-files qemu-system-x86 openvswitch-switch-dpdk dpdk-dev libdpdk-dev passt busybox-static iperf3 ethtool
    linux-image-cloud-amd64)
skip() { echo "skipped: $*"; exit 0; }
command -v flock > /dev/null || skip "flock is not installed"

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
exec 9> "$dir/lock"
flock 9
# A root of before lacks what was added since.
[[ ! -f $dir/done || $(< "$dir/done") != "${packages[*]}" ]] || { echo "there: a Debian 13 root"; exit 0; }
for command in apt-get awk dpkg dpkg-deb; do
    command -v "$command" > /dev/null || skip "$command is not installed"
done
[[ $(dpkg --print-architecture) == amd64 ]] || skip "the peers are packages for amd64"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -f $keyring ]] || skip "there is no Debian archive keyring"
# The format is apt's, not the shell's.
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $2 == "Debian"  && !uri { uri = $3 } END { print uri }')
[[ -n $mirror ]] || skip "the system's apt knows no mirror of Debian (apt-get update?)"

SECONDS=0
rm -rf "$dir/done" "$dir/apt" "$dir/root"
mkdir -p "$dir"/apt/{etc,state/lists/partial,cache/archives/partial} "$dir/root"
: > "$dir/apt/status"
echo "deb [signed-by=$keyring] $mirror trixie main" > "$dir/apt/etc/sources.list"
apt() {
    apt-get -qq -o Dir::Etc::sourcelist="$dir/apt/etc/sources.list" -o Dir::Etc::sourceparts=- -o Dir::Etc::preferencesparts=- \
        -o Dir::State="$dir/apt/state" -o Dir::State::status="$dir/apt/status" -o Dir::Cache="$dir/apt/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=2 "$@" 2>&1
}
said=$(apt update) || skip "Debian 13's package lists cannot be had: ${said##*$'\n'}"
said=$(apt install --yes --no-install-recommends --download-only "${packages[@]}") ||
    skip "Debian 13's packages cannot be had: ${said##*$'\n'}"

# /bin, /lib and /sbin are symbolic links of base-files, and must be there before anything is put
# below them.
for package in "$dir"/apt/cache/archives/{base-files_*,*}.deb; do
    dpkg-deb --extract "$package" "$dir/root"
done
[[ -x $dir/root/usr/bin/qemu-system-x86_64 ]] || { echo "failed: no QEMU was unpacked" >&2; exit 1; }
rm -rf "$dir/apt" "$dir"/root/usr/share/{doc,man,locale}
find "$dir/root/usr/lib" -name "*.a" -delete
echo "${packages[*]}" > "$dir/done"
echo "made: a Debian 13 root of $(du -sm "$dir/root" | cut -f1) MiB, in $SECONDS s"
