//! The report at the end of a server.

use super::client::Counts;
use super::state::Left;
use netmem_inet::{ListenerStats, StackStats};

/// The results of a stack's thread.
pub(super) struct Done<S> {
    pub(super) counts: Counts,
    pub(super) stats: StackStats,
    pub(super) listener: ListenerStats,
    /// Saved connections that could not be restored.
    pub(super) lost: u64,
    /// Connections that are saved for the next process.
    pub(super) left: Vec<Left<S>>,
}

/// What the stacks have served.
pub(super) fn summary<S>(done: &[Done<S>]) -> String {
    let sum = |of: fn(&StackStats) -> u64| done.iter().map(|done| of(&done.stats)).sum::<u64>();
    let mut all = Counts::default();
    done.iter().for_each(|done| all.add(&done.counts));
    let Counts { connections, broken, refused, idle, late, stopped, received, sent } = all;
    let (copied_received, copied_sent) = (sum(|stats| stats.copied_received), sum(|stats| stats.copied_sent));
    let mut summary = format!(
        "served {connections} connections, {broken} of them broken: {received} bytes received ({copied_received} copied), {sent} bytes sent \
         ({copied_sent} copied)\nlimits: {refused} connections refused; {idle} closed as idle, {late} in the middle of a request; {stopped} \
         reset because they kept pages\n"
    );
    summary += &counters(done.iter().map(|done| (&done.stats, &done.listener)));
    if done.len() > 1 {
        let queues: Vec<_> = done.iter().map(|done| done.counts.connections.to_string()).collect();
        let queues = queues.join(", ");
        let (handed_over, mailbox_full) = (sum(|stats| stats.handed_over), sum(|stats| stats.mailbox_full));
        summary += &format!(
            "queues: connections {queues}; {handed_over} frames came by another queue than their connection's, {mailbox_full} more were dropped\n"
        );
    }
    summary
}

/// A counter: the line on which it is printed, its number, and the words behind the number.
type Counter = (&'static str, u64, &'static str);

/// The counters of a stack and of its listener: of frames, and of handshakes and segments without a
/// connection.
fn counters_of(stats: &StackStats, listener: &ListenerStats) -> [Counter; 13] {
    const DROPPED: &str = "received and dropped";
    const NOT_SENT: &str = "not sent";
    const HANDSHAKES: &str = "handshakes";
    [
        (DROPPED, stats.malformed, "malformed frames"),
        (DROPPED, stats.wrong_checksum, "packets with a wrong checksum"),
        (DROPPED, stats.short, "packets for want of posted buffers"),
        (DROPPED, stats.over_budget, "fragments and frames of other queues above the page budget"),
        (DROPPED, stats.evicted, "pieces out of order for want of pages"),
        (NOT_SENT, stats.no_page, "frames for want of pages"),
        (NOT_SENT, stats.unresolved, "packets whose next hop did not answer"),
        (NOT_SENT, stats.refused, "frames of a queue that has stopped"),
        (HANDSHAKES, listener.cookies, "SYNs answered by a cookie"),
        (HANDSHAKES, listener.overflows, "segments dropped because the accept queue was full"),
        (HANDSHAKES, stats.no_room, "segments dropped for want of a connection or a route"),
        (HANDSHAKES, stats.ended_unaccepted, "connections that ended before they were accepted"),
        (HANDSHAKES, stats.resets, "resets for segments of no connection"),
    ]
}

/// The sums of the counters, in lines. Sums of 0 are left out, and so is a line without sums.
fn counters<'a>(stacks: impl Iterator<Item = (&'a StackStats, &'a ListenerStats)>) -> String {
    let mut sums = counters_of(&StackStats::default(), &ListenerStats::default());
    for (stats, listener) in stacks {
        sums.iter_mut().zip(counters_of(stats, listener)).for_each(|(sum, (_, n, _))| sum.1 += n);
    }
    let counted: Vec<Counter> = sums.into_iter().filter(|&(_, n, _)| n > 0).collect();
    let line = |line: &[Counter]| {
        let numbers: Vec<_> = line.iter().map(|(_, n, words)| format!("{n} {words}")).collect();
        format!("{}: {}\n", line[0].0, numbers.join(", "))
    };
    counted.chunk_by(|a, b| a.0 == b.0).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `StackStats` and `ListenerStats` grow by fields: they cannot be written as literals here.
    fn stats(set: impl FnOnce(&mut StackStats, &mut ListenerStats)) -> (StackStats, ListenerStats) {
        let (mut stats, mut listener) = Default::default();
        set(&mut stats, &mut listener);
        (stats, listener)
    }

    #[test]
    fn counters_of_the_stacks_are_printed_unless_they_are_0() {
        assert_eq!(counters([].into_iter()), "");
        let first = stats(|stats, listener| {
            (stats.wrong_checksum, stats.no_page, stats.unresolved, stats.resets) = (1, 2, 3, 4);
            (listener.cookies, listener.overflows) = (5, 6);
        });
        let second = stats(|stats, listener| {
            (stats.no_page, stats.refused, stats.short, stats.over_budget, stats.no_room) = (10, 20, 30, 40, 50);
            (stats.ended_unaccepted, stats.malformed, stats.evicted, listener.cookies) = (60, 70, 80, 90);
        });
        let stacks = [first, stats(|_, _| {}), second];
        assert_eq!(
            counters(stacks.iter().map(|(stats, listener)| (stats, listener))),
            "received and dropped: 70 malformed frames, 1 packets with a wrong checksum, 30 packets for want of posted buffers, \
             40 fragments and frames of other queues above the page budget, 80 pieces out of order for want of pages\n\
             not sent: 12 frames for want of pages, 3 packets whose next hop did not answer, 20 frames of a queue that has \
             stopped\n\
             handshakes: 95 SYNs answered by a cookie, 6 segments dropped because the accept queue was full, 50 segments \
             dropped for want of a connection or a route, 60 connections that ended before they were accepted, 4 resets \
             for segments of no connection\n"
        );
    }
}
