# shellcheck shell=bash disable=SC2154
# What the Debian packages have in common. Sourced by debian.sh and debian-library.sh, in the top of
# the tree.

maintainer="Netmem <netmem@localhost>"

# linked CRATE WHAT: name, version and licence of each crate that is linked into WHAT, which is the
# package CRATE of the workspace; then each licence's text once, with the crates that it is from.
# Needs jq, cargo, and the folder $work.
linked() {
    local ids name manifest text sum of
    ids=$(cargo tree --locked -p "$1" -e normal --prefix none -f '{p}' | awk 'NF > 1 { print $1 "@" substr($2, 2) }' | sort -u)
    cargo metadata --locked --format-version 1 |
        jq -r --arg ids "$ids" '($ids | split("\n")) as $linked | .packages[] | select(.source != null)
            | select("\(.name)@\(.version)" | IN($linked[])) | [.name, .version, .license // "see its files", .manifest_path] | @tsv' > "$work/crates"
    echo "Libraries that are linked into $2, besides Netmem's own and Rust's standard library (MIT or Apache-2.0):"
    echo
    awk -F'\t' '{ printf "  %s %s: %s\n", $1, $2, $3 }' "$work/crates"
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
    done
}

# copyright PLACE: the file `copyright`, in which PLACE has the licences of what is linked in.
copyright() {
    cat << END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: netmem
Comment: Libraries that are linked in, with their licences: $1.

Files: *
Copyright: the authors of Netmem
License: Expat or Apache-2.0

License: Apache-2.0
 The text is in /usr/share/common-licenses/Apache-2.0.

License: Expat
END
    sed 's/^$/./; s/^/ /' LICENSE-MIT
}

# changelog PACKAGE VERSION SCRIPT: Debian's own changelog, which must be there. Its date is that of
# the sources (SOURCE_DATE_EPOCH; the last commit; without git, CHANGELOG.md), so that packages of
# several architectures have the same file.
changelog() {
    local date=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date -r CHANGELOG.md +%s)}
    printf '%s (%s) unstable; urgency=medium\n\n  * Made by packaging/%s.\n\n -- %s  %s\n' "$1" "$2" "$3" "$maintainer" "$(date -Rud "@$date")" | gzip -9n
}

# depends FILE...: the field `Depends` of these programs and libraries. Needs the folder $work.
depends() {
    # dpkg-shlibdeps wants a source package around it.
    mkdir "$work/debian"
    printf 'Source: netmem\n\nPackage: netmem\nArchitecture: any\n' > "$work/debian/control"
    (cd "$work" && dpkg-shlibdeps -O "$@" 2> /dev/null | sed -n 's/^shlibs:Depends=//p')
}
