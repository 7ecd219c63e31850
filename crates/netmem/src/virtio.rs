//! The virtio-net driver, and the sockets by which it reaches a device in another process.
//!
//! [`VirtioNet::probe`] initialises a device behind a vhost-user socket ([`VhostUser::connect`])
//! and returns its [`QueuePair`]s. The module `device` (feature `device`) has the other side.
//!
//! The package is `netmem-virtio`. Virtqueues without a network device are there:
//! `netmem_virtio::virtqueue`.

#[doc(inline)]
pub use netmem_virtio::driver::{
    DeviceFault, EitherRx, NetError, NetOptions, Offload, QueuePair, QueueStopped, QueueWait, QueuesError,
    RestartError, Restarted, RxClosed, RxMode, RxPoll, RxStats, SplitClosed, SplitOptions, SplitPoll, TxStats,
    VirtioNet, VirtioRx, VirtioRxQueues, VirtioSplitRx, VirtioSplitTx, VirtioTx,
};
#[doc(inline)]
pub use netmem_virtio::net::config::NetConfig;
#[doc(inline)]
pub use netmem_virtio::net::{HeaderFault, MIN_FRAME, OFFLOAD_FRAME, Offloads, VnetHdr, feature};
#[doc(inline)]
pub use netmem_virtio::{
    BadSpin, Malformed, MessageError, NotifyError, Request, Spin, VhostUser, VhostUserError, socket,
};
