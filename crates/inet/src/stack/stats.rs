//! The counters of a stack.

/// The counters of a stack. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StackStats {
    /// Frames that were received. Segments that were merged count as one.
    pub received: u64,
    /// Frames that were posted to the device.
    pub sent: u64,
    /// Frames for this host's own addresses, which went to no device.
    pub looped: u64,
    /// Frames that were handed over to another stack.
    pub handed_over: u64,
    /// Frames that were not handed over, because the other stack's mailbox was full.
    pub mailbox_full: u64,
    /// Frames whose headers are wrong, or of protocols that are not known.
    pub malformed: u64,
    /// Frames for other stations.
    pub foreign: u64,
    /// Packets whose transport checksum is wrong.
    pub wrong_checksum: u64,
    /// Packets in memory that this process cannot read, whose checksum the device has not verified.
    /// They are dropped, and not acknowledged.
    pub unverified: u64,
    /// Frames that the stack had to read and that are in memory which it cannot read: their
    /// headers, or payload that belongs to no connection.
    pub unreadable: u64,
    /// Received packets whose payload was read to verify their checksum, because the device had not
    /// verified it.
    pub checksummed_received: u64,
    /// Sent packets whose payload was read to compute their checksum, because the device computes
    /// none.
    pub checksummed_sent: u64,
    /// Bytes of received payload that were copied to users.
    pub copied_received: u64,
    /// Bytes that were copied into pages to be sent.
    pub copied_sent: u64,
    /// Segments that were dropped because their connection is between two stacks.
    pub departed: u64,
    /// Resets for segments of no connection.
    pub resets: u64,
    /// ICMP errors that were sent.
    pub icmp_errors: u64,
    /// Frames that were not sent because there was no page.
    pub no_page: u64,
    /// Frames that were dropped because the transmit queue never accepts them: it has stopped.
    pub refused: u64,
    /// Packets that were dropped because their next hop did not answer.
    pub unresolved: u64,
    /// Segments for listeners that were dropped because the stack has its most connections, or has
    /// no route to the sender.
    pub no_room: u64,
    /// Acknowledgements that were dropped because the accept queue was full.
    pub accept_overflows: u64,
    /// Connections that ended before they were accepted: their peers reset them, or gave up. Each
    /// stays in its accept queue, and counts towards the backlog, until it is accepted: what was
    /// received can be read, then the error.
    pub ended_unaccepted: u64,
    /// Received datagrams that were dropped because their socket had no room.
    pub datagrams_dropped: u64,
    /// Datagrams that were dropped before they reached the transmit queue: there was no route to
    /// their destination any more, no page for their headers, or they were longer than the path
    /// admits and are never fragmented. Each datagram of a group counts.
    pub datagrams_unsent: u64,
    /// Lookups of destination entries. Each is a get and later a put. A connection needs one, a
    /// datagram two.
    pub lookups: u64,
    /// Packets whose payload was dropped because the queue had too few buffers posted.
    pub short: u64,
    /// Fragments, and frames for other stacks, that were dropped because the page budget was used
    /// up.
    pub over_budget: u64,
    /// Chunks of payload out of order that were dropped because payload of another connection was
    /// in order, and no page was free for it.
    pub evicted: u64,
}
