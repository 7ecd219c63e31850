//! Network memory for user space: page pools, packets and virtio-net, in one crate.
//!
//! A program that moves packets needs memory that a device writes to, that is passed through the
//! program in pieces, and that is free again in time for the next packet. Netmem manages that
//! memory. Each receive queue has a [`PagePool`](pool::PagePool), whose pages are mapped once.
//! Dropping a packet, on any thread, returns its pages.
//!
//! ```text
//!   device writes into a posted page
//!     -> queue.poll(|poll| poll.receive(budget, &mut handler))    one thread owns queue and pool
//!     -> Handler::run      the XDP program: drop · tx · redirect · pass · aborted
//!     -> Handler::pass     a Packet: a head and up to 17 fragments, counted slices of pages
//!     -> drop              on any thread: the page returns to its own pool
//! ```
//!
//! # Receive
//!
//! A virtio-net device in this process, a driver that is connected to it, and a handler: a closure
//! with a packet as its argument passes every frame.
//!
//! ```
//! # #[cfg(not(feature = "device"))]
//! # fn main() {}
//! # #[cfg(feature = "device")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use netmem::device::{NetDevice, Options, port::Gen};
//! use netmem::net::{Packet, Poll, RxQueue};
//! use netmem::pool::TrustedPeer;
//! use netmem::virtio::{NetOptions, RxMode};
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
//! `VirtioNet::probe` uses a foreign back end instead (DPDK's, for example), by
//! `VhostUser::connect`. Its packets are `Packet<PeerShared>`.
//!
//! # Where things are
//!
//! | module | feature | what |
//! | --- | --- | --- |
//! | [`pool`] | | regions of memory, page pools, pages and fragments, DMA domains, providers |
//! | [`refs`] | | reference counts that scale, and smart pointers over them |
//! | [`net`] | | packets, XDP frames and verdicts, the traits of receive and transmit queues; with the feature `pcap` queues over capture files |
//! | `virtio` | `virtio` (default) | the virtio-net driver, by vhost-user |
//! | `device` | `device` | the virtio-net device; with the feature `pcap` its port that plays captures, with `cuda` in the memory of a GPU |
//! | `xdp` | `xsk` | AF_XDP: queues of a network interface, the XDP program, a helper with privileges |
//! | `tcp` | `inet` | TCP and UDP on these queues, whose payload is fragments; the features `tokio` and `futures` add their traits |
//! | `host` | `inet`, and `device` or `xsk` | a host on a tap or on an interface, with a stack for each queue, in a few lines |
//! | `device_memory` | `devmem` | device memory that this process does not map: bindings, sockets, tokens, senders |
//!
//! A module has the names that programs of its task use. The packages behind them have more:
//! `netmem-percpu` (counters and magazines of each CPU), `netmem-virtio` (virtqueues),
//! `netmem-inet` (a connection as a value, headers on the wire), `netmem-packet` (offloads of
//! slices), `netmem-netem` (a link with faults). Types of these packages and of this one are the
//! same types.
//!
//! # Send from any thread
//!
//! A [`PagePool`](pool::PagePool) belongs to the thread that polls its queue. A
//! [`SharedPool`](pool::SharedPool) is for every thread: a sender, a server, io_uring. Its pages
//! and fragments are the same, and they return in the same way. `examples/io_uring_echo.rs`
//! registers such a pool's region with io_uring, as a fixed buffer and as a provided-buffer ring.
//!
//! ```
//! use netmem::pool::{Private, SharedPool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = SharedPool::<Private>::in_memory(256)?;
//! std::thread::scope(|scope| {
//!     for _ in 0..4 {
//!         scope.spawn(|| {
//!             // Usually a plain store on this CPU's magazine.
//!             let mut page = pool.alloc().expect("a page");
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
//! let release = |pages| println!("{pages} are free");
//! let binding: Owner<_, PercpuRef> = Owner::try_with_release("64 pages", release)?;
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
//! * Allocation from a queue's pool, and the return to its cache, are in
//!   [`RxQueue::poll`](net::RxQueue::poll) and on its thread. Elsewhere a drop is a plain store on
//!   this CPU's magazine, and two atomic operations for each full magazine.
//! * Memory shared with another process ([`PeerShared`](pool::PeerShared)) is copied out
//!   ([`XdpFrame::read_at`](net::XdpFrame::read_at), [`Packet::copy_to`](net::Packet::copy_to))
//!   before it is read; there are no slices of it, unless the user declares the peer trusted
//!   ([`TrustedPeer`](pool::TrustedPeer)).
//! * Only [`std::mem::forget`] keeps a page from its pool.
//!   [`PoolStats::inflight`](pool::PoolStats::inflight) then counts the page.

#[cfg(feature = "device")]
pub mod device;
#[cfg(feature = "devmem")]
pub mod device_memory;
#[cfg(all(feature = "inet", any(feature = "device", feature = "xsk")))]
pub mod host;
pub mod net;
pub mod pool;
pub mod refs;
#[cfg(feature = "inet")]
pub mod tcp;
#[cfg(feature = "virtio")]
pub mod virtio;
#[cfg(feature = "xsk")]
pub mod xdp;
#[cfg(all(feature = "device", feature = "xsk"))]
mod xsk_port;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
