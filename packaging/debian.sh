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

version=$("$binary" --version | cut -d' ' -f2)-1
maintainer="Netmem <netmem@localhost>"
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
# Debian's own, which must be there. Its date is the program's, so that the same program makes the
# same package.
printf 'netmem (%s) unstable; urgency=medium\n\n  * Made by packaging/debian.sh.\n\n -- %s  %s\n' "$version" "$maintainer" "$(date -Rr "$binary")" |
    gzip -9n > "$doc/changelog.Debian.gz"

# What is linked in: name, version and licence of each crate, then each text once, with the crates
# that it is from.
crates() {
    local ids
    ids=$(cargo tree --locked -p netmem-cli -e normal --prefix none -f '{p}' | awk 'NF > 1 { print $1 "@" substr($2, 2) }' | sort -u)
    cargo metadata --locked --format-version 1 |
        jq -r --arg ids "$ids" '($ids | split("\n")) as $linked | .packages[] | select(.source != null)
            | select("\(.name)@\(.version)" | IN($linked[])) | [.name, .version, .license // "see its files", .manifest_path] | @tsv'
}
crates > "$work/crates"
{
    echo "Libraries that are linked into /usr/bin/netmem, besides Netmem's own and Rust's standard library (MIT or Apache-2.0):"
    echo
    awk -F'\t' '{ printf "  %s %s: %s\n", $1, $2, $3 }' "$work/crates"
} > "$work/libraries"
mkdir "$work/texts"
while IFS=$'\t' read -r name _ _ manifest; do
    while IFS= read -r -d '' text; do
        sum=$(sha256sum < "$text" | cut -d' ' -f1)
        [[ -e $work/texts/$sum ]] || cp "$text" "$work/texts/$sum"
        echo "$name" >> "$work/texts/$sum.of"
    done < <(find "${manifest%/*}" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'copying*' -o -iname 'notice*' -o -iname 'unlicense*' \) -print0)
done < "$work/crates"
for of in "$work"/texts/*.of; do
    printf '\n==== %s\n\n' "$(sort -u "$of" | paste -sd' ')"
    cat "${of%.of}"
done > "$work/licences"
cat "$work/libraries" "$work/licences" | gzip -9n > "$doc/libraries.gz"

{
    cat << END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: netmem
Comment: Libraries that are linked in, with their licences: libraries.gz.

Files: *
Copyright: the authors of Netmem
License: Expat or Apache-2.0

License: Apache-2.0
 The text is in /usr/share/common-licenses/Apache-2.0.

License: Expat
END
    sed 's/^$/./; s/^/ /' LICENSE-MIT
} > "$doc/copyright"

# dpkg-shlibdeps wants a source package around it.
mkdir "$work/debian"
printf 'Source: netmem\n\nPackage: netmem\nArchitecture: any\n' > "$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O "$root/usr/bin/netmem" 2> /dev/null | sed -n 's/^shlibs:Depends=//p')
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
