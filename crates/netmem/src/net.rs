//! Packets, XDP frames and verdicts, and the traits of receive and transmit queues.
//!
//! A program names these types for any device: virtio-net, AF_XDP, or one of its own. Frames whose
//! payload is in device memory are [`SplitFrame`]s. [`Wait`] and [`PollThenSleep`] are for threads
//! that sleep; [`SoftwareTx`] and [`Gro`] do in software what a device does not offload.
//!
//! The package is `netmem-packet`, which also has these offloads for frames that are slices.

#[doc(inline)]
pub use netmem_packet::{
    Armed, BulkStats, Checksum, ChecksumError, CopyHeadError, DeviceFrag, DevicePayload, EitherFrame, Extent, Gro,
    GroStats, Gso, GsoKind, Handler, LineariseError, MAX_FRAGS, Meta, NotSegmented, Packet, Poll, PollThenSleep,
    Queues, Reach, RxQueue, SegmentError, Segments, Sendable, SleepStats, SoftwareStats, SoftwareTx, SplitFrame,
    SplitHandler, SplitRxQueue, SplitTxQueue, Sum, TooManyFrags, Turn, TxBulk, TxQueue, Unbind, Verdict, Wait,
    XdpFrame, arm_all,
};
