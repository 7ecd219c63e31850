//! Virtqueues: rings in memory that a driver and a device share, and through which buffers go to
//! the device and back.
//!
//! This is the only module that reads or writes descriptors, indices and flags. The specification
//! has two formats (virtio 1.2, sections 2.7 and 2.8):
//!
//! * [split](SplitRing): a table of descriptors, and two rings of indices into it, one for each
//!   direction;
//! * [packed](PackedRing): one ring of descriptors, which both sides write. Wrap counters in the
//!   flags show which side may use a descriptor.
//!
//! | file | what it does |
//! | --- | --- |
//! | `split.rs`, `packed.rs` | the words of a ring as they lie in memory |
//! | `device/` | the device's end of a queue |
//! | `driver/` | the driver's end of a queue, in both formats |
//! | `negotiated.rs` | the features that driver and device have negotiated, as a value |
//! | `event.rs` | when a notification must be sent, and why none is lost |
//! | `fault.rs` | the checks of all words that the peer writes |
//! | `fours.rs` | loops over arrays, four entries at a time |
//! | `sync.rs` | the atomics, so that loom can replace them |
//! | `model.rs`, `model/` | loom's models: `arm` against `publish`; buffers that go around |

#[cfg(feature = "device")]
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod fault;
pub(crate) mod fours;
#[cfg(all(test, loom))]
mod model;
mod negotiated;
mod packed;
mod split;
mod sync;

pub use event::{passed, passed_packed};
pub use negotiated::Negotiated;
pub use netmem_packet::Armed;
pub use packed::{Event, PackedDesc, PackedLayout, PackedRing, Position};
pub use split::{
    AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Desc, SplitLayout, SplitRing, USED_NO_NOTIFY,
};

/// The largest queue that either format allows, in entries.
pub const MAX_SIZE: u16 = 32768;
