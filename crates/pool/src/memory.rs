//! The kinds of memory, as types: which other parties can write a byte decides how the byte may be
//! read.
//!
//! ```text
//!                 another writer           descriptor  in this process    traits
//!   Private       none                     no          slices and copies  Readable, SystemMemory
//!   KernelShared  the kernel, by contract  no          slices and copies  Readable, SystemMemory
//!   PeerShared    a peer, at any time      yes         copies             PeerMemory, SystemMemory
//!   TrustedPeer   a peer, by contract      yes         slices and copies  Readable, PeerMemory
//!   Device        a device                 yes         nothing: it is not mapped
//! ```

use std::fmt;

/// Bytes in the smallest page.
pub const PAGE_SIZE: usize = 4096;

mod sealed {
    pub trait Sealed {}
}

/// A kind of memory. A [`Region`](crate::Region) has a kind, and so have its pages and fragments.
pub trait Memory: sealed::Sealed + fmt::Debug + Send + Sync + 'static {
    /// The kind's name in messages.
    const NAME: &'static str;
    /// Whether the memory is behind a file descriptor, so that it can be sent to another process.
    const SHARED_BY_FD: bool;
    /// Whether this process has the memory mapped. If not, there is nothing to sync for the CPU
    /// either.
    const MAPPED: bool;
    /// Whether the memory is [`Readable`]: [`Frag::readable`](crate::Frag::readable) then returns a
    /// slice.
    const READABLE: bool;
}

/// Memory that this process has mapped, so that bytes can at least be copied in and out.
#[diagnostic::on_unimplemented(
    message = "`{Self}` memory is not mapped in this process",
    label = "this needs memory that is mapped",
    note = "device memory has no addresses here: its pages have an `index`, a `file_offset` and a `dma_addr`"
)]
pub trait Mapped: Memory {}

/// Memory whose bytes do not change while this process holds them, so that a slice of them may
/// exist.
#[diagnostic::on_unimplemented(
    message = "there are no slices of `{Self}` memory",
    label = "this needs memory of which slices exist",
    note = "a peer can write `PeerShared` memory at any time: copy the bytes out with `copy_to` or `read_at`",
    note = "if the peer is trusted, declare it with `Region::trust_peer`: `TrustedPeer` memory has slices",
    note = "`Device` memory is not mapped in this process and has no bytes to read"
)]
pub trait Readable: Mapped {}

/// Memory that [`RegionOptions::build`](crate::RegionOptions::build) can take from the system,
/// because nothing needs to be promised about it: every mapped kind but [`TrustedPeer`].
#[diagnostic::on_unimplemented(
    message = "a region of `{Self}` memory is not built from the system's memory alone",
    note = "`TrustedPeer` memory comes from `Region::trust_peer`, `Device` memory from `Region::unmapped`"
)]
pub trait SystemMemory: Mapped {}

/// Memory that is mapped in this process and shared with a peer by file descriptor. A vhost-user
/// driver uses this kind.
///
/// Code that is generic over it treats a trusted peer and any other peer alike, and copies; code
/// that also requires [`Readable`] accepts trusted peers only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` memory is not shared with a peer by file descriptor",
    note = "use `PeerShared`, or `TrustedPeer` if the peer is trusted"
)]
pub trait PeerMemory: Mapped {}

/// Memory of this process alone.
#[derive(Debug)]
pub enum Private {}

/// Memory shared with the kernel, which does not write a frame it has delivered (AF_XDP).
#[derive(Debug)]
pub enum KernelShared {}

/// Memory that another process can write at any time (vhost-user). Bytes are copied out before they
/// are read.
#[derive(Debug)]
pub enum PeerShared {}

/// Memory shared with a peer that the user has declared trusted: a peer that writes only the
/// buffers that are posted to it.
///
/// It is shared by file descriptor like [`PeerShared`], and [`Readable`] like [`Private`]: pages
/// and fragments are slices, and fragments turn into `Bytes` without a copy. The declaration is
/// [`Region::<PeerShared>::trust_peer`](crate::Region::trust_peer), which is `unsafe` and the only
/// source of such a region.
#[derive(Debug)]
pub enum TrustedPeer {}

/// Memory that this process never maps: a device's, behind a dma-buf or what stands in for one. Its
/// pages have a number, an offset in the file and a device address, and no bytes in this process.
#[derive(Debug)]
pub enum Device {}

macro_rules! kind {
    ($kind:ident, $name:literal, by_fd: $fd:literal, mapped: $mapped:literal, readable: $readable:literal) => {
        impl sealed::Sealed for $kind {}
        impl Memory for $kind {
            const NAME: &'static str = $name;
            const SHARED_BY_FD: bool = $fd;
            const MAPPED: bool = $mapped;
            const READABLE: bool = $readable;
        }
    };
}
kind!(Private, "private", by_fd: false, mapped: true, readable: true);
kind!(KernelShared, "kernel-shared", by_fd: false, mapped: true, readable: true);
kind!(PeerShared, "peer-shared", by_fd: true, mapped: true, readable: false);
kind!(TrustedPeer, "trusted-peer", by_fd: true, mapped: true, readable: true);
kind!(Device, "device", by_fd: true, mapped: false, readable: false);
impl Mapped for Private {}
impl Mapped for KernelShared {}
impl Mapped for PeerShared {}
impl Mapped for TrustedPeer {}
impl Readable for Private {}
impl Readable for KernelShared {}
impl Readable for TrustedPeer {}
impl PeerMemory for PeerShared {}
impl PeerMemory for TrustedPeer {}
impl SystemMemory for Private {}
impl SystemMemory for KernelShared {}
impl SystemMemory for PeerShared {}
