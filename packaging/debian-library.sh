#!/usr/bin/env bash
# debian-library.sh BUILT DIR: Debian packages of the C library, in DIR:
#
#   libnetmem0_VERSION-1_ARCHITECTURE.deb     libnetmem.so.0, and the licences of all that is linked in
#   libnetmem-dev_VERSION-1_ARCHITECTURE.deb  the headers, libnetmem.so, libnetmem.a, netmem.pc, the
#                                             example programs
#
# The first has the number of the SONAME in its name, so that a library with another binary
# interface can be installed beside it. BUILT is the folder in which cargo has built netmem-capi,
# such as target/release, on the oldest Debian that the packages are for: they depend on the C
# library that was linked to. Needs dpkg-dev, binutils, jq and cargo.
set -euo pipefail

built=$(realpath "${1:?usage: debian-library.sh BUILT DIR}")
mkdir -p "${2:?usage: debian-library.sh BUILT DIR}"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
# shellcheck source=packaging/debian-common.sh
source packaging/debian-common.sh

architecture=$(dpkg --print-architecture)
libdir=lib/$(dpkg-architecture -q DEB_HOST_MULTIARCH)
BUILT=$built DESTDIR=$work/all crates/capi/install.sh /usr "$libdir"
soname=$(objdump -p "$work/all/usr/$libdir/libnetmem.so" | awk '$1 == "SONAME" { print $2 }')
name=lib$(sed -n 's/^lib\(.*\)\.so\.\([0-9]*\)$/\1\2/p' <<< "$soname")
[[ $name != lib ]] || { echo "the library's SONAME is '$soname'" >&2; exit 1; }
upstream=$(sed -n 's/^Version: //p' "$work/all/usr/$libdir/pkgconfig/netmem.pc")
version=$upstream-1

# What programs need when they run, and what is needed to build them.
lib=$work/$name dev=$work/libnetmem-dev
mkdir -p "$lib/usr/$libdir" "$lib/DEBIAN" "$dev/DEBIAN"
mv "$work/all/usr" "$dev/usr"
mv "$dev/usr/$libdir/"libnetmem.so.* "$lib/usr/$libdir/"
strip --strip-unneeded "$lib/usr/$libdir/libnetmem.so.$upstream"
strip --strip-debug "$dev/usr/$libdir/libnetmem.a"

doc=usr/share/doc
mkdir -p "$lib/$doc/$name" "$dev/$doc/libnetmem-dev/examples"
install -m644 crates/capi/README.md "$dev/$doc/libnetmem-dev"
install -m644 crates/capi/c/*.c crates/capi/c/*.cpp "$dev/$doc/libnetmem-dev/examples"
# Which crates are linked in depends on the architecture. Packages of several ones have only files
# with other names, or with the same contents.
linked netmem-capi "$soname and libnetmem.a" | gzip -9n > "$lib/$doc/$name/libraries.$architecture.gz"
for package in "$name" libnetmem-dev; do
    folder=$work/$package/$doc/$package
    gzip -9n < CHANGELOG.md > "$folder/changelog.gz"
    changelog netmem "$version" debian-library.sh > "$folder/changelog.Debian.gz"
    copyright "/$doc/$name/libraries.*.gz" > "$folder/copyright"
done

# A program that is linked to the library depends on at least this version: before 1.0, a minor
# version may add to the interface.
echo "libnetmem ${soname##*.} $name (>= $version)" > "$lib/DEBIAN/shlibs"
echo "activate-noawait ldconfig" > "$lib/DEBIAN/triggers"

# control ROOT PACKAGE SECTION DEPENDS, and the description on standard input.
control() {
    cat > "$1/DEBIAN/control" << END
Package: $2
Source: netmem
Version: $version
Architecture: $architecture
Multi-Arch: same
Maintainer: $maintainer
Section: $3
Priority: optional
Depends: $4
Installed-Size: $(du -sk "$1/usr" | cut -f1)
$(cat)
END
    dpkg-deb --root-owner-group --build "$1" "$out/$2_${version}_$architecture.deb"
}
needs=$(depends "$lib/usr/$libdir/libnetmem.so.$upstream")
control "$lib" "$name" libs "$needs" << END
Description: network memory for C and C++ (shared library)
 Page pools, counted fragments of pages, reference counts, AF_XDP queues, and
 TCP streams into device memory, such as that of a GPU.
END
control "$dev" libnetmem-dev libdevel "$name (= $version)" << END
Description: network memory for C and C++ (development files)
 Page pools, counted fragments of pages, reference counts, AF_XDP queues, and
 TCP streams into device memory, such as that of a GPU.
 .
 This package has the headers, the archive and example programs.
END
