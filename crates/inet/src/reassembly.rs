//! Datagrams that were cut into fragments (RFC 791, RFC 8200), put together by reference.
//!
//! Fragments pin pages, and a peer can send some fragments of a datagram and never the rest. So
//! there are bounds for the number of incomplete datagrams, for the fragments of each and of all,
//! and for the time that they are kept. Above a bound, the oldest datagram is dropped.
//!
//! If fragments overlap, the whole datagram is dropped, also its fragments that arrive later (RFC
//! 5722), because two stations could read different bytes from it. If a fragment arrives twice,
//! only the second copy is dropped.
//!
//! The device cannot have verified the checksum of a reassembled datagram. It must be computed.

use crate::tcp::Chunk;
use crate::time::Time;
use crate::wire::{ByteRange, Ip};
use std::net::IpAddr;
use std::time::Duration;

/// Datagrams that are incomplete.
pub const MAX_DATAGRAMS: usize = 32;
/// Fragments of one datagram. One of 65,535 bytes has 46 on Ethernet.
pub const MAX_FRAGMENTS: usize = 64;
/// Fragments of all datagrams.
pub const MAX_FRAGMENTS_IN_ALL: usize = 256;
/// How long a datagram is kept after its first fragment came.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A datagram that is complete.
#[derive(Debug)]
pub struct Reassembled<P> {
    /// Its header. The [content](Ip::content) begins at 0, and is that of `contents`, one after the
    /// other.
    pub ip: Ip,
    /// The contents of its fragments.
    pub contents: Vec<P>,
}

/// The counters of dropped fragments and datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReassemblyStats {
    /// Fragments with a wrong length, or of a datagram that had been dropped.
    pub malformed: u64,
    /// Datagrams with fragments that overlap, or contradict each other.
    pub overlapping: u64,
    /// Datagrams that were dropped because there were too many fragments.
    pub crowded: u64,
    /// Datagrams that were dropped because fragments were missing for too long.
    pub timed_out: u64,
}

#[derive(Debug)]
struct ReceivedFragment<P> {
    offset: usize,
    content: P,
}

#[derive(Debug)]
struct Datagram<P> {
    source: IpAddr,
    destination: IpAddr,
    id: u32,
    /// Of IPv6, the first fragment's is valid; of IPv4, all have the same.
    protocol: u8,
    since: Time,
    /// Sorted, and not overlapping.
    fragments: Vec<ReceivedFragment<P>>,
    /// The length, once the last fragment was there.
    total: Option<usize>,
    /// The header of the first fragment.
    first: Option<Ip>,
    /// Values of ECN's bits that fragments had, a bit for each.
    ecn: u8,
    /// The datagram is dropped, and so are its later fragments.
    poisoned: bool,
}

/// Datagrams that are incomplete. `P` is the content of a fragment.
#[derive(Debug)]
pub struct Reassembly<P> {
    /// The oldest first.
    datagrams: Vec<Datagram<P>>,
    fragments: usize,
    stats: ReassemblyStats,
}

impl<P> Default for Reassembly<P> {
    fn default() -> Self {
        Self { datagrams: Vec::new(), fragments: 0, stats: ReassemblyStats::default() }
    }
}

impl<P: Chunk> Reassembly<P> {
    /// An empty one. Allocates nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The counters of dropped fragments and datagrams.
    #[must_use]
    pub fn stats(&self) -> ReassemblyStats {
        self.stats
    }

