//! The report at the end of a server.

use super::Done;
use super::client::Counts;

/// What the stacks have served.
pub(super) fn summary<S>(done: &[Done<S>]) -> String {
    let mut all = Counts::default();
    let (mut copied_received, mut copied_sent, mut wrong, mut handed_over, mut full) = (0, 0, 0, 0, 0);
    for Done { counts, stats, .. } in done {
        all.add(counts);
        copied_received += stats.copied_received;
        copied_sent += stats.copied_sent;
        wrong += stats.wrong_checksum;
        handed_over += stats.handed_over;
        full += stats.mailbox_full;
    }
    let Counts { connections, broken, refused, idle, late, stopped, received, sent } = all;
    let mut summary = format!(
        "served {connections} connections, {broken} of them broken: {received} bytes received ({copied_received} copied), {sent} bytes sent \
         ({copied_sent} copied)\nlimits: {refused} connections refused; {idle} closed as idle, {late} in the middle of a request; {stopped} \
         reset because they kept pages\nstack: {wrong} packets with a wrong checksum\n"
    );
    if done.len() > 1 {
        let queues: Vec<_> = done.iter().map(|done| done.counts.connections.to_string()).collect();
        let queues = queues.join(", ");
        summary += &format!(
            "queues: connections {queues}; {handed_over} frames came by another queue than their connection's, {full} more were dropped\n"
        );
    }
    summary
}
