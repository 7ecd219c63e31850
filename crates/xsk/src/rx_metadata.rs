//! What the driver knows about a received frame, as our own program has written it in front of the
//! frame.
//!
//! ```text
//!   bytes in front of the frame, at its beginning - 32        all in the host's byte order but `tpid`
//!     0   time u64           nanoseconds
//!     8   hash u32
//!    12   kind u32           of the hash
//!    16   tpid u16           big endian: 0x8100 or 0x88a8
//!    18   tci u16            of the VLAN tag
//!    20   present u32        which of them the driver has answered
//!    24   mark u32           these are such bytes, of this version
//!    28   number u32         of the program
//! ```

use crate::metadata::rx_metadata;
use crate::umem_memory::UmemMemory;
use netmem_packet::XdpFrame;
use std::num::NonZeroU64;

/// The length of the record, in bytes. Any kernel has room for it: 32 is the most before Linux 6.3.
pub(crate) const LEN: usize = 32;

/// The offsets of the record's fields.
pub(crate) mod at {
    pub(crate) const TIME: usize = 0;
    pub(crate) const HASH: usize = 8;
    pub(crate) const KIND: usize = 12;
    pub(crate) const TPID: usize = 16;
    pub(crate) const TCI: usize = 18;
    pub(crate) const PRESENT: usize = 20;
    pub(crate) const MARK: usize = 24;
}

/// The bits of the fields that are present.
pub(crate) mod present {
    pub(crate) const TIME: u32 = 1;
    pub(crate) const HASH: u32 = 2;
    pub(crate) const VLAN: u32 = 4;
}

/// The first word of the mark. Another layout gets another one.
const MARK: u32 = u32::from_ne_bytes(*b"nmx1");

/// What the driver knows about a received frame. What it does not know is absent.
///
/// The kernel has no metadata function for the state of the checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RxMetadata {
    /// The time at which the device received the frame, in nanoseconds. The device's clock counts
    /// them, from a beginning of its own: `ptp4l` and `phc2sys` set it. Some drivers answer 0 for a
    /// frame without a time, which is therefore absent. Many stamp no frame until the interface is
    /// told to (`SIOCSHWTSTAMP`; `hwstamp_ctl -i IFACE -r 1`).
    pub time: Option<NonZeroU64>,
    /// The hash of the flow, by which the device has chosen the queue.
    pub hash: Option<RxHash>,
    /// The VLAN tag that the driver has removed from the frame. A tag that is in the frame is not
    /// here.
    pub vlan: Option<VlanTag>,
}

/// The hash of a flow (RSS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxHash {
    /// The hash. 0 is a hash like any other.
    pub value: u32,
    /// What it is computed from: the bits of the kernel's `enum xdp_rss_hash_type`. Bit 0 is IPv4, 1
    /// IPv6, 2 IPv6 with extension headers, 3 any transport protocol, and with it 4 TCP, 5 UDP, 6
    /// SCTP, 7 IPsec, 8 ICMP. 0: the driver does not know.
    pub kind: u32,
}

impl RxHash {
    /// Whether the hash covers the ports of the transport protocol: two flows between the same hosts
    /// then have different hashes.
    #[must_use]
    pub fn covers_ports(&self) -> bool {
        self.kind >> 3 & 1 != 0
    }
}

/// A VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VlanTag {
    /// The tag's EtherType: 0x8100 (802.1Q) or 0x88a8 (802.1ad).
    pub tpid: u16,
    /// Priority (3 bits), drop eligible indicator (1 bit), and the number of the VLAN (12 bits).
    pub tci: u16,
}

impl VlanTag {
    /// The number of the VLAN.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.tci & 0xfff
    }
}

/// Reads what one program has written in front of frames:
/// [`Program::rx_metadata`](crate::Program::rx_metadata). Copy it into the handler of each queue.
///
/// ```no_run
/// use netmem_packet::{Handler, Packet, Poll, RxQueue, Verdict, XdpFrame};
/// use netmem_xsk::{
///     KernelMetadata, ProgramOptions, QueueOptions, RxMetadataReader, UmemMemory, Xsk, XskOptions,
/// };
///
/// struct Print(Option<RxMetadataReader>);
///
/// impl<M: UmemMemory> Handler<M> for Print {
///     fn run(&mut self, frame: &mut XdpFrame<M>) -> Verdict {
///         if let Some(metadata) = self.0.and_then(|reader| reader.read(frame)) {
///             println!("time {:?}, hash {:?}", metadata.time, metadata.hash);
///         }
///         Verdict::Drop
///     }
///     fn pass(&mut self, _: Packet<M>) {}
/// }
///
/// let program = ProgramOptions { metadata: KernelMetadata::IfSupported, ..ProgramOptions::default() };
/// let mut xsk: Xsk = Xsk::open(XskOptions::new("eth1").program(program), |_| QueueOptions::new())?;
/// let mut print = Print(xsk.program.as_ref().and_then(|program| program.rx_metadata()));
/// loop {
///     for (rx, _) in &mut xsk.pairs {
///         rx.poll(|poll| poll.receive(64, &mut print));
///     }
/// }
/// # #[allow(unreachable_code)]
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxMetadataReader {
    /// The number of the program, which is random.
    number: u32,
}

