//! Packets, XDP frames and verdicts, and the traits of a network device.
//!
//! ```text
//!   RxQueue::poll ──► XdpFrame ──► Handler::run ──► Verdict::Drop, Aborted   the pages go home at once
//!                                                   Verdict::Tx              Packet to Handler::tx
//!                                                   Verdict::Redirect        Packet to Handler::redirect
//!                                                   Verdict::Pass            Packet to Handler::pass
//!                     Handler::flush                the end of the poll: bulks go to their queues
//! ```
//!
//! Frames whose payload is in device memory are [`SplitFrame`]s. A queue that implements [`Wait`] can be slept for, and a
//! [`PollThenSleep`] is the loop that does.
//!
//! A queue is generic over nothing at run time: the handler is a type, called directly for every frame.

mod bulk;
mod checksum;
mod device;
mod frags;
mod gro;
mod headers;
pub mod link;
mod meta;
mod packet;
mod queues;
mod segment;
mod software;
mod split;
mod wait;
mod xdp;

pub use bulk::{BulkStats, TxBulk};
pub use checksum::{ChecksumError, Sum, complete_checksum};
pub use device::{Handler, Poll, Reach, Room, RxQueue, TxQueue};
pub use frags::MAX_FRAGS;
pub use gro::{Gro, GroStats};
pub use meta::{Checksum, Gso, GsoKind, Meta};
pub use packet::{CopyHeadError, Packet, TooManyFrags};
pub use queues::{Queues, Unbind};
pub use segment::{MAX_SEGMENTS, NotSegmented, SegmentError, SegmentPlan, Segments};
pub use software::{SoftwareStats, SoftwareTx};
pub use split::{DeviceFrag, SplitFrame, SplitHandler, SplitTxQueue};
pub use wait::{Armed, PollThenSleep, SleepStats, Turn, Wait};
pub use xdp::{LineariseError, Verdict, XdpFrame};
