#!/usr/bin/env bash
# install.sh PREFIX [LIBDIR]: builds the C library and installs it below PREFIX:
# LIBDIR/libnetmem.so.0 (with its links) and libnetmem.a, include/netmem.h and netmem.hpp,
# LIBDIR/pkgconfig/netmem.pc. LIBDIR is relative to PREFIX: lib. With DESTDIR in the environment,
# all is written below DESTDIR, for a package of PREFIX. With BUILT, a folder of cargo's such as
# target/release, nothing is built. Paths are relative to the folder in which the caller is.
# install.sh --header: writes include/netmem.h anew, by cbindgen.
set -euo pipefail
here=$PWD
DESTDIR=${DESTDIR:+$(realpath -m "$DESTDIR")}
BUILT=${BUILT:+$(realpath -m "$BUILT")}
cd "$(dirname "${BASH_SOURCE[0]}")"

if [[ ${1:-} == --header ]]; then
    cbindgen --config cbindgen.toml --crate netmem-capi --output include/netmem.h
    exit
fi
[[ ($# == 1 || $# == 2) && $1 != -* && ${2:-lib} != /* ]] || { sed -n '2,7s/^# //p' install.sh >&2; exit 2; }
prefix=$(cd "$here" && realpath -m "$1")
libdir=${2:-lib}
to=$DESTDIR$prefix
mkdir -p "$to/$libdir/pkgconfig" "$to/include"
value() { cargo metadata --no-deps --format-version 1 | sed -n "s/.*$1.*/\1/p"; }
version=$(value '"name":"netmem-capi","version":"\([^"]*\)"')
if [[ -z $BUILT ]]; then
    cargo build --release --quiet
    BUILT=$(value '"target_directory":"\([^"]*\)"')/release
fi
install -m 644 "$BUILT/libnetmem_capi.so" "$to/$libdir/libnetmem.so.$version"
ln -sf "libnetmem.so.$version" "$to/$libdir/libnetmem.so.0"
ln -sf libnetmem.so.0 "$to/$libdir/libnetmem.so"
install -m 644 "$BUILT/libnetmem_capi.a" "$to/$libdir/libnetmem.a"
install -m 644 include/netmem.h include/netmem.hpp "$to/include/"
cat > "$to/$libdir/pkgconfig/netmem.pc" << END
prefix=$prefix
libdir=\${prefix}/$libdir
includedir=\${prefix}/include

Name: netmem
Description: Network memory for user space: page pools, fragments, reference counts, AF_XDP queues, device memory
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lnetmem
Libs.private: -lpthread -ldl -lm
END