    /// A fragment was received: a packet whose [`fragment`](Ip::fragment) is set. `content` are the
    /// bytes of [`Ip::content`]. Returns the datagram if it is complete now.
    ///
    /// Cost: linear in the incomplete datagrams, and in the fragments of one.
    pub fn handle_fragment(&mut self, ip: &Ip, content: P, now: Time) -> Option<Reassembled<P>> {
        self.handle_timeout(now);
        let (offset, len, more) = match ip.fragment {
            Some(fragment) => (usize::from(fragment.offset), content.len(), fragment.more),
            None => (0, content.len(), false),
        };
        let end = offset + len;
        if len == 0 || len != ip.content.len || end > usize::from(u16::MAX) || more && !len.is_multiple_of(8) {
            self.stats.malformed += 1;
            return None;
        }
        let at = self.datagram(ip, now);
        let datagram = &mut self.datagrams[at];
        if datagram.poisoned {
            self.stats.malformed += 1;
            return None;
        }
        let next = datagram.fragments.partition_point(|fragment| fragment.offset < offset);
        if let Some(same) = datagram.fragments.get(next)
            && (same.offset, same.content.len()) == (offset, len)
        {
            return None;
        }
        let before =
            next.checked_sub(1).map_or(0, |n| datagram.fragments[n].offset + datagram.fragments[n].content.len());
        let behind = datagram.fragments.get(next).map(|fragment| fragment.offset);
        let last = datagram.fragments.last().map_or(0, |fragment| fragment.offset + fragment.content.len());
        // The last fragment ends the datagram: no fragment may end behind it, and there may be only
        // one.
        let contradicts = match datagram.total {
            Some(total) => end > total || !more,
            None => !more && last > end,
        };
        if before > offset || behind.is_some_and(|behind| behind < end) || contradicts {
            self.stats.overlapping += 1;
            self.poison(at);
            return None;
        }
        if datagram.fragments.len() == MAX_FRAGMENTS {
            self.stats.crowded += 1;
            self.poison(at);
            return None;
        }
        datagram.ecn |= 1 << (ip.traffic_class & Ip::ECN);
        if !more {
            datagram.total = Some(end);
        }
        if offset == 0 {
            datagram.first = Some(*ip);
        }
        datagram.fragments.insert(next, ReceivedFragment { offset, content });
        self.fragments += 1;
        let have: usize = datagram.fragments.iter().map(|fragment| fragment.content.len()).sum();
        if datagram.total == Some(have) {
            return self.complete(at, have);
        }
        if self.fragments > MAX_FRAGMENTS_IN_ALL {
            self.stats.crowded += 1;
            self.remove(0);
        }
        None
    }

