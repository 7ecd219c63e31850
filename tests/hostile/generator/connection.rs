//! A connection in simple form: its numbers, and what has arrived.

use super::frame::{ACK, Arrived, FIN, MSS, RST, SYN, Segment};
use std::net::SocketAddr;

/// The largest segment: 1500 bytes without headers of IPv4 or IPv6 and TCP.
pub fn mss(address: SocketAddr) -> usize {
    if address.is_ipv4() { 1460 } else { 1440 }
}

/// The peer's end of a connection.
#[derive(Debug)]
pub struct Connection {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The number of the next byte that is sent, and of the oldest that the server has not
    /// acknowledged.
    pub next: u32,
    pub una: u32,
    /// The number of the next byte that is expected.
    pub expected: u32,
    /// The number that was acknowledged last.
    acknowledged: u32,
    /// The server's window.
    pub window: u16,
    /// Received bytes in order that the test has not read yet.
    pub received: Vec<u8>,
    /// Bytes that may still be received. `None`: the window is always open.
    pub room: Option<u32>,
    /// Whether what arrives is acknowledged.
    pub acknowledges: bool,
    pub established: bool,
    /// The server's FIN, or a reset, has arrived.
    pub finished: bool,
    pub reset: bool,
    /// The server has answered SYN by an acknowledgement of this number: it has another connection
    /// of these addresses and ports.
    pub challenged: Option<u32>,
    /// Acknowledgements in a row that acknowledge nothing new.
    pub repeated: u32,
    /// Payload of the largest segment. The test sets it back.
    pub largest: usize,
    /// The Ethernet address that the last segment was sent to.
    pub mac: [u8; 6],
}

impl Connection {
    /// A connection whose SYN is still to be sent.
    pub fn new(local: SocketAddr, remote: SocketAddr, start: u32) -> Self {
        Self {
            local,
            remote,
            next: start,
            una: start,
            expected: 0,
            acknowledged: 0,
            window: 0,
            received: Vec::new(),
            room: None,
            acknowledges: true,
            established: false,
            finished: false,
            reset: false,
            challenged: None,
            repeated: 0,
            largest: 0,
            mac: [0; 6],
        }
    }

    /// A segment with the present numbers. Its sequence number is the next one and `ahead`.
    pub fn segment<'a>(&mut self, ahead: u32, flags: u8, payload: &'a [u8]) -> Segment<'a> {
        if self.acknowledges {
            self.acknowledged = self.expected;
        }
        Segment {
            from: self.local,
            to: self.remote,
            seq: self.next.wrapping_add(ahead),
            ack: if flags & ACK == 0 { 0 } else { self.acknowledged },
            flags,
            window: self.room.map_or(u16::MAX, |room| u16::try_from(room).unwrap_or(u16::MAX)),
            options: if flags & SYN == 0 { &[] } else { &MSS },
            payload,
        }
    }

    /// The number of the oldest byte that the server has in flight.
    pub fn unacknowledged(&self) -> u32 {
        self.acknowledged
    }

    /// Bytes that were sent and not acknowledged.
    pub fn in_flight(&self) -> usize {
        self.next.wrapping_sub(self.una) as usize
    }

    /// The server has acknowledged all.
    pub fn is_acknowledged(&self) -> bool {
        self.una == self.next
    }

    /// The connection is open in both directions.
    pub fn is_open(&self) -> bool {
        self.established && !self.finished && !self.reset
    }

    /// Processes a segment. Returns whether it must be acknowledged.
    pub fn arrives(&mut self, segment: &Arrived<'_>) -> bool {
        let has = |flag| segment.flags & flag != 0;
        self.mac = segment.mac;
        if has(RST) {
            self.reset = true;
            return false;
        }
        if has(SYN) {
            let answers = has(ACK) && segment.ack == self.next;
            if !self.established && answers {
                (self.established, self.expected, self.una) = (true, segment.seq.wrapping_add(1), segment.ack);
                (self.window, self.acknowledged) = (segment.window, self.expected);
            }
            return answers && self.acknowledges;
        }
        if !self.established {
            self.challenged = Some(segment.ack);
            return false;
        }
        self.is_acknowledged_by(segment);
        let (len, before) = (segment.payload.len(), self.expected.wrapping_sub(segment.seq));
        if let Some(new) = segment.payload.get(before as usize..).filter(|_| before as i32 >= 0) {
            let room = self.room.map_or(usize::MAX, |room| room as usize);
            let new = &new[..new.len().min(room)];
            self.received.extend_from_slice(new);
            self.room = self.room.map(|room| room - new.len() as u32);
            self.expected = self.expected.wrapping_add(new.len() as u32);
        }
        self.largest = self.largest.max(segment.size);
        if has(FIN) && segment.seq.wrapping_add(len as u32) == self.expected && !self.finished {
            (self.finished, self.expected) = (true, self.expected.wrapping_add(1));
        }
        // A segment before the window is a probe.
        self.acknowledges && (len > 0 || has(FIN) || before != 0)
    }

    fn is_acknowledged_by(&mut self, segment: &Arrived<'_>) {
        let new = segment.ack.wrapping_sub(self.una);
        if new != 0 && new <= self.next.wrapping_sub(self.una) {
            (self.una, self.repeated) = (segment.ack, 0);
        } else if new == 0 && segment.payload.is_empty() && self.in_flight() > 0 {
            self.repeated += 1;
        }
        self.window = segment.window;
    }
}
