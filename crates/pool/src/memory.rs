//! The kinds of memory, as types: who else can write a byte decides how it may be read.

use std::fmt;

mod sealed {
    pub trait Sealed {}
}

/// A kind of memory. What a [`Region`](crate::Region) is made of, and so its pages and fragments.
pub trait Memory: sealed::Sealed + fmt::Debug + Send + Sync + 'static {
    /// How messages call it.
    const NAME: &'static str;
    /// Whether the memory is behind a file descriptor, so that another process can be given it.
    const SHARED_BY_FD: bool;
    /// Whether this process has it mapped. If not there is nothing to sync for the CPU either.
    const MAPPED: bool;
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

/// Memory that this process never maps: a device's, behind a dma-buf or what stands in for one. Its pages have a number, an
/// offset in the file and a device address; bytes they have for others.
#[derive(Debug)]
pub enum Device {}

macro_rules! kind {
    ($kind:ident, $name:literal, by_fd: $fd:literal, mapped: $mapped:literal) => {
        impl sealed::Sealed for $kind {}
        impl Memory for $kind {
            const NAME: &'static str = $name;
            const SHARED_BY_FD: bool = $fd;
            const MAPPED: bool = $mapped;
        }
    };
}
kind!(Private, "private", by_fd: false, mapped: true);
kind!(KernelShared, "kernel-shared", by_fd: false, mapped: true);
kind!(PeerShared, "peer-shared", by_fd: true, mapped: true);
kind!(Device, "device", by_fd: true, mapped: false);
impl Mapped for Private {}
impl Mapped for KernelShared {}
impl Mapped for PeerShared {}
impl Readable for Private {}
impl Readable for KernelShared {}
