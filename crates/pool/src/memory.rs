//! The kinds of memory, as types: who else can write a byte decides how it may be read.

mod sealed {
    pub trait Sealed {}
}

/// A kind of memory. What a [`Region`](crate::Region) is made of, and so its pages and fragments.
pub trait Memory: sealed::Sealed + Send + Sync + 'static {
    /// How messages call it.
    const NAME: &'static str;
    /// Whether the memory is behind a file descriptor, so that another process can be given it.
    const SHARED_BY_FD: bool;
}

/// Memory that this process has mapped, so that bytes can at least be copied in and out.
pub trait Mapped: Memory {}

/// Memory whose bytes nobody changes while we hold them, so that a slice of it may exist.
pub trait Readable: Mapped {}

/// Memory of this process alone.
#[derive(Debug)]
pub enum Private {}

/// Memory shared with the kernel, which does not write a frame it has delivered (AF_XDP).
#[derive(Debug)]
pub enum KernelShared {}

/// Memory that another process can write at any time (vhost-user). Bytes are copied out before they are looked at.
#[derive(Debug)]
pub enum PeerShared {}

macro_rules! kind {
    ($kind:ident, $name:literal, $fd:literal) => {
        impl sealed::Sealed for $kind {}
        impl Memory for $kind {
            const NAME: &'static str = $name;
            const SHARED_BY_FD: bool = $fd;
        }
        impl Mapped for $kind {}
    };
}
kind!(Private, "private", false);
kind!(KernelShared, "kernel-shared", false);
kind!(PeerShared, "peer-shared", true);
impl Readable for Private {}
impl Readable for KernelShared {}
