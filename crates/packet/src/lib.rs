//! Packets, XDP frames and verdicts, and the traits of a network device.
//!
//! ```text
//!   RxQueue::poll ──► XdpFrame ──► Handler::run ──► Verdict::Drop, Aborted  pages return at once
//!                                                   Verdict::Tx             Handler::tx
//!                                                   Verdict::Redirect       Handler::redirect
//!                                                   Verdict::Pass           Handler::pass
//!           RxGroup ──► Handler::run_batch          the same, of up to 64 frames; by default one by one
//!                     Handler::flush                the end of the poll: bulks are sent
//! ```
//!
//! Frames whose payload is in device memory are [`SplitFrame`]s. A thread can sleep until a queue
//! that implements [`Wait`] has work. [`PollThenSleep`] is a loop that polls for a while and then
//! sleeps. With the feature `pcap`, a capture file is a queue, too: `PcapRx` and `PcapTx`.
//!
//! Drivers implement the traits, and programs use them; neither depends on the other. There are no
//! indirect calls for a frame: the handler is a type parameter. What a device may not offload is in
//! this crate in software: checksums, segmentation ([`SoftwareTx`]), joining ([`Gro`]).

mod bulk;
#[cfg(feature = "pcap")]
mod capture;
mod device;
mod frags;
mod group;
mod meta;
mod offload;
mod packet;
mod queues;
mod slots;
mod split;
mod wait;
mod xdp;

pub use bulk::{BulkStats, TxBulk};
#[cfg(feature = "pcap")]
pub use capture::{
    Capture, CaptureDirection, CaptureError, PcapPoll, PcapRx, PcapRxStats, PcapTx, PcapTxStats, PcapWriter, Play,
};
pub use device::{Handler, Poll, Reach, RxQueue, Sendable, TxQueue};
pub use frags::{FragLists, MAX_FRAGS};
pub use group::{FrameCounts, GroupFrame, RxGroup};
pub use meta::{Checksum, Gso, GsoKind, Meta};
pub use offload::{
    ChecksumError, Gro, GroStats, Headers, Join, Joinable, MAX_SEGMENTS, NotSegmented, SegmentError, SegmentPlan,
    Segments, SoftwareStats, SoftwareTx, Sum, Transport, complete_checksum,
};
pub use packet::{CopyHeadError, Packet, TooManyFrags};
pub use queues::{Queues, Unbind};
pub use slots::{HeaderSlots, SlotCompletions, SlotFrame};
pub use split::{DeviceFrag, DevicePayload, EitherFrame, Extent, SplitFrame, SplitHandler, SplitRxQueue, SplitTxQueue};
pub use wait::{Armed, PollThenSleep, SleepStats, Turn, Wait, arm_all};
pub use xdp::{LineariseError, Verdict, XdpFrame};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
