//! The kinds of memory that can be a UMEM.
//!
//! The kernel writes to a UMEM while this process maps it, so memory of plain slices is none. The
//! trait makes that a compile error.

use netmem_pool::{KernelShared, Mapped, PeerShared, TrustedPeer};

mod sealed {
    pub trait Sealed {}
}

/// Memory that can be a UMEM: the kernel writes posted chunks of it.
///
/// | kind | the region is | frames are |
/// | --- | --- | --- |
/// | [`KernelShared`] | this process's alone | slices and `Bytes`, without a copy |
/// | [`PeerShared`] | also a vhost-user peer's | copied out before they are read |
/// | [`TrustedPeer`] | also a trusted peer's | both |
#[diagnostic::on_unimplemented(
    message = "`{Self}` memory is no UMEM",
    note = "the kernel writes to a UMEM: build the region as `KernelShared`, or as `PeerShared` where a vhost-user peer has it too"
)]
pub trait UmemMemory: Mapped + sealed::Sealed {}

impl sealed::Sealed for KernelShared {}
impl sealed::Sealed for PeerShared {}
impl sealed::Sealed for TrustedPeer {}
impl UmemMemory for KernelShared {}
impl UmemMemory for PeerShared {}
impl UmemMemory for TrustedPeer {}
