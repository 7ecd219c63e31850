//! AF_XDP: queues of a network interface, the XDP program, and a helper with privileges.
//!
//! [`Xsk::open`] opens a queue of an interface, whose [`XskRx`] and [`XskTx`] are queues as those
//! of a virtio-net device. [`helper`] opens sockets for a process without privileges.
//!
//! The package is `netmem-xsk`.

#[doc(inline)]
pub use netmem_xsk::{
    AttachError, AttachMode, Attached, BusyPoll, ClosedQueue, CopyReason, Fault, Filter, FrameHolder, Grant, HeldFrame,
    Interface, InterfaceInfo, InterfaceState, KernelMetadata, KernelStats, MAX_RULES, MixedHalves, Mode, NoLaunchTimes,
    NoRxMetadata, NotReopened, Program, ProgramOptions, Promiscuous, QueueOptions, QueueStopped, Rule, RxDrops, RxHash,
    RxMetadata, RxMetadataReader, RxPoll, RxStats, TooManyRules, TxRequest, TxStats, TxTimestamp, Umem, UmemMemory,
    UmemOptions, VlanTag, XdpFeatures, Xsk, XskError, XskOptions, XskRx, XskSocket, XskTx, check, defer_interrupts,
    helper, privileges, quirks, reclaim, rx_metadata,
};

#[cfg(feature = "device")]
pub use crate::xsk_port::XskPort;
