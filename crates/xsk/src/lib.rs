//! AF_XDP on page pools: frames of a network interface, received into pages and sent from them.
//!
//! ```text
//!              Umem: a region of pages, registered with the kernel
//!              ┌────────────────────────────────────────────┐
//!   PagePool ──┤► fill ring ─► kernel ─► RX ring ─► XskRx ──┼─► Packet ─► dropped ─► PagePool
//!              │  XskTx ─► TX ring ─► kernel ─► completion ─┼─► count is put ─► its pool
//!              └────────────────────────────────────────────┘
//! ```
//!
//! * [`Umem`] is the memory: a region of a page pool, cut into chunks. It is a DMA domain, whose
//!   addresses are offsets.
//! * [`Umem::open`] opens one queue of an interface: a socket, whose two halves are [`XskRx`] and
//!   [`XskTx`]. They are a receive queue and a transmit queue like any other of `netmem-packet`.
//! * Every chunk that the kernel has is accounted for: it is returned through a ring, or is
//!   quarantined when the socket is closed. See `rx.rs`, `tx.rs` and `accounts.rs`.
//! * [`Program`] is the XDP program that redirects frames of an interface to sockets: all frames,
//!   or those of a [`Filter`].
//! * [`ClosedQueue`] is a queue without a socket, to be opened again on its pool.
//! * [`Xsk`] opens an interface with all these parts. A process without privileges opens it with a
//!   [`Grant`], which a [`helper`] has sent.
//! * [`privileges`] lists the privileges that each step needs, and reads those that a thread has.
//!
//! ```no_run
//! use netmem_packet::{Packet, Poll, RxQueue};
//! use netmem_pool::{KernelShared, RegionOptions, RegionProvider};
//! use netmem_xsk::{Program, ProgramOptions, QueueOptions, Umem, UmemOptions};
//! use std::os::fd::AsFd;
//!
//! # let ifindex = 1;
//! let memory = RegionProvider::new(RegionOptions::new(8192).build::<KernelShared>()?);
//! let umem = Umem::new(memory.region().clone(), &UmemOptions::new())?;
//! let (mut rx, tx) = umem.open(ifindex, 0, memory, QueueOptions::new())?;
//! let program = Program::attach(ifindex, &ProgramOptions::default())?;
//! program.insert(0, rx.socket().as_fd())?;
//! loop {
//!     let mut print = |packet: Packet<KernelShared>| println!("{} bytes", packet.len());
//!     rx.poll(|poll| poll.receive(64, &mut print));
//! }
//! # #[allow(unreachable_code)]
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod accounts;
#[cfg(all(test, not(loom)))]
mod batches;
mod binding;
mod device_info;
mod drops;
mod error;
mod ethtool;
#[cfg(all(test, not(loom)))]
mod fake;
mod fault;
mod held;
mod held_frame;
pub mod helper;
#[cfg(all(test, not(loom)))]
mod hostile;
mod if_xdp;
mod info;
mod interface_state;
mod layout;
mod left;
mod map_user;
mod metadata;
#[cfg(all(test, loom))]
mod model;
mod netlink;
mod open;
mod options;
pub mod privileges;
mod program;
mod promiscuous;
mod queue_key;
pub mod quirks;
mod receive;
mod reopen;
mod ring;
mod rx;
mod rx_metadata;
mod socket;
mod stats;
mod sync;
mod sys;
#[cfg(test)]
mod testing;
mod tx;
#[cfg(all(test, not(loom)))]
mod tx_groups;
#[cfg(all(test, not(loom)))]
mod tx_room;
mod umem;
mod umem_memory;
mod wait_set;
mod watch;
mod xsk;

pub use binding::CopyReason;
pub use drops::RxDrops;
pub use error::XskError;
pub use fault::{Fault, QueueStopped};
pub use held::reclaim;
pub use held_frame::{FrameHolder, HeldFrame};
pub use helper::Grant;
pub use info::{InterfaceInfo, check};
pub use interface_state::InterfaceState;
pub use metadata::{NoLaunchTimes, TxRequest, TxTimestamp, rx_metadata};
pub use netlink::{AttachMode, Attached, Interface, XdpFeatures};
pub use open::defer_interrupts;
pub use options::{BusyPoll, Mode, QueueOptions, UmemOptions};
pub use program::{
    AttachError, Filter, KernelMetadata, MAX_RULES, NoRxMetadata, Program, ProgramOptions, Rule, TooManyRules,
};
pub use promiscuous::Promiscuous;
pub use reopen::{ClosedQueue, MixedHalves, NotReopened};
pub use rx::{RxClosed, RxPoll, XskRx};
pub use rx_metadata::{RxHash, RxMetadata, RxMetadataReader, VlanTag};
pub use socket::XskSocket;
pub use stats::{KernelStats, RxStats, TxStats};
pub use tx::XskTx;
pub use umem::Umem;
pub use umem_memory::UmemMemory;
pub use xsk::{Xsk, XskOptions};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
