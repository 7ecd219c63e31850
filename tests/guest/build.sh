#!/usr/bin/env bash
# build.sh OUTDIR: a guest of a few megabytes, OUTDIR/vmlinuz and OUTDIR/initramfs.gz, from Debian's
# cloud kernel, busybox and iperf3. Nothing is installed; root is not needed. Needs: apt, dpkg-deb,
# cpio, gzip, busybox (static), iperf3.
set -euo pipefail

out=${1:?usage: build.sh OUTDIR}
here=$(cd "$(dirname "$0")" && pwd)
for command in apt-get dpkg-deb cpio busybox iperf3; do
    command -v "$command" > /dev/null || { echo "skipped: $command is not installed"; exit 0; }
done

mkdir -p "$out"
cd "$out"
out=$PWD
if [[ ! -f vmlinuz ]]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
    [[ -n $package ]] || { echo "skipped: apt knows no linux-image-cloud-amd64 (apt-get update?)"; exit 0; }
    rm -rf kernel
    mkdir kernel
    (cd kernel && apt-get download -q "$package" >&2) || { echo "skipped: $package cannot be downloaded"; exit 0; }
    (cd kernel && dpkg-deb -x ./*.deb .)
    cp kernel/boot/vmlinuz-* vmlinuz
fi

rm -rf root
mkdir -p root/{bin,modules,proc,sys,dev,tmp}
cp "$(command -v busybox)" root/bin/busybox
ln -s busybox root/bin/sh

# In the order that insmod wants them: each needs the ones before it.
modules=(virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci failover net_failover virtio_net)
for i in "${!modules[@]}"; do
    find kernel/lib/modules -name "${modules[i]}.ko" -exec cp {} "root/modules/$i-${modules[i]}.ko" \;
    [[ -f root/modules/$i-${modules[i]}.ko ]] || { echo "failed: the kernel has no module ${modules[i]}" >&2; exit 1; }
done

# iperf3 and what it is linked with, at the paths where its loader looks.
iperf3=$(command -v iperf3)
cp "$iperf3" root/bin/iperf3
ldd "$iperf3" | grep -oE '/[^ ]+' | while read -r library; do
    mkdir -p "root$(dirname "$library")"
    cp -L "$library" "root$library"
done

cp "$here/init" root/init
chmod +x root/init
(cd root && find . | cpio --quiet -o -H newc -R 0:0) | gzip -1 > initramfs.gz
ls -l "$out/vmlinuz" "$out/initramfs.gz"
