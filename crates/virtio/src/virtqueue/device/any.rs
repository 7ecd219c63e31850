//! A running queue of either format. A pass chooses the format once.
//!
//! A device learns the format from the features of its front end, at run time. The passes are
//! compiled for each format.

use std::sync::Arc;

use super::super::{Armed, SplitRing};
use super::format::Start;
use super::packed::{MappedRing, PackedDevice};
use super::queue::DeviceQueue;
use super::split::SplitDevice;
use crate::guest_memory::dirty_log::DirtyLog;
use crate::virtqueue::fault::DriverFault;

/// A ring of either format in memory.
#[derive(Debug)]
pub(crate) enum AnyRing {
    /// A split ring.
    Split(SplitRing),
    /// A packed ring.
    Packed(MappedRing),
}

/// A running queue of either format. A pass chooses once.
#[derive(Debug)]
pub(crate) enum AnyDeviceQueue {
    /// Of a split ring.
    Split(DeviceQueue<SplitDevice>),
    /// Of a packed ring.
    Packed(DeviceQueue<PackedDevice>),
}

/// Does the same with the queue of either format.
macro_rules! each {
    ($queue:expr, $q:ident => $do:expr) => {
        match $queue {
            $crate::virtqueue::device::AnyDeviceQueue::Split($q) => $do,
            $crate::virtqueue::device::AnyDeviceQueue::Packed($q) => $do,
        }
    };
}
pub(crate) use each;

impl AnyDeviceQueue {
    /// A queue on `ring`.
    pub(crate) fn new(ring: AnyRing, start: Start) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DeviceQueue::new(ring, start)),
            AnyRing::Packed(ring) => Self::Packed(DeviceQueue::new(ring, start)),
        }
    }

    /// The same queue at other addresses. `None` if `ring` is of another format.
    pub(crate) fn moved(self, ring: AnyRing) -> Option<Self> {
        match (self, ring) {
            (Self::Split(q), AnyRing::Split(ring)) => Some(Self::Split(q.moved(ring))),
            (Self::Packed(q), AnyRing::Packed(ring)) => Some(Self::Packed(q.moved(ring))),
            _ => None,
        }
    }

    /// See [`DeviceQueue::set_log`].
    pub(crate) fn set_log(&mut self, log: Option<Arc<DirtyLog>>, used: Option<u64>) {
        each!(self, q => q.set_log(log, used));
    }

    /// See [`DeviceQueue::base`].
    pub(crate) fn base(&self) -> u32 {
        each!(self, q => q.base())
    }

    /// See [`DeviceQueue::refresh`].
    #[inline]
    pub(crate) fn refresh(&mut self) -> Result<bool, DriverFault> {
        each!(self, q => q.refresh())
    }

    /// See [`DeviceQueue::out_of_buffers`].
    #[inline]
    pub(crate) fn out_of_buffers(&mut self) -> bool {
        each!(self, q => q.out_of_buffers())
    }

    /// See [`DeviceQueue::should_notify`].
    #[inline]
    pub(crate) fn should_notify(&mut self) -> bool {
        each!(self, q => q.should_notify())
    }

    /// See [`DeviceQueue::arm`].
    pub(crate) fn arm(&mut self) -> Armed {
        each!(self, q => q.arm())
    }

    /// See [`DeviceQueue::disarm`].
    pub(crate) fn disarm(&mut self) {
        each!(self, q => q.disarm());
    }
}
