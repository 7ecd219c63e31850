//! Metadata of frames.
//!
//! The metadata of a received frame is what the user's own XDP program has written in front of the
//! frame: see [`rx_metadata`].
//!
//! The metadata of a sent frame contains the requests to the device, and later the time of
//! transmission:
//!
//! ```text
//!   bytes in front of the frame, at address - 24        struct xsk_tx_metadata
//!     0   flags                                         what is asked for
//!     8   checksum: start u16, offset u16               at completion: time of transmission, u64
//!    16   launch time, u64
//! ```

use crate::if_xdp::{TX_METADATA_LEN, TXMD_CHECKSUM, TXMD_LAUNCH_TIME, TXMD_TIMESTAMP};
use crate::netlink::XdpFeatures;
use crate::umem_memory::UmemMemory;
use netmem_packet::{Checksum, Meta, XdpFrame};
use netmem_pool::{Region, foreign};
use std::collections::{HashMap, VecDeque};

/// The `N` bytes in front of a received frame, before a handler has moved its beginning. They are
/// the metadata of the user's own XDP program, which has reserved room for it
/// (`bpf_xdp_adjust_meta`) and written it. `None` if there are fewer bytes in front of the frame.
///
/// The kernel copies the metadata with the frame, and the driver leaves it there in zero-copy mode.
/// The kernel reports neither its length nor whether there is any. Without metadata, these bytes
/// have old contents. `N` and the meaning are an agreement with the program, which is attached by
/// [`Program::attach_pinned`](crate::Program::attach_pinned). The kernel allows multiples of 4
/// bytes, and at most 32 before Linux 6.3. Touches no count and copies `N` bytes.
///
/// ```
/// use netmem_packet::{Verdict, XdpFrame};
/// use netmem_xsk::{UmemMemory, rx_metadata};
///
/// /// The program writes the time of reception, and 0 if the driver has none.
/// fn received_at<M: UmemMemory>(frame: &mut XdpFrame<M>) -> Option<u64> {
///     rx_metadata(frame).map(u64::from_ne_bytes).filter(|time| *time != 0)
/// }
/// ```
pub fn rx_metadata<M: UmemMemory, const N: usize>(frame: &mut XdpFrame<M>) -> Option<[u8; N]> {
    let by = i32::try_from(N).ok()?;
    frame.adjust_head(-by).ok()?;
    let bytes = frame.read_at(0).ok();
    // This cannot fail: the frame had these bytes before.
    let _ = frame.adjust_head(by);
    bytes
}

/// The reason why a queue has no launch times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoLaunchTimes {
    /// The UMEM was made without metadata of sent frames.
    #[error("launch times need a UMEM with metadata of sent frames (UmemOptions::tx_metadata)")]
    NoMetadata,
    /// The kernel does not support the request. It would send neither the frame nor any later
    /// frame.
    #[error("launch times need Linux 6.15, and this is Linux {}.{}", .0.0, .0.1)]
    Kernel((u32, u32)),
    /// The driver does not support launch times. It would send the frame at once.
    #[error("the driver has no launch times (tx-launch-time-fifo): `netmem info` lists the features of each interface")]
    Driver,
}

/// Whether launch times are supported by a kernel of this version and a driver with these features.
pub(crate) fn launch_times(
    metadata: bool,
    kernel: (u32, u32),
    features: impl FnOnce() -> Option<XdpFeatures>,
) -> Result<(), NoLaunchTimes> {
    match metadata {
        false => Err(NoLaunchTimes::NoMetadata),
        true if kernel < (6, 15) => Err(NoLaunchTimes::Kernel(kernel)),
        true if features().is_some_and(|features| features.launch_time()) => Ok(()),
        true => Err(NoLaunchTimes::Driver),
    }
}

/// The requests to the device for one frame, besides the checksum, which the packet's `meta`
/// requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxRequest {
    /// The earliest time at which the device sends the frame. It is in nanoseconds of the device's
    /// clock or of `CLOCK_TAI`, which depends on the driver. It needs Linux 6.15 and support by the
    /// driver: see [`XskTx::launch_times`](crate::XskTx::launch_times).
    pub launch_time: Option<u64>,
    /// Requests the time at which the frame was sent. The number is chosen by the program, and is
    /// returned in [`TxTimestamp::id`].
    pub timestamp: Option<u64>,
}

/// The time at which a frame was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxTimestamp {
    /// The number in the frame's [`TxRequest`].
    pub id: u64,
    /// Nanoseconds of the device's clock, or `None` if the driver stored no time, because it may
    /// lack the feature.
    pub time: Option<u64>,
}

