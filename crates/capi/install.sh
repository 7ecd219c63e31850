#!/usr/bin/env bash
# install.sh PREFIX: builds the C library and installs it below PREFIX: lib/libnetmem.so.0 (with its
# links) and libnetmem.a, include/netmem.h and netmem.hpp, lib/pkgconfig/netmem.pc.
# install.sh --header: writes include/netmem.h anew, by cbindgen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [[ ${1:-} == --header ]]; then
    cbindgen --config cbindgen.toml --crate netmem-capi --output include/netmem.h
    exit
fi
[[ $# == 1 && $1 != -* ]] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$1/lib/pkgconfig" "$1/include"
prefix=$(cd "$1" && pwd)
cargo build --release --quiet
version=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"name":"netmem-capi","version":"\([^"]*\)".*/\1/p')
built=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')/release
install -m 755 "$built/libnetmem_capi.so" "$prefix/lib/libnetmem.so.$version"
ln -sf "libnetmem.so.$version" "$prefix/lib/libnetmem.so.0"
ln -sf libnetmem.so.0 "$prefix/lib/libnetmem.so"
install -m 644 "$built/libnetmem_capi.a" "$prefix/lib/libnetmem.a"
install -m 644 include/netmem.h include/netmem.hpp "$prefix/include/"
cat > "$prefix/lib/pkgconfig/netmem.pc" << END
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: netmem
Description: Network memory for user space: page pools, fragments and reference counts
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lnetmem
Libs.private: -lpthread -ldl -lm
END
