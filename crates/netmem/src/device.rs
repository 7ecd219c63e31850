//! The virtio-net device: for a driver in this process, in another process, or in a virtual
//! machine.
//!
//! A [`NetDevice`] has queues, each with a [`Port`](port::Port) that frames come from and go to: a
//! tap, a generator, a capture, an AF_XDP queue ([`XskPort`](crate::xdp::XskPort)).
//!
//! The package is `netmem-virtio`, with its feature `device`.

#[doc(inline)]
pub use netmem_virtio::device::{
    ConnectError, Connection, Control, DeviceError, DriverFault, DropReason, InProcess, InflightError, MAX_PAIRS,
    NetDevice, Options, PairHandle, Stats, Worker,
};
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use netmem_virtio::guest_memory::cuda;
#[doc(inline)]
pub use netmem_virtio::guest_memory::{MemoryError, MemoryLimits, MemoryUse, import};

/// Where the device's frames come from and go to.
pub mod port {
    #[doc(inline)]
    pub use netmem_netem::{LinkError, LinkOptions};
    #[doc(inline)]
    pub use netmem_virtio::device::port::{
        ALL_OFFLOADS, Cross, Echo, Gen, LinkStats, Linked, MAX_WIRE, Port, PortError, Posted, Rest, Sink, Steered,
        Steering, Tap, TapError, TapQueues,
    };
    #[cfg(feature = "pcap")]
    #[doc(inline)]
    pub use netmem_virtio::device::port::{CaptureError, LinkCapture, Pcap, Play};
}