impl TxRequest {
    /// The request as bytes in front of the frame. `None` for a packet that is to be cut into
    /// segments.
    pub(crate) fn encode(&self, meta: Meta) -> Option<[u8; TX_METADATA_LEN]> {
        if meta.gso.is_some() {
            return None;
        }
        let mut bytes = [0; TX_METADATA_LEN];
        let mut flags = 0;
        if let Checksum::Partial { start, offset } = meta.checksum {
            flags |= TXMD_CHECKSUM;
            bytes[8..10].copy_from_slice(&start.to_ne_bytes());
            bytes[10..12].copy_from_slice(&offset.to_ne_bytes());
        }
        if let Some(time) = self.launch_time {
            flags |= TXMD_LAUNCH_TIME;
            bytes[16..24].copy_from_slice(&time.to_ne_bytes());
        }
        if self.timestamp.is_some() {
            flags |= TXMD_TIMESTAMP;
        }
        bytes[..8].copy_from_slice(&flags.to_ne_bytes());
        Some(bytes)
    }
}

/// Frames whose time of transmission was requested: by address while the kernel has them, then in
/// the order of completion.
#[derive(Debug, Default)]
pub(crate) struct Timestamps {
    expected: HashMap<u64, (u64, u64)>,
    known: VecDeque<TxTimestamp>,
}

/// The largest number of times that wait for the program. If there are more, the oldest is dropped.
const MAX_TIMESTAMPS: usize = 65_536;

impl Timestamps {
    /// Notes that the frame at `addr` was queued with this metadata.
    pub(crate) fn expect(&mut self, addr: u64, id: u64, metadata: &[u8; TX_METADATA_LEN]) {
        let mut word = [0; 8];
        word.copy_from_slice(&metadata[8..16]);
        self.expected.insert(addr, (id, u64::from_ne_bytes(word)));
    }

    /// Notes that the frame at `addr` has completed. Its page is still out.
    #[inline(always)]
    pub(crate) fn completed<M: UmemMemory>(&mut self, addr: u64, region: &Region<M>) {
        if !self.expected.is_empty() {
            self.store(addr, region);
        }
    }

    #[cold]
    fn store<M: UmemMemory>(&mut self, addr: u64, region: &Region<M>) {
        let Some((id, before)) = self.expected.remove(&addr) else { return };
        let mut word = [0; 8];
        let at = region.as_ptr().wrapping_add(addr as usize - TX_METADATA_LEN + 8);
        // SAFETY: a frame was sent from there with metadata in front of it, within one chunk of the
        // region.
        unsafe { foreign::copy_out(at, &mut word) };
        let time = u64::from_ne_bytes(word);
        if self.known.len() == MAX_TIMESTAMPS {
            self.known.pop_front();
        }
        self.known.push_back(TxTimestamp { id, time: (time != before).then_some(time) });
    }

    pub(crate) fn pop(&mut self) -> Option<TxTimestamp> {
        self.known.pop_front()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use netmem_packet::{Gso, GsoKind};

    /// `struct xsk_tx_metadata`, byte for byte.
    #[test]
    fn a_request_is_laid_out_as_the_kernel_has_it() {
        let partial = Meta { checksum: Checksum::Partial { start: 0x0102, offset: 0x0304 }, gso: None };
        let words = |bytes: [u8; 24]| [0, 8, 16].map(|at| u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap()));
        let halves = |a: u16, b: u16| {
            let [[a, b], [c, d]] = [a, b].map(u16::to_ne_bytes);
            u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
        };
        let encode = |launch_time, timestamp, meta| TxRequest { launch_time, timestamp }.encode(meta).map(words);
        assert_eq!(encode(None, None, Meta::default()), Some([0, 0, 0]));
        assert_eq!(encode(None, Some(7), Meta::default()), Some([1, 0, 0]));
        assert_eq!(encode(None, None, partial), Some([2, halves(0x0102, 0x0304), 0]));
        assert_eq!(encode(Some(9 << 40), None, Meta::default()), Some([4, 0, 9 << 40]));
        assert_eq!(encode(Some(1), Some(0), partial), Some([7, halves(0x0102, 0x0304), 1]));
        let gso = Some(Gso { kind: GsoKind::TcpV4, size: 1000, headers: 54, ecn: false });
        assert_eq!(encode(None, None, Meta { gso, ..partial }), None);
    }

    /// The error names what is missing for launch times: first the UMEM, then the kernel, which
    /// would stop sending, then the driver.
    #[test]
    fn launch_times_are_the_kernels_and_the_drivers() {
        let none = || Some(XdpFeatures::default());
        assert_eq!(launch_times(false, (7, 0), none), Err(NoLaunchTimes::NoMetadata));
        assert_eq!(launch_times(true, (6, 14), || panic!("is not asked")), Err(NoLaunchTimes::Kernel((6, 14))));
        assert_eq!(launch_times(true, (6, 15), none), Err(NoLaunchTimes::Driver));
        assert_eq!(launch_times(true, (6, 15), || None), Err(NoLaunchTimes::Driver));
        let all = || Some(XdpFeatures::with_launch_time());
        assert_eq!(launch_times(true, (6, 15), all), Ok(()));
        assert_eq!(launch_times(true, (7, 0), all), Ok(()));
        assert!(NoLaunchTimes::Kernel((6, 14)).to_string().ends_with("this is Linux 6.14"));
    }
}
