//! Network memory for user space: page pools, packets and virtio-net, in one crate.
//!
//! A program that moves packets needs memory that a device writes to, that is passed through the
//! program in pieces, and that is free again in time for the next packet. Netmem manages that
//! memory. Each receive queue has a [`PagePool`], whose pages are mapped once. Dropping a packet,
//! on any thread, returns its pages.
//!
//! ```text
//!   device writes into a posted page
//!     -> queue.poll(|poll| poll.receive(budget, &mut handler))     the poll context: one thread owns queue and pool
//!     -> Handler::run      the XDP program: drop · tx · redirect · pass · aborted
//!     -> Handler::pass     a Packet: a head and up to 17 fragments, each a counted slice of a page
//!     -> drop              on any thread: the page returns to its own pool
//! ```
//!
//! # Receive
//!
//! A virtio-net device in this process, a driver that is connected to it, and a handler: a closure
//! that takes a packet passes every frame.
//!
//! ```
//! # #[cfg(not(feature = "device"))]
//! # fn main() {}
//! # #[cfg(feature = "device")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use netmem::device::{NetDevice, Options, port::Gen};
//! use netmem::{RxMode, NetOptions, Packet, Poll, RxQueue, TrustedPeer};
//!
//! // A device that generates frames of 60 bytes, a thousand of them.
//! let mut device = NetDevice::new(Options::default(), |_| Gen::new(60, Some(1000)))?;
//! let mut driver = device.control().connect(NetOptions::new(RxMode::Small))?;
//!
//! let (mut frames, mut bytes) = (0, 0);
//! while frames < 1000 {
//!     device.poll(); // as a rule on a thread of its own
//!     driver.pairs[0].rx.poll(|poll| {
//!         poll.receive(256, &mut |packet: Packet<TrustedPeer>| {
//!             (frames, bytes) = (frames + 1, bytes + packet.len());
//!         })
//!     });
//! }
//! assert_eq!(bytes, 60 * 1000);
//!
//! // The queue stops, posted pages are returned, and none is in flight.
//! let closed = driver.pairs.remove(0).rx.close().expect("it was running");
//! assert_eq!(closed.outstanding, 0);
//! # Ok(())
//! # }
//! ```
//!
//! `VirtioNet::probe` takes a foreign back end instead (DPDK's, say), by `VhostUser::connect`. Its
//! packets are `Packet<PeerShared>`.
//!
//! # Where things are
//!
//! | module | feature | what |
//! | --- | --- | --- |
//! | [`pool`] | | regions of memory, page pools, pages and fragments, DMA domains, providers |
//! | [`packet`] | | packets, XDP frames and verdicts, the traits of receive and transmit queues |
//! | [`refs`] | | reference counts that scale, and smart pointers over them |
//! | [`percpu`] | | per-CPU counters and magazines: restartable sequences behind a gate |
//! | `virtio` | `virtio` (default) | the virtio-net driver, vhost-user |
//! | `device` | `device` | the virtio-net device; with the feature `pcap` its port that plays captures, with `cuda` in the memory of a GPU |
//! | `xsk` | `xsk` | AF_XDP: queues of a network interface, the XDP program, a helper with privileges |
//! | `inet` | `inet` | IP, UDP and TCP on these queues, whose payload is fragments; the features `tokio` and `futures` add their traits |
//! | `host` | `inet`, and `device` or `xsk` | a host on a tap or on an interface, with a stack for each queue, in a few lines |
//! | `devmem` | `devmem` | device memory that this process does not map: bindings, sockets, tokens, senders |
//!
//! The types that most programs name are here at the top, too.
//!
//! # Send from any thread
//!
//! A [`PagePool`] belongs to the thread that polls its queue. A [`SharedPool`] is for every thread:
//! a sender, a server, io_uring. Its pages and fragments are the same, and they return in the same
//! way. `examples/io_uring_echo.rs` registers such a pool's region with io_uring, as a fixed buffer
//! and as a provided-buffer ring.
//!
//! ```
//! use netmem::{Private, SharedPool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = SharedPool::<Private>::in_memory(256)?;
//! std::thread::scope(|scope| {
//!     for _ in 0..4 {
//!         scope.spawn(|| {
//!             let mut page = pool.alloc().expect("a page"); // usually a plain store on this CPU's magazine
//!             page.as_mut_slice()[..5].copy_from_slice(b"hello");
//!             let message = page.freeze_range(0..5); // shared, and dropped on any thread
//!             drop(message);
//!         });
//!     }
//! });
//! assert_eq!(pool.close().outstanding, 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Share
//!
//! What lives long and is used from many cores is counted per CPU: a get and a put are plain adds,
//! until the owner goes.
//!
//! ```
//! use netmem::refs::{Owner, PercpuRef, Ref};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let binding: Owner<_, PercpuRef> = Owner::try_with_release("64 pages", |pages| println!("{pages} are free"))?;
//! let r = Owner::get(&binding); // on any thread
//! drop(binding); // kills it: r drains
//! assert!(Ref::try_get_live(&r).is_err());
//! drop(r); // the last reference: the release
//! # Ok(())
//! # }
//! ```
//!
//! # Rules worth knowing
//!
//! * Allocation from a queue's pool, and the return to its cache, are in [`RxQueue::poll`] and on
//!   its thread. Elsewhere a drop is a plain store on this CPU's magazine, and two atomic
//!   operations for each full magazine.
//! * Memory shared with another process ([`PeerShared`]) is copied out ([`XdpFrame::read_at`],
//!   [`Packet::copy_to`]) before it is read; there are no slices of it, unless the user declares
//!   the peer trusted ([`TrustedPeer`]).
//! * Only [`std::mem::forget`] keeps a page from its pool. [`PoolStats::inflight`] then counts the
//!   page.

