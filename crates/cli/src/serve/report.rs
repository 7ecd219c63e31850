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
    let mut all = Counts::default();
    let mut stacks = Stacks::default();
    for Done { counts, stats, listener, .. } in done {
        all.add(counts);
        stacks.add(stats, listener);
    }
    let Counts { connections, broken, refused, idle, late, stopped, received, sent } = all;
    let Stacks { copied_received, copied_sent, handed_over, mailbox_full, .. } = stacks;
    let mut summary = format!(
        "served {connections} connections, {broken} of them broken: {received} bytes received ({copied_received} copied), {sent} bytes sent \
         ({copied_sent} copied)\nlimits: {refused} connections refused; {idle} closed as idle, {late} in the middle of a request; {stopped} \
         reset because they kept pages\n"
    );
    summary += &stacks.to_string();
    if done.len() > 1 {
        let queues: Vec<_> = done.iter().map(|done| done.counts.connections.to_string()).collect();
        let queues = queues.join(", ");
        summary += &format!(
            "queues: connections {queues}; {handed_over} frames came by another queue than their connection's, {mailbox_full} more were dropped\n"
        );
    }
    summary
}

/// The sums of the counters of the stacks and of their listeners.
#[derive(Debug, Default)]
struct Stacks {
    copied_received: u64,
    copied_sent: u64,
    handed_over: u64,
    mailbox_full: u64,
    /// Received and dropped. As all lists here: numbers, and the words behind them.
    dropped: [(u64, &'static str); 5],
    not_sent: [(u64, &'static str); 3],
    /// What happens to handshakes and to segments without a connection.
    handshakes: [(u64, &'static str); 5],
}

impl Stacks {
    fn add(&mut self, stats: &StackStats, listener: &ListenerStats) {
        self.copied_received += stats.copied_received;
        self.copied_sent += stats.copied_sent;
        self.handed_over += stats.handed_over;
        self.mailbox_full += stats.mailbox_full;
        add(
            &mut self.dropped,
            [
                (stats.malformed, "malformed frames"),
                (stats.wrong_checksum, "packets with a wrong checksum"),
                (stats.short, "packets for want of posted buffers"),
                (stats.over_budget, "fragments and frames of other queues above the page budget"),
                (stats.evicted, "pieces out of order for want of pages"),
            ],
        );
        add(
            &mut self.not_sent,
            [
                (stats.no_page, "frames for want of pages"),
                (stats.unresolved, "packets whose next hop did not answer"),
                (stats.refused, "frames of a queue that has stopped"),
            ],
        );
        add(
            &mut self.handshakes,
            [
                (listener.cookies, "SYNs answered by a cookie"),
                (listener.overflows, "segments dropped because the accept queue was full"),
                (stats.no_room, "segments dropped for want of a connection or a route"),
                (stats.ended_unaccepted, "connections that ended before they were accepted"),
                (stats.resets, "resets for segments of no connection"),
            ],
        );
    }
}

fn add<const N: usize>(to: &mut [(u64, &'static str); N], numbers: [(u64, &'static str); N]) {
    for ((sum, words), (n, its)) in to.iter_mut().zip(numbers) {
        *sum += n;
        *words = its;
    }
}

impl std::fmt::Display for Stacks {
    /// Numbers that are 0 are left out, and so is a line without numbers.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { dropped, not_sent, handshakes, .. } = self;
        let lines: [(_, &[_]); 3] =
            [("received and dropped", dropped), ("not sent", not_sent), ("handshakes", handshakes)];
        for (name, numbers) in lines {
            let numbers: Vec<_> =
                numbers.iter().filter(|&&(n, _)| n > 0).map(|(n, words)| format!("{n} {words}")).collect();
            if !numbers.is_empty() {
                writeln!(f, "{name}: {}", numbers.join(", "))?;
            }
        }
        Ok(())
    }
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
        let mut stacks = Stacks::default();
        assert_eq!(stacks.to_string(), "");
        let first = stats(|stats, listener| {
            (stats.wrong_checksum, stats.no_page, stats.unresolved, stats.resets) = (1, 2, 3, 4);
            (listener.cookies, listener.overflows) = (5, 6);
        });
        let second = stats(|stats, listener| {
            (stats.no_page, stats.refused, stats.short, stats.over_budget, stats.no_room) = (10, 20, 30, 40, 50);
            (stats.ended_unaccepted, stats.malformed, stats.evicted, listener.cookies) = (60, 70, 80, 90);
        });
        for (stats, listener) in [first, stats(|_, _| {}), second] {
            stacks.add(&stats, &listener);
        }
        assert_eq!(
            stacks.to_string(),
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