    /// The first moment at which [`handle_timeout`](Self::handle_timeout) has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.datagrams.first().map(|oldest| oldest.since + TIMEOUT)
    }

    /// Drops datagrams whose time is over.
    #[inline]
    pub fn handle_timeout(&mut self, now: Time) {
        if !self.datagrams.is_empty() {
            self.drop_timed_out(now);
        }
    }

    #[cold]
    fn drop_timed_out(&mut self, now: Time) {
        while self.poll_timeout().is_some_and(|deadline| deadline <= now) {
            self.stats.timed_out += u64::from(!self.datagrams[0].poisoned);
            self.remove(0);
        }
    }

    /// Drops the oldest datagram, to make room. Returns false if there is none.
    pub fn give_up_oldest(&mut self) -> bool {
        if self.datagrams.is_empty() {
            return false;
        }
        self.stats.crowded += u64::from(!self.datagrams[0].poisoned);
        self.remove(0);
        true
    }

    /// The datagram that a fragment belongs to.
    fn datagram(&mut self, ip: &Ip, now: Time) -> usize {
        let id = ip.fragment.map_or(0, |fragment| fragment.id);
        let same = |d: &Datagram<P>| {
            // The fragment header of IPv6 can name different protocols.
            let protocol = d.protocol == ip.protocol || ip.source.is_ipv6();
            d.id == id && d.source == ip.source && d.destination == ip.destination && protocol
        };
        if let Some(at) = self.datagrams.iter().position(same) {
            return at;
        }
        if self.datagrams.len() == MAX_DATAGRAMS {
            self.stats.crowded += 1;
            self.remove(0);
        }
        let Ip { source, destination, protocol, .. } = *ip;
        let (fragments, total, first, ecn, poisoned) = (Vec::new(), None, None, 0, false);
        self.datagrams.push(Datagram {
            source,
            destination,
            id,
            protocol,
            since: now,
            fragments,
            total,
            first,
            ecn,
            poisoned,
        });
        self.datagrams.len() - 1
    }

    fn complete(&mut self, at: usize, len: usize) -> Option<Reassembled<P>> {
        let datagram = self.remove(at);
        let mut ip = datagram.first?;
        (ip.fragment, ip.content) = (None, ByteRange { at: 0, len });
        // Congestion on the way of one fragment is congestion (RFC 3168, 5.3). A router marks no
        // packet that does not know ECN.
        if datagram.ecn & 1 << Ip::CE != 0 {
            if datagram.ecn & 1 != 0 {
                self.stats.overlapping += 1;
                return None;
            }
            ip.traffic_class |= Ip::CE;
        }
        Some(Reassembled { ip, contents: datagram.fragments.into_iter().map(|fragment| fragment.content).collect() })
    }

    fn remove(&mut self, at: usize) -> Datagram<P> {
        let datagram = self.datagrams.remove(at);
        self.fragments -= datagram.fragments.len();
        datagram
    }

    fn poison(&mut self, at: usize) {
        let datagram = &mut self.datagrams[at];
        datagram.poisoned = true;
        self.fragments -= datagram.fragments.len();
        datagram.fragments = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{FragmentHeader, protocol};
    use fastrand::Rng;

    /// Bytes of a datagram.
    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Bytes(Vec<u8>);

    impl Chunk for Bytes {
        type Tail = ();

        fn len(&self) -> usize {
            self.0.len()
        }

        fn advance(&mut self, n: usize) {
            drop(self.0.drain(..n));
        }

        fn truncate(&mut self, len: usize) {
            self.0.truncate(len);
        }
    }

    const START: Time = Time::from_micros(7);

    /// The fragment of datagram `id` that has the bytes from `offset` to `end`, each of which is
    /// its place.
    fn fragment(id: u32, offset: usize, end: usize, more: bool) -> (Ip, Bytes) {
        let content = ByteRange { at: 20, len: end - offset };
        let fragment = Some(FragmentHeader { id, offset: offset as u16, more });
        let (source, destination) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let (traffic_class, protocol) = (Ip::ECT0, protocol::UDP);
        let ip = Ip { source, destination, traffic_class, hop_limit: 3, protocol, content, fragment };
        (ip, Bytes((offset..end).map(|at| (at / 8) as u8).collect()))
    }

    fn input(reassembly: &mut Reassembly<Bytes>, (ip, content): (Ip, Bytes)) -> Option<Reassembled<Bytes>> {
        reassembly.handle_fragment(&ip, content, START)
    }

    fn bytes(reassembled: &Reassembled<Bytes>) -> Vec<u8> {
        reassembled.contents.iter().flat_map(|fragment| fragment.0.clone()).collect()
    }

    /// Fragments of several datagrams, in any order and some twice: each datagram comes out once,
    /// with its bytes.
    #[test]
    fn datagrams_are_put_together_in_any_order() {
        let mut rng = Rng::with_seed(9);
        for _ in 0..500 {
            let mut reassembly = Reassembly::new();
            let mut fragments = Vec::new();
            let lengths = [rng.usize(9..3000), rng.usize(9..3000), rng.usize(9..3000)];
            for (id, &len) in lengths.iter().enumerate() {
                let mut at = 0;
                while at < len {
                    let end = at + 8 * rng.usize(1..60);
                    let (end, more) = if end < len { (end, true) } else { (len, false) };
                    fragments.push(fragment(id as u32, at, end, more));
                    at = end;
                }
            }
            rng.shuffle(&mut fragments);
            let mut out = Vec::new();
            for (ip, content) in fragments {
                let done = reassembly.handle_fragment(&ip, content.clone(), START);
                if done.is_none() && rng.u8(..4) == 0 {
                    assert!(reassembly.handle_fragment(&ip, content, START).is_none(), "twice");
                }
                out.extend(done);
            }
            assert_eq!((out.len(), reassembly.datagrams.len(), reassembly.fragments), (3, 0, 0));
            for done in out {
                let all = bytes(&done);
                assert!(
                    lengths.contains(&all.len()) && all.iter().enumerate().all(|(at, &byte)| byte == (at / 8) as u8)
                );
                assert_eq!((done.ip.content, done.ip.fragment), (ByteRange { at: 0, len: all.len() }, None));
            }
            assert_eq!(reassembly.stats(), ReassemblyStats::default());
        }
    }

    /// RFC 5722: what overlaps or contradicts is dropped as a whole, with what comes of it later.
    #[test]
    fn a_datagram_with_an_overlap_is_dropped_for_good() {
        let overlaps: [&[(usize, usize, bool)]; 7] = [
            &[(0, 16, true), (8, 24, true)],
            &[(8, 24, true), (0, 16, true)],
            &[(0, 24, true), (8, 16, true)],
            &[(8, 16, true), (0, 24, true)],
            &[(0, 16, true), (0, 8, true)],
            // Two ends, and a fragment behind the end.
            &[(16, 24, false), (24, 32, false)],
            &[(16, 32, true), (8, 16, false)],
        ];
        for overlap in overlaps {
            let mut reassembly = Reassembly::new();
            for &(offset, end, more) in overlap {
                assert!(input(&mut reassembly, fragment(1, offset, end, more)).is_none());
            }
            assert_eq!((reassembly.stats().overlapping, reassembly.fragments), (1, 0), "{overlap:?}");
            for (offset, more) in [(0, true), (8, true), (16, true), (24, false)] {
                assert!(input(&mut reassembly, fragment(1, offset, offset + 8, more)).is_none());
            }
            // Another datagram is not concerned.
            assert!(input(&mut reassembly, fragment(2, 0, 8, true)).is_none());
            assert!(input(&mut reassembly, fragment(2, 8, 9, false)).is_some());
        }
        let mut reassembly = Reassembly::new();
        for wrong in [(0, 9, true), (8, 8, false), (65_528, 65_536, false)] {
            assert!(input(&mut reassembly, fragment(1, wrong.0, wrong.1, wrong.2)).is_none());
        }
        assert_eq!((reassembly.stats().malformed, reassembly.datagrams.len()), (3, 0));
    }

    /// Proves NET-10: number, fragments and time are bounded.
    #[test]
    fn what_is_kept_is_bounded() {
        let mut reassembly = Reassembly::new();
        for n in 0..100_000_u32 {
            let offset = 8 * (n as usize % 3 + 1) * (n as usize % 997 + 1);
            let _ = input(&mut reassembly, fragment(n / 20, offset, offset + 8, true));
            let kept: usize = reassembly.datagrams.iter().map(|datagram| datagram.fragments.len()).sum();
            assert_eq!(kept, reassembly.fragments);
            assert!(reassembly.datagrams.len() <= MAX_DATAGRAMS && kept <= MAX_FRAGMENTS_IN_ALL);
        }
        let mut reassembly = Reassembly::new();
        for id in 0..1000 {
            let _ = input(&mut reassembly, fragment(id, 0, 8, true));
            assert!(reassembly.datagrams.len() <= MAX_DATAGRAMS);
        }
        let mut reassembly = Reassembly::new();
        for n in 1..1000 {
            let _ = input(&mut reassembly, fragment(1, 16 * n, 16 * n + 8, true));
            assert!(reassembly.fragments <= MAX_FRAGMENTS);
        }
        let mut reassembly = Reassembly::new();
        let _ = input(&mut reassembly, fragment(1, 0, 8, true));
        assert_eq!(reassembly.poll_timeout(), Some(START + TIMEOUT));
        let (ip, content) = fragment(1, 8, 9, false);
        assert!(reassembly.handle_fragment(&ip, content, START + TIMEOUT).is_none());
        assert_eq!((reassembly.stats().timed_out, reassembly.fragments), (1, 1));
    }

    /// RFC 3168, 5.3.
    #[test]
    fn congestion_marks_of_fragments_count_for_the_datagram() {
        let together = |first: u8, second: u8| {
            let mut reassembly = Reassembly::new();
            let with = |(ip, content): (Ip, Bytes), ecn| (Ip { traffic_class: 0x28 | ecn, ..ip }, content);
            assert!(input(&mut reassembly, with(fragment(1, 0, 8, true), first)).is_none());
            input(&mut reassembly, with(fragment(1, 8, 9, false), second)).map(|done| done.ip.traffic_class)
        };
        assert_eq!(together(Ip::ECT0, Ip::ECT0), Some(0x28 | Ip::ECT0));
        assert_eq!(
            (together(Ip::ECT0, Ip::CE), together(Ip::CE, Ip::ECT0)),
            (Some(0x28 | Ip::CE), Some(0x28 | Ip::CE))
        );
        assert_eq!((together(0, 0), together(0, Ip::CE)), (Some(0x28), None));
    }
}