#[cfg(all(feature = "inet", any(feature = "device", feature = "xsk")))]
pub mod host;
#[cfg(all(feature = "device", feature = "xsk"))]
mod xsk_port;

/// Packets, XDP frames and verdicts, and the traits of a network device: the package
/// `netmem-packet`.
pub mod packet {
    #[doc(inline)]
    pub use netmem_packet::*;
}

/// Per-CPU counters and caches: the package `netmem-percpu`.
pub mod percpu {
    #[doc(inline)]
    pub use netmem_percpu::*;
}

/// Page pools, regions of memory, pages and fragments: the package `netmem-pool`.
pub mod pool {
    #[doc(inline)]
    pub use netmem_pool::*;
}

/// Reference counts that scale, and smart pointers over them: the package `netmem-refs`.
pub mod refs {
    #[doc(inline)]
    pub use netmem_refs::*;
}

/// Device memory for sockets: the package `netmem-devmem`. Needs the feature `devmem`.
#[cfg(feature = "devmem")]
pub mod devmem {
    #[doc(inline)]
    pub use netmem_devmem::*;
}

/// IP, UDP and TCP: the package `netmem-inet`. Needs the feature `inet`; `tokio` and `futures` add
/// the traits of those crates.
#[cfg(feature = "inet")]
pub mod inet {
    #[doc(inline)]
    pub use netmem_inet::*;
}

/// The virtio-net driver and vhost-user: the package `netmem-virtio`. Needs the feature `virtio`.
/// The device needs the feature `device`, and its port that plays captures needs `pcap`.
#[cfg(feature = "virtio")]
pub mod virtio {
    #[doc(inline)]
    pub use netmem_virtio::*;
}

/// AF_XDP sockets: the package `netmem-xsk`. Needs the feature `xsk`.
#[cfg(feature = "xsk")]
pub mod xsk {
    #[doc(inline)]
    pub use netmem_xsk::*;
}

#[doc(inline)]
pub use packet::{Gro, Handler, Packet, Poll, RxQueue, SoftwareTx, TxBulk, TxQueue, Verdict, XdpFrame};
#[doc(inline)]
pub use pool::{
    Frag, KernelShared, Memory, Napi, Page, PagePool, PeerShared, PoolOptions, PoolStats, Private, Provider, Region,
    RegionOptions, RegionProvider, SharedPool, TrustedPeer,
};

/// Needs the feature `virtio`.
#[cfg(feature = "virtio")]
#[doc(inline)]
pub use virtio::VhostUser;
/// Needs the feature `device`.
#[cfg(feature = "device")]
#[doc(inline)]
pub use virtio::device;
/// Needs the feature `virtio`.
#[cfg(feature = "virtio")]
#[doc(inline)]
pub use virtio::driver::{NetOptions, Offload, QueuePair, RxMode, VirtioNet, VirtioRx, VirtioTx};
#[cfg(all(feature = "device", feature = "xsk"))]
pub use xsk_port::XskPort;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