impl RxMetadataReader {
    pub(crate) fn of_program(number: u32) -> Self {
        Self { number }
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// The two words at the end of the record.
    pub(crate) fn mark(&self) -> [u32; 2] {
        [MARK, self.number]
    }

    /// The metadata of a received frame, before a handler has moved its beginning. `None` if this
    /// program has written none: the frame was redirected by another program, or came before this
    /// one was attached. Copies 32 bytes; makes no system call and touches no count.
    #[inline]
    #[must_use]
    pub fn read<M: UmemMemory>(&self, frame: &mut XdpFrame<M>) -> Option<RxMetadata> {
        self.decode(&rx_metadata(frame)?)
    }

    pub(crate) fn decode(&self, record: &[u8; LEN]) -> Option<RxMetadata> {
        let word = |at: usize| record[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        if [word(at::MARK), word(at::MARK + 4)] != self.mark() {
            return None;
        }
        let has = |bit: u32| word(at::PRESENT) & bit != 0;
        let time = record[at::TIME..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let hash = RxHash { value: word(at::HASH), kind: word(at::KIND) };
        let tpid = u16::from_be_bytes([record[at::TPID], record[at::TPID + 1]]);
        let tci = u16::from_ne_bytes([record[at::TCI], record[at::TCI + 1]]);
        Some(RxMetadata {
            time: NonZeroU64::new(time).filter(|_| has(present::TIME)),
            hash: has(present::HASH).then_some(hash),
            vlan: has(present::VLAN).then_some(VlanTag { tpid, tci }),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record(reader: RxMetadataReader, present: u32) -> [u8; LEN] {
        let mut record = [0; LEN];
        record[..8].copy_from_slice(&(7_u64 << 40).to_ne_bytes());
        record[8..12].copy_from_slice(&0_u32.to_ne_bytes());
        record[12..16].copy_from_slice(&0x28_u32.to_ne_bytes());
        record[16..18].copy_from_slice(&[0x88, 0xa8]);
        record[18..20].copy_from_slice(&0x6123_u16.to_ne_bytes());
        record[20..24].copy_from_slice(&present.to_ne_bytes());
        let [first, second] = reader.mark();
        record[24..28].copy_from_slice(&first.to_ne_bytes());
        record[28..].copy_from_slice(&second.to_ne_bytes());
        record
    }

    /// Each field is present or absent by itself. A hash of 0 is one, and a time of 0 is none.
    #[test]
    fn a_field_that_is_not_there_is_absent() {
        let reader = RxMetadataReader::of_program(0x1234_5678);
        for bits in 0..8 {
            let metadata = reader.decode(&record(reader, bits)).unwrap();
            assert_eq!(metadata.time.map(u64::from), (bits & 1 != 0).then_some(7 << 40));
            let hash = metadata.hash.map(|hash| (hash.value, hash.kind, hash.covers_ports()));
            assert_eq!(hash, (bits & 2 != 0).then_some((0, 0x28, true)));
            let vlan = metadata.vlan.map(|tag| (tag.tpid, tag.tci, tag.id()));
            assert_eq!(vlan, (bits & 4 != 0).then_some((0x88a8, 0x6123, 0x123)));
        }
        let mut timeless = record(reader, 7);
        timeless[..8].fill(0);
        assert_eq!(reader.decode(&timeless).unwrap().time, None);
    }

    /// The record of another program, and anything else, is no record: each bit of the mark counts.
    #[test]
    fn bytes_of_other_programs_are_no_metadata() {
        let reader = RxMetadataReader::of_program(77);
        let ours = record(reader, 7);
        assert!(reader.decode(&ours).is_some());
        assert_eq!(RxMetadataReader::of_program(78).decode(&ours), None);
        for bit in 0..64 {
            let mut other = ours;
            other[24 + bit / 8] ^= 1 << (bit % 8);
            assert_eq!(reader.decode(&other), None, "bit {bit}");
        }
        assert_eq!(reader.decode(&[0; LEN]), None);
        assert_eq!(RxMetadataReader::of_program(0).decode(&[0; LEN]), None);
    }
}
