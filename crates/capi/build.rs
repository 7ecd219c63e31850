//! The name by which programs load the shared library, and the flag by which it stays loaded.
//!
//! `netmem-percpu` pins each object that contains restartable sequences, and so this library, too,
//! but only where there are sequences: on x86-64 with glibc, and if the dynamic linker allows it.
//! The flag is for the other cases. The handler that `netmem_sigbus_install` installs has its
//! address in this library as long as the process lives, on every target. The flag does not replace
//! the pin: a library that is linked to `libnetmem.a` does not have it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnetmem.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
