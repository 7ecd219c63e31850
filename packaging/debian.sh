#!/usr/bin/env bash
# debian.sh BINARY DIR: a Debian package of the command, DIR/netmem_VERSION-1_ARCHITECTURE.deb:
# program, man pages, completions of three shells, documentation, and the licences of all that is
# linked into the program.
#
# BINARY is target/release/netmem, built on the oldest Debian that the package is for: the package
# depends on the C library that the program was linked to. Needs dpkg-dev, jq and cargo. By
# `dpkg-deb` and not by `cargo deb`, which would be a tool of two hundred crates for a tree of a
# dozen files.
set -euo pipefail

binary=$(realpath "${1:?usage: debian.sh BINARY DIR}")
mkdir -p "${2:?usage: debian.sh BINARY DIR}"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/netmem
umask 022

# shellcheck source=packaging/debian-common.sh
source packaging/debian-common.sh
version=$("$binary" --version | cut -d' ' -f2)-1
architecture=$(dpkg --print-architecture)
install -D "$binary" "$root/usr/bin/netmem"
strip --strip-unneeded "$root/usr/bin/netmem"

"$binary" pages "$work/pages"
mkdir -p "$root/usr/share/man/man1"
for page in "$work"/pages/man1/*.1; do
    gzip -9n < "$page" > "$root/usr/share/man/man1/${page##*/}.gz"
done
completions=$work/pages/completions
install -Dm644 "$completions/netmem.bash" "$root/usr/share/bash-completion/completions/netmem"
install -Dm644 "$completions/_netmem" "$root/usr/share/zsh/vendor-completions/_netmem"
install -Dm644 "$completions/netmem.fish" "$root/usr/share/fish/vendor_completions.d/netmem.fish"

doc=$root/usr/share/doc/netmem
mkdir -p "$doc"/docs/{design,guides,notes,reference}
install -m644 README.md SECURITY.md "$doc"
install -m644 docs/*.md "$doc/docs"
for folder in design guides notes reference; do
    install -m644 docs/$folder/*.md "$doc/docs/$folder"
done
gzip -9n < CHANGELOG.md > "$doc/changelog.gz"
changelog netmem "$version" debian.sh > "$doc/changelog.Debian.gz"
linked netmem-cli /usr/bin/netmem | gzip -9n > "$doc/libraries.gz"
copyright libraries.gz > "$doc/copyright"

depends=$(depends "$root/usr/bin/netmem")
mkdir "$root/DEBIAN"
cat > "$root/DEBIAN/control" << END
Package: netmem
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Section: net
Priority: optional
Depends: $depends
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Description: network memory for user space: measure, receive, serve, be a device
 Receives packets through page pools on virtio-net, vhost-user and AF_XDP,
 measures what that saves, is a virtio-net device for virtual machines, and
 serves on a TCP of its own.
END
dpkg-deb --root-owner-group --build "$root" "$out/netmem_${version}_$architecture.deb"
