//! The name by which programs load the shared library, and its pin: threads have restartable
//! sequences and destructors in it, so it is never unloaded.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnetmem.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
